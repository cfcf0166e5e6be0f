"""How a norm's gain changes the speed at which the linear maps behind it learn.

With the scale vectors of `scale_vectors`, `A = W diag γ` and `G = ∂L/∂A`, a gradient step on W and γ moves A,
to first order in the step, by

    dA = −[G diag γ² + W diag(colsum(W∘G))],    da_j = −P_j g_j,    P_j = γ_j²I + w_j w_jᵀ

against −G if A itself were trained: the vector is a preconditioner. P_j has the eigenvalue `γ_j² + ‖w_j‖²`
along w_j and γ_j² across it. As the map grows, so does its learning rate.

References:
    Negligible in size, significant in effect: on scale vectors in large language models, 2026.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.anatomy.recording.undisturbed import undisturbed
from theodolite.core.batches import Batch, device_of, differentiable
from theodolite.core.building import untouched_randomness
from theodolite.core.calling import Loss, described, evaluate
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, number
from theodolite.probes.gains.scale_vectors import (
    ScaledMap,
    ScaleVector,
    find_maps,
    find_vectors,
    obstacles,
    replaced,
)
from theodolite.probes.steps.update import optimizer_step
from theodolite.surgery.edits import Held, held
from theodolite.surgery.fold_map import along


@dataclass(frozen=True)
class MapMove:
    """How far one linear map moves in a step on its weight and gain."""

    weight: str
    move: float
    """`‖dA‖/‖G‖`: in a small gradient step, relative to the same step on A itself."""
    fall: float
    """`⟨G, −dA⟩/‖G‖²`: the fall of the loss, relative to the same."""
    step: float | None
    """`‖ΔA‖/‖A‖` of the optimizer's step, to first order; None without an optimizer."""
    step_by_weight: float | None
    """The same if only W had moved."""


@dataclass(frozen=True)
class Preconditioning(Result):
    """The preconditioner of every map that reads an Input-Norm. Made by `preconditioning`."""

    kind: ClassVar[str] = "preconditioning"
    vectors: tuple[ScaleVector, ...]
    maps: tuple[MapMove, ...]
    fall: float
    """`Σ⟨G, −dA⟩/Σ‖G‖²`, over all maps."""

    def blocks(self) -> Iterator[Block]:
        """Medians over the columns of each scale vector, and the speed of the maps."""
        names = ("γ²+‖w‖²", "10 %", "90 %", "γ²−‖w‖²")
        speeds = [Column(name, lambda value: number(value, 4)) for name in names]
        rows = [_vector_row(one) for one in self.vectors]
        yield Table(("scale vector", "columns", "γ²", "‖w‖²", *speeds), rows)
        yield obstacles(self.vectors)
        yield self.table()

    def table(self) -> Table:
        """One row for each map."""
        rows = [*map(astuple, self.maps), ("all", None, self.fall, None, None)]
        return Table(("map", "‖dA‖/‖G‖", "fall", "‖ΔA‖/‖A‖", "by W alone"), rows)


@exclusive()
def preconditioning(
    model: nn.Module, loss: Loss, batch: Batch, *, optimizer: Optimizer | None = None
) -> Preconditioning:
    """Read the scale vectors of a network's Input-Norms as preconditioners.

    Args:
        model: any module that `theodolite.dissect` understands, converted by `theodolite.surgery` or not.
            Dropout is off. It is left unchanged.
        loss: `loss(logits, targets) -> scalar`.
        batch: a pair (inputs, targets).
        optimizer: measure its next step too, with the gradient of this batch.

    Each scale vector counts all columns that it multiplies: maps that share a gain share a vector, and
    gradient flow conserves `γ_j² − Σ‖w_j‖²` over all of them. A LayerNorm's shift counts as part of the maps'
    biases.

    >>> import theodolite as th
    >>> model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4, bias=False)).double()
    >>> _ = nn.init.eye_(model[1].weight), nn.init.constant_(model[0].weight, 2.0)
    >>> batch = torch.randn(8, 4).double(), torch.zeros(8, 4).double()
    >>> found = preconditioning(model, nn.functional.mse_loss, batch)
    >>> found.vectors[0].speeds, found.vectors[0].balance
    (tensor([5., 5., 5., 5.], dtype=torch.float64), tensor([3., 3., 3., 3.], dtype=torch.float64))
    >>> 4 <= found.fall <= 5                                              # between the eigenvalues of P
    True
    """
    inner = unwrap(model)
    loss = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss
    with torch.inference_mode(False):
        inputs, targets = differentiable(batch, str(device_of(inner)))
    maps = find_maps(inner, inputs)
    with untouched_randomness(0), undisturbed(inner), torch.enable_grad():
        gradients = _effective_gradients(inner, loss, inputs, targets, maps)
        effective = [one.effective() for one in maps]
        parameters = {name: tensor for name, tensor in canonical_parameters(inner) if tensor.requires_grad}
        slopes = _slopes(_evaluated(inner, loss, inputs, targets), parameters)
        moves = _pushed(effective, parameters, slopes)
        steps: Sequence[Tensor | None] = [None] * len(maps)
        by_weight = steps
        if optimizer is not None:
            update = _update(inner, parameters, slopes, optimizer)
            raw = {id(one.raw) for one in maps}
            alone = {name: step for name, step in update.items() if id(parameters[name]) in raw}
            steps, by_weight = (_pushed(effective, parameters, one) for one in (update, alone))
        vectors = find_vectors(inner, maps)
    rows = [
        MapMove(
            one.weight,
            _ratio(move, gradient),
            _inner(move, gradient) / max(_inner(gradient, gradient), _TINY),
            None if step is None else _ratio(step, matrix),
            None if alone is None else _ratio(alone, matrix),
        )
        for one, move, gradient, step, alone, matrix in zip(
            maps, moves, gradients, steps, by_weight, effective, strict=True
        )
    ]
    falls = sum(_inner(move, gradient) for move, gradient in zip(moves, gradients, strict=True))
    squares = sum(_inner(gradient, gradient) for gradient in gradients)
    return Preconditioning(vectors, tuple(rows), falls / max(squares, _TINY))


_TINY = 1e-300


def _effective_gradients(
    model: nn.Module, loss: Loss, inputs: Any, targets: Any, maps: Sequence[ScaledMap]
) -> list[Tensor]:
    """G of every map: the network runs with effective matrices, gains of one, and shifts in the biases."""
    leaves = {one.held: one.effective().detach().requires_grad_() for one in maps}
    others: dict[Held, Tensor] = {}
    for one in maps:
        others[one.gain] = torch.full_like(one.gain.tensor.detach(), 1.0 - one.place.offset)
        if one.place.shift is not None and one.reader.bias is not None:
            shift, bias = held(model, one.place.shift), held(model, one.reader.bias)
            others[shift] = torch.zeros_like(shift.tensor.detach())
            entries = along(one.reader, shift.tensor.detach().reshape(-1), nothing=0.0)
            added = (one.held.tensor.detach() * entries).sum(one.reader.shape.in_axis)
            others[bias] = bias.tensor.detach() + added.view_as(bias.tensor)
    with replaced({**others, **leaves}):
        value = _evaluated(model, loss, inputs, targets)
        return list(torch.autograd.grad(value, list(leaves.values()), materialize_grads=True))


def _evaluated(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    copies = {id(tensor): tensor.clone() for tensor in model.buffers()}  # a pass may write to them
    buffers = {
        Held(module, name): copies[id(tensor)]
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    }
    with replaced(buffers):
        value = evaluate(loss, model, (inputs, targets))
    if value.dim() or not bool(value.isfinite()):
        raise UseError(
            f"the loss is {described(value)} of value {value.tolist()}: it has to be one finite number"
        )
    return value


def _slopes(value: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradients of the loss, by name; None where it does not depend on a parameter."""
    if not (value.requires_grad and parameters):
        return dict.fromkeys(parameters)
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, found, strict=True))


def _pushed(
    effective: Sequence[Tensor], parameters: Mapping[str, Tensor], tangents: Mapping[str, Tensor | None]
) -> list[Tensor]:
    """How the matrices move with the parameters, to first order; zero for those of frozen tensors alone."""
    chosen = {name: tangent for name, tangent in tangents.items() if tangent is not None}
    moving = [place for place, matrix in enumerate(effective) if matrix.requires_grad]
    moves = [torch.zeros_like(matrix) for matrix in effective]
    if not (chosen and moving):
        return moves
    covectors = [torch.zeros_like(effective[place], requires_grad=True) for place in moving]
    # The derivative of the vector–Jacobian product by its vector is the Jacobian–vector product.
    back = torch.autograd.grad(
        [effective[place] for place in moving],
        [parameters[name] for name in chosen],
        covectors,
        create_graph=True,
        allow_unused=True,
    )
    used = [(one, chosen[name]) for one, name in zip(back, chosen, strict=True) if one is not None]
    if not used:
        return moves
    products, used_tangents = zip(*used, strict=True)
    found = torch.autograd.grad(products, covectors, used_tangents, materialize_grads=True)
    for place, move in zip(moving, found, strict=True):
        moves[place] = move.detach()
    return moves


def _update(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    slopes: Mapping[str, Tensor | None],
    optimizer: Optimizer,
) -> dict[str, Tensor]:
    """The update the optimizer would make with this gradient; gradients are restored."""
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.grad = slopes[name]
        with torch.no_grad():
            update = optimizer_step(optimizer, model)
        return {name: update[name] for name in update.keys() & parameters.keys()}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


def _inner(one: Tensor, other: Tensor) -> float:
    return float((one.detach().double() * other.detach().double()).sum())


def _ratio(one: Tensor, other: Tensor) -> float:
    return math.sqrt(_inner(one, one) / max(_inner(other, other), _TINY))


def _vector_row(one: ScaleVector) -> tuple[str | float, ...]:
    gain, weight, speed, balance = (
        values.flatten().median().item()
        for values in (one.gain_squares, one.weight_squares, one.speeds, one.balance)
    )
    low, high = torch.quantile(one.speeds.flatten(), one.speeds.new_tensor([0.1, 0.9])).tolist()
    return one.name, one.speeds.numel(), gain, weight, speed, low, high, balance
