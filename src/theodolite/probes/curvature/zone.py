"""The curvature along the two ways through the Goldilocks zone: temperature and the scale of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.curvature import Curvature, measure
from theodolite.probes.curvature.directions import draw
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.replicas import on_all_ranks
from theodolite.probes.curvature.rescaling import scaled


@exclusive()
@on_all_ranks
def along_temperature(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    temperatures: Sequence[float],
    *,
    directions: int = 50,
    parameters: str | Sequence[str] | None = None,
    seed: int = 0,
) -> tuple[Curvature, ...]:
    """The curvature of the loss of logits/T for each temperature T, all from one sweep.

    >>> import torch, theodolite as th
    >>> batch = torch.randn(16, 8), torch.randint(3, (16,))
    >>> model = th.models.LeNet300(12, inputs=8, outputs=3)
    >>> [one.temperature for one in along_temperature(model, nn.functional.cross_entropy, batch, [0.1, 10.0])]
    [0.1, 10.0]
    """
    temperatures = list(temperatures)  # an array has no truth value
    if not temperatures:
        raise UseError("temperatures is empty: give at least one")
    for temperature in temperatures:
        Objective(model, loss, batch, parameters=parameters, temperature=temperature)  # each is checked
    objective = Objective(model, loss, batch, parameters=parameters)
    rays = draw(objective.shapes, directions, seed=seed, dtype=objective.dtype, device=objective.device)
    return measure(objective, rays, temperatures)


@exclusive()
@on_all_ranks
def along_scale(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    scales: Sequence[float],
    *,
    temperatures: Sequence[float] | None = None,
    directions: int = 50,
    parameters: str | Sequence[str] | None = None,
    seed: int = 0,
) -> tuple[Curvature, ...]:
    """The curvature at `αθ` for each scale α of weights and biases; norms keep their gains and shifts.

    Args:
        model, loss, batch, directions, parameters, seed: as in `curvature`.
        scales: the values of α.
        temperatures: one for each α, 1 if left out. `T = α^L` is the joint scaling under which the curvature
            of a homogeneous network of L layers does not change its shape.
    """
    scales = list(scales)
    if not scales:
        raise UseError("scales is empty: give at least one")
    objective = Objective(model, loss, batch, parameters=parameters)
    rays = draw(objective.shapes, directions, seed=seed, dtype=objective.dtype, device=objective.device)
    temperatures = [1.0] * len(scales) if temperatures is None else list(temperatures)
    if len(temperatures) != len(scales):
        raise UseError(
            f"there are {len(scales)} scales and {len(temperatures)} temperatures: give one for each"
        )
    found: list[Curvature] = []
    for scale, temperature in zip(scales, temperatures, strict=True):
        with scaled(model, scale):
            found += measure(objective, rays, [temperature])
    return tuple(found)
