"""Directions in the space of weights, along which a landscape is cut.

    random        N(0, 1) in every entry, as long as the weights: ‖d‖ = ‖θ‖
    filter        N(0, 1), every filter as long as the one it is added to: ‖d_i‖ = ‖θ_i‖; vectors (biases,
                  gains, shifts) do not move
    hessian       eigenvectors of the largest eigenvalues, of length 1
    checkpoints   from here to other weights: those are at 1

A filter is all that makes one output: a row of a linear map, an output channel of a convolution, a token of
an embedding. A network is the same function if one layer of ReLUs is doubled and the next halved, so how far
a step of length 1 goes says nothing; filter normalisation takes that freedom away.

References:
    Li et al., Visualizing the loss landscape of neural nets, 2018, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_modules, unwrap
from theodolite.core.errors import UseError
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.rescaling import is_normalisation

Kind = Literal["random", "filter", "hessian", "checkpoints", "principal"]
Named = Literal["random", "filter", "hessian"]
State = Mapping[str, Tensor]
"""A state dict: tensors by name."""

UNITS: dict[Kind, str] = {
    "random": "random, as long as the weights",
    "filter": "random, each filter as long as the weights'",
    "hessian": "eigenvectors of the Hessian, of length 1",
    "checkpoints": "differences to other weights, which are at 1",
    "principal": "principal components of the path, of length 1",
}

FIRST_SEED = 7_321_000_000
"""Seeds count from here: with the seed that the weights were drawn with, a direction would be the weights."""


@dataclass(frozen=True, eq=False)
class Axes:
    """One or two directions."""

    kind: Kind
    vectors: tuple[State, ...]
    """By axis, by canonical name."""
    labels: tuple[str, ...]

    @cached_property
    def lengths(self) -> tuple[float, ...]:
        """The Euclidean length of each."""
        return tuple(math.sqrt(dot(vector, vector)) for vector in self.vectors)

    @cached_property
    def angle(self) -> float:
        """Between the two, in degrees; 90 if there is one."""
        if len(self.vectors) == 1:
            return 90.0
        cosine = dot(*self.vectors) / math.prod(self.lengths)
        return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))

    @property
    def orthonormal(self) -> bool:
        """Are they of length 1 and at right angles, to a thousandth?"""
        return all(abs(length - 1) < 1e-3 for length in self.lengths) and abs(self.angle - 90) < 0.06

    def gram(self) -> Tensor:
        """Products of the axes with each other."""
        rows = [[dot(one, other) for other in self.vectors] for one in self.vectors]
        return torch.tensor(rows, dtype=torch.float64)

    def __str__(self) -> str:
        lengths = " and ".join(f"{length:.4g}" for length in self.lengths)
        if len(self.vectors) == 1:
            return f"{UNITS[self.kind]}; length {lengths}"
        how = (
            "orthonormal" if self.orthonormal else f"not orthonormal: lengths {lengths}, at {self.angle:.1f}°"
        )
        return f"{UNITS[self.kind]}; {how}"


def random_axes(objective: Objective, num: int, *, filters: bool, seed: int = 0) -> Axes:
    """Random directions as long as the weights: all together, or filter by filter."""
    generator = torch.Generator().manual_seed(FIRST_SEED + seed)
    layout = _filter_dimensions(objective) if filters else {}
    if filters and not layout:
        raise UseError(
            "none of the parameters chosen has filters: all are vectors, or belong to normalisations. "
            "Take axes='random'"
        )
    dtype = torch.promote_types(objective.dtype, torch.float32)
    vectors = []
    for _ in range(num):
        # On the CPU, so that every device and every rank has the same ones.
        drawn = {
            name: torch.randn(shape, generator=generator).to(objective.device, dtype)
            for name, shape in objective.shapes.items()
        }
        vectors.append(_per_filter(drawn, objective, layout) if filters else _overall(drawn, objective))
    kind: Kind = "filter" if filters else "random"
    return Axes(kind, tuple(vectors), tuple(f"{kind} {index + 1}" for index in range(num)))


def checkpoint_axes(objective: Objective, model: nn.Module, states: Sequence[State]) -> Axes:
    """From the weights of the model to those of other states."""
    vectors = []
    for index, state in enumerate(states):
        there = read_state(objective, model, state)
        vector = {name: there[name] - _wide(here.detach()) for name, here in objective.tensors.items()}
        if dot(vector, vector) == 0:
            raise UseError(
                f"checkpoint {index} has the very weights of the model: there is no line between them"
            )
        vectors.append(vector)
    axes = Axes(
        "checkpoints", tuple(vectors), tuple(f"to checkpoint {index}" for index in range(len(states)))
    )
    if len(states) == 2 and min(axes.angle, 180 - axes.angle) < 1e-3:
        raise UseError("both checkpoints lie on one line through the model's weights. Give one of them")
    return axes


def read_state(objective: Objective, model: nn.Module, state: State) -> dict[str, Tensor]:
    """The chosen parameters out of a state dict, of the wrapped model or of what is in it."""
    if not isinstance(state, Mapping):
        raise UseError(f"a checkpoint is a state dict, not a {type(state).__name__}: give model.state_dict()")
    by_tensor = {id(tensor): name for name, tensor in objective.tensors.items()}
    namings = [
        {name: by_tensor[id(tensor)] for name, tensor in one.named_parameters() if id(tensor) in by_tensor}
        for one in (model, unwrap(model))
    ]
    namings.append({name: name for name in objective.names})
    naming = next((naming for naming in namings if naming.keys() <= state.keys()), None)
    if naming is None:
        missing = next(name for name in namings[0] if name not in state)
        raise UseError(f"the checkpoint has no {missing}. It is to be a state dict of this model")
    found = {}
    for own, name in naming.items():
        tensor = state[own]
        if tensor.shape != objective.shapes[name]:
            raise UseError(
                f"{own} has the shape {tuple(tensor.shape)} in the checkpoint and "
                f"{tuple(objective.shapes[name])} in the model"
            )
        found[name] = _wide(tensor.detach().to(objective.device))
    return {name: found[name] for name in objective.names}


def dot(one: State, other: State) -> float:
    """The inner product of two directions, in float64."""
    return math.fsum(float((one[name].double() * other[name].double()).sum()) for name in one)


def require_kind(axes: str) -> None:
    """Refuse a name that no axes have."""
    if axes not in get_args(Named):
        raise UseError(
            f"axes is {axes!r}: it is {', '.join(map(repr, get_args(Named)))}, one or two state dicts, Axes "
            "or a Trajectory"
        )


def _overall(drawn: State, objective: Objective) -> dict[str, Tensor]:
    weights = {name: tensor.detach() for name, tensor in objective.tensors.items()}
    ratio = math.sqrt(dot(weights, weights) / dot(drawn, drawn))
    if ratio == 0:
        raise UseError("all parameters are zero, so a direction as long as they are is none")
    return {name: tensor * ratio for name, tensor in drawn.items()}


def _per_filter(drawn: State, objective: Objective, layout: Mapping[str, int]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in drawn.items():
        if name not in layout:
            found[name] = torch.zeros_like(tensor)
            continue
        others = [dim for dim in range(tensor.ndim) if dim != layout[name]]
        weight = _wide(objective.tensors[name].detach())
        long, drawn_long = (
            torch.linalg.vector_norm(one, dim=others, keepdim=True) for one in (weight, tensor)
        )
        found[name] = tensor * (long / drawn_long)
    return found


def _filter_dimensions(objective: Objective) -> dict[str, int]:
    """By name, the dimension that counts the filters; vectors and normalisations have none."""
    names = {id(tensor): name for name, tensor in objective.tensors.items()}
    found: dict[str, int] = {}
    for _, module in canonical_modules(objective.model):
        if is_normalisation(module):
            continue
        for tensor in module.parameters(recurse=False):
            if id(tensor) in names and tensor.ndim >= 2:
                found.setdefault(names[id(tensor)], 1 if _stores_inputs_first(module) else 0)
    return found


def _stores_inputs_first(module: nn.Module) -> bool:
    kind = type(module)
    return isinstance(module, nn.modules.conv._ConvTransposeNd) or (
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    )


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least: differences and norms of bf16 weights are not bf16."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
