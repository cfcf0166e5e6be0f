"""The loss along a step: its minimum, where it first rises, and where it is above its initial value.

The radius (see `radius`) is about a Taylor series. This measures the loss itself, by forward passes at
multiples of the radius, and then between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.replicas import on_all_ranks
from theodolite.present.result import Block, Result
from theodolite.present.text import Table
from theodolite.probes.curvature.axes import Axes
from theodolite.probes.curvature.landscape import losses
from theodolite.probes.steps.direction import Direction
from theodolite.probes.steps.radius import Radius, prepare, radius

MULTIPLES = np.geomspace(1e-2, 1e2, 33)
"""Default lengths, in units of the radius."""
CLOSE = 1e-2
"""Relative accuracy of the lengths that are found."""
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, eq=False)
class Profile(Result):
    """The loss along a step. Made by `profile`."""

    kind: ClassVar[str] = "profile"

    radius: Radius
    lengths: NDArray[np.float64]
    """Where the loss was measured, from 0."""
    losses: NDArray[np.float64]
    """The loss at these lengths; may hold nan and inf."""
    lowest: float
    """The lowest loss, at the lengths or at the first minimum between them."""
    falls_to: float
    """The length of the lowest loss."""
    rises_at: float
    """Where the loss first rises: 0 if at once, infinite if at no length."""
    above_at: float
    """Where it is first above the loss at 0, or not finite; infinite if at no length."""

    @property
    def onset(self) -> float:
        """`above_at/ρ_a`: the r from which on the step raises the loss."""
        return self.above_at / self.radius.value

    def blocks(self) -> Iterator[Block]:
        """The radius, and where the loss falls to, rises and is above its start."""
        unit, end = self.radius.value, float(self.lengths[-1])
        falls, rises, above = (_at(one, unit, end) for one in (self.falls_to, self.rises_at, self.above_at))
        yield from self.radius.blocks()
        yield (
            f"the loss goes from {self.losses[0]:.4g} down to {self.lowest:.4g} at {falls}\n"
            f"it first rises at {rises}, and is above its start from {above} on"
        )

    def table(self) -> Table:
        """The loss at each length."""
        rows = zip(self.lengths.tolist(), self.losses.tolist(), strict=True)
        return Table(("length", "loss"), list(rows))


@exclusive()
@on_all_ranks
def profile(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    direction: Direction = None,
    *,
    lengths: Sequence[float] | None = None,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
) -> Profile:
    """The loss along a step, beside its radius.

    Args:
        model: any module, in train or eval mode as it is; wrapped or not. It is not changed.
        loss: a cross-entropy of the softmax of the logits.
        batch: a pair (inputs, targets), or several: the mean over all.
        direction: as in `radius`.
        lengths: where to measure, in units of the radius; 33 from 1/100 to 100 if left out. In units of the
            step itself if it has no radius.
        parameters: patterns of the names that may move.
        temperature: the loss is taken of logits/temperature.

    Costs as much as `radius`, a forward pass for each length, and about ten more for each length found.

    >>> layer = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(layer.weight)
    >>> batch = torch.tensor([[1.0], [-2.0]]), torch.tensor([0, 0])
    >>> found = profile(layer, nn.functional.cross_entropy, batch)
    >>> 0 < found.falls_to < found.above_at < math.inf
    True
    """
    multiples = MULTIPLES if lengths is None else np.unique(np.asarray(lengths, dtype=np.float64))
    if not multiples.size or not (np.isfinite(multiples) & (multiples > 0)).all():
        raise UseError(f"lengths is {lengths!r}: give at least one positive, finite number")
    objective, _, step = prepare(model, loss, batch, direction, parameters, temperature)
    measured = radius(model, loss, batch, step, parameters=objective.names, temperature=temperature)
    unit = {name: tensor / measured.length for name, tensor in step.items()}
    scale = measured.value if math.isfinite(measured.value) else measured.length
    places = np.concatenate([[0.0], scale * multiples])
    line = Axes("checkpoints", (unit,), ("step",))

    def at(some: NDArray[np.float64]) -> NDArray[np.float64]:
        return losses(objective, line, torch.from_numpy(some)[:, None]).numpy()

    values = at(places)
    noise = 16 * torch.finfo(objective.dtype).eps * max(1.0, abs(float(values[0])))
    first, rises = _rises(at, places, values, noise, measured.slope)
    above = _above(at, places, values, noise, measured.slope)
    finite = np.isfinite(values)
    lowest, falls_to = min([(first, rises), *zip(values[finite], places[finite], strict=True)])
    return Profile(measured, places, values, float(lowest), float(falls_to), rises, above)


Loss1D = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def _rises(
    at: Loss1D, places: NDArray[np.float64], values: NDArray[np.float64], noise: float, slope: float
) -> tuple[float, float]:
    """The loss and the length of the first minimum, by golden-section search."""
    if slope > 0:
        return float(values[0]), 0.0
    lowest = 0
    for place in range(1, len(places)):
        if not values[place] <= values[lowest] + noise:  # nan too
            break
        if values[place] < values[lowest]:
            lowest = place
    else:
        return math.inf, math.inf
    low, high = places[max(lowest - 1, 0)], places[lowest + 1]
    best = float(values[lowest]), float(places[lowest])
    while high - low > CLOSE * max(high, places[1]):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        one, other = at(np.array([left, right]))
        best = min(best, (float(one), float(left)), (float(other), float(right)))
        low, high = (low, right) if one <= other or math.isnan(other) else (left, high)
    return best


def _above(
    at: Loss1D, places: NDArray[np.float64], values: NDArray[np.float64], noise: float, slope: float
) -> float:
    """Where the loss is first above its start, by bisection."""
    if slope > 0:
        return 0.0
    beyond = [place for place in range(1, len(places)) if not values[place] <= values[0] + noise]
    if not beyond:
        return math.inf
    low, high = places[beyond[0] - 1], places[beyond[0]]
    while high - low > CLOSE * max(high, places[1]):
        middle = (low + high) / 2
        low, high = (middle, high) if at(np.array([middle]))[0] <= values[0] + noise else (low, middle)
    return float((low + high) / 2)


def _at(where: float, unit: float, end: float) -> str:
    if math.isinf(where):
        return f"no length to {end:.4g}"
    return f"{where:.4g}" + (f" (r = {where / unit:.3g})" if math.isfinite(unit) else "")
