"""Directions in weight space, the path of training projected onto them, and the loss along one of them.

Kinds of axes:

    random        N(0, 1) in every entry, as long as the weights: ‖d‖ = ‖θ‖
    filter        N(0, 1), every filter as long as that of the weights: ‖d_i‖ = ‖θ_i‖; vectors (biases,
                  gains, shifts) do not move
    hessian       eigenvectors of length 1: of the largest eigenvalues, or of others
    checkpoints   from here to other weights, which are at 1
    principal     principal components of a trajectory, of length 1

A filter is what makes one output: a row of a linear map, an output channel of a convolution, a token of an
embedding. A network computes the same function if one layer of ReLUs is doubled and the next halved, so the
length of a step alone has no meaning; filter normalisation removes that freedom.

The plane of a trajectory θ_0, …, θ_n goes through the last checkpoint. With the differences θ_i − θ_n as rows
of M and `M = U Σ Vᵀ`, its axes are the first two columns of V, and `σ_k² / Σ σ²` is the share of all squared
distances to the last checkpoint along each. The mean is not subtracted, so that the plane contains the last
checkpoint itself. The first two components of a random walk explain most of it, too (Antognini and
Sohl-Dickstein, 2018): a high share alone does not show that training is simple.

References:
    Li et al., Visualizing the loss landscape of neural nets, 2018, sections 4 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_modules
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Block, Result
from theodolite.present.text import Table
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.rescaling import is_normalisation

State = Mapping[str, Tensor]
"""A state dict: tensors by name."""
AxesKind = Literal["random", "filter", "hessian", "checkpoints", "principal"]

UNITS: dict[AxesKind, str] = {
    "random": "random, as long as the weights",
    "filter": "random, each filter as long as the weights'",
    "hessian": "eigenvectors of the Hessian, of length 1",
    "checkpoints": "differences to other weights, which are at 1",
    "principal": "principal components of the path, of length 1",
}

FIRST_SEED = 7_321_000_000
"""Added to seeds: with the seed that the weights were drawn with, a direction would equal the weights."""
FLAT = 1e-6
"""A second principal component shorter than this share of the first is rounding."""


@dataclass(frozen=True, eq=False)
class Axes:
    """One or two directions."""

    kind: AxesKind
    vectors: tuple[State, ...] = field(compare=False)
    """By axis, by canonical name. Not saved."""
    labels: tuple[str, ...]
    lengths: tuple[float, ...] = field(init=False)
    """The Euclidean length of each."""
    angle: float = field(init=False)
    """The angle between the two, in degrees; 90 if there is one."""

    def __post_init__(self) -> None:
        lengths = tuple(math.sqrt(_dot(vector, vector)) for vector in self.vectors)
        cosine = _dot(*self.vectors) / math.prod(lengths) if len(lengths) == 2 else 0.0
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "angle", math.degrees(math.acos(max(-1.0, min(1.0, cosine)))))

    @property
    def orthonormal(self) -> bool:
        """Are they of length 1 and at right angles, to a thousandth?"""
        return all(abs(length - 1) < 1e-3 for length in self.lengths) and abs(self.angle - 90) < 0.06

    def __str__(self) -> str:
        lengths = " and ".join(f"{length:.4g}" for length in self.lengths)
        if len(self.vectors) == 1:
            how = f"length {lengths}"
        elif self.orthonormal:
            how = "orthonormal"
        else:
            how = f"not orthonormal: lengths {lengths}, at {self.angle:.1f}°"
        return f"{UNITS[self.kind]}; {how}"


def random_axes(objective: Objective, num: int, *, filters: bool, seed: int = 0) -> Axes:
    """Random directions as long as the weights: as a whole, or filter by filter."""
    dimensions = _filter_dimensions(objective) if filters else {}
    if filters and not dimensions:
        raise UseError(
            "none of the chosen parameters has filters: all are vectors, or belong to normalisations. "
            "Use axes='random'"
        )
    generator = torch.Generator().manual_seed(FIRST_SEED + seed)
    weights = {name: _wide(tensor.detach()) for name, tensor in objective.tensors.items()}
    vectors = []
    for _ in range(num):
        # Drawn on the CPU, so that all devices and ranks have the same.
        vector = {name: torch.randn(one.shape, generator=generator).to(one) for name, one in weights.items()}
        if filters:
            for name, weight in weights.items():
                others = [dim for dim in range(weight.ndim) if dim != dimensions.get(name)]
                wanted, own = (
                    torch.linalg.vector_norm(one, dim=others, keepdim=True) for one in (weight, vector[name])
                )
                vector[name] *= wanted / own if name in dimensions else 0.0
        else:
            ratio = math.sqrt(_dot(weights, weights) / _dot(vector, vector))
            if ratio == 0:
                raise UseError("all parameters are zero, so there is no direction as long as the weights")
            vector = {name: tensor * ratio for name, tensor in vector.items()}
        vectors.append(vector)
    kind: AxesKind = "filter" if filters else "random"
    return Axes(kind, tuple(vectors), tuple(f"{kind} {index + 1}" for index in range(num)))


def checkpoint_axes(objective: Objective, states: Sequence[State]) -> Axes:
    """From the weights of the model to those of other states."""
    vectors = []
    for index, state in enumerate(states):
        there = _read_state(objective, state)
        vector = {name: there[name] - _wide(here.detach()) for name, here in objective.tensors.items()}
        if _dot(vector, vector) == 0:
            raise UseError(f"checkpoint {index} has the same weights as the model, so there is no line to it")
        vectors.append(vector)
    labels = tuple(f"to checkpoint {index}" for index in range(len(states)))
    axes = Axes("checkpoints", tuple(vectors), labels)
    if len(states) == 2 and min(axes.angle, 180 - axes.angle) < 1e-3:
        raise UseError("both checkpoints lie on one line through the model's weights. Give one of them")
    return axes


def _read_state(objective: Objective, state: State) -> dict[str, Tensor]:
    """The chosen parameters from a state dict of the wrapped or the unwrapped model."""
    if not isinstance(state, Mapping):
        raise UseError(f"a checkpoint is a state dict, not {described(state)}: give model.state_dict()")
    by_tensor = {id(tensor): name for name, tensor in objective.tensors.items()}
    namings = [
        {name: by_tensor[id(tensor)] for name, tensor in one.named_parameters() if id(tensor) in by_tensor}
        for one in (objective.given, objective.model)
    ]
    namings.append({name: name for name in objective.names})
    naming = next((naming for naming in namings if naming.keys() <= state.keys()), None)
    if naming is None:
        missing = next(name for name in namings[0] if name not in state)
        raise UseError(f"the checkpoint has no {missing}. Give a state dict of this model")
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


def _dot(one: State, other: State) -> float:
    """The inner product of two directions, in float64."""
    return math.fsum(float((one[name].double() * other[name].double()).sum()) for name in one)


def _filter_dimensions(objective: Objective) -> dict[str, int]:
    """By name, the dimension that counts the filters; vectors and normalisations have none."""
    names = {id(tensor): name for name, tensor in objective.tensors.items()}
    found: dict[str, int] = {}
    for _, module in canonical_modules(objective.model):
        if is_normalisation(module):
            continue
        kind = type(module)
        inputs_first = isinstance(module, nn.modules.conv._ConvTransposeNd) or (
            kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
        )
        for tensor in module.parameters(recurse=False):
            if id(tensor) in names and tensor.ndim >= 2:
                found.setdefault(names[id(tensor)], int(inputs_first))
    return found


def _wide(tensor: Tensor) -> Tensor:
    """In at least float32: differences and norms of bf16 weights are not bf16."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class Slice:
    """The loss along one axis through the centre."""

    label: str
    places: NDArray[np.float64]
    """In lengths of the axis, 0 among them."""
    values: NDArray[np.float64]
    parabola: float
    """The second difference of the loss at the centre, over a step of the grid."""
    exact: float
    """`d'Hd`, the limit of `parabola` on a fine grid; nan if there is no Hessian."""

    @property
    def centre(self) -> float:
        """The loss at 0."""
        return float(self.values[self.places == 0][0])

    @property
    def doubles(self) -> tuple[float, float]:
        """Where the loss first reaches twice that of the centre, on both sides; infinite if nowhere.

        nan if the loss of the centre is not positive and finite.
        """
        if not 0 < self.centre < math.inf:
            return math.nan, math.nan
        behind, ahead = self.places <= 0, self.places >= 0
        return (
            -_first_above(-self.places[behind][::-1], self.values[behind][::-1], 2 * self.centre),
            _first_above(self.places[ahead], self.values[ahead], 2 * self.centre),
        )


def _first_above(places: NDArray[np.float64], values: NDArray[np.float64], level: float) -> float:
    """Where the values first reach a level, going outwards from 0, with linear interpolation."""
    above = np.flatnonzero(~(values < level))  # nan too
    if not len(above):
        return math.inf
    (low, high), (near, far) = (of[[above[0] - 1, above[0]]] for of in (values, places))
    part = (level - low) / (high - low) if math.isfinite(high) else 1.0
    return float(near + part * (far - near))


@dataclass(frozen=True, eq=False)
class Trajectory(Result):
    """Checkpoints projected onto axes through the last of them. Made by `trajectory`."""

    kind: ClassVar[str] = "trajectory"

    axes: Axes
    points: NDArray[np.float64]
    """(checkpoints, axes): coordinates in lengths of the axes. The last is 0."""
    explained: tuple[float, ...]
    """The share of all squared distances to the last checkpoint, by component; for given axes, which may not
    be at right angles, one number for all."""
    away: tuple[float, ...]
    """By checkpoint: its distance from the plane."""
    last: State = field(compare=False)
    """The weights of the last checkpoint, by canonical name. Not saved."""

    @property
    def summary(self) -> str:
        """How much of the path lies along the axes."""
        shares = " + ".join(f"{100 * share:.1f} %" for share in self.explained)
        total = f" = {100 * sum(self.explained):.1f} %" if len(self.explained) > 1 else ""
        return (
            f"{len(self.points)} checkpoints: along the axes lie {shares}{total} of their squared distances "
            "to the last one"
        )

    def blocks(self) -> Iterator[Block]:
        """The explained shares, and the coordinates of all checkpoints."""
        yield self.summary
        yield self.table()

    def table(self) -> Table:
        """A row for each checkpoint."""
        rows = [(index, *point, self.away[index]) for index, point in enumerate(self.points.tolist())]
        return Table(("checkpoint", *self.axes.labels, "distance from the plane"), rows)


@exclusive()
def trajectory(
    model: nn.Module,
    checkpoints: Sequence[State],
    *,
    axes: Axes | None = None,
    parameters: str | Sequence[str] | None = None,
) -> Trajectory:
    """Project state dicts along training onto a plane through the last of them.

    Args:
        model: the model whose parameters they are; its values do not matter.
        checkpoints: state dicts, in the order of training. Buffers in them are ignored.
        axes: those of a `Landscape`; by default the first two principal components.
        parameters: patterns of names; all that require a gradient if None.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> path = [[[4.0, 3.0, 0.0]], [[2.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]]
    >>> seen = trajectory(model, [{"weight": torch.tensor(weight)} for weight in path])
    >>> bool(sum(seen.explained) > 0.999999)  # they lie in a plane
    True
    """
    objective = Objective(model, lambda logits, targets: logits.sum(), [], parameters=parameters)
    states = [_read_state(objective, state) for state in checkpoints]
    if len(states) < 2:
        raise UseError(
            f"{len(states)} checkpoints make no path: give at least two state dicts, three for a plane"
        )
    last = states[-1]
    differences = {name: torch.stack([state[name] - last[name] for state in states]) for name in last}
    squares = float(sum(tensor.double().square().sum() for tensor in differences.values()))
    if squares == 0:
        raise UseError(
            "all checkpoints are the same. Did you keep state_dict() without copying it? Its tensors are the "
            "model's own: keep {name: tensor.clone() for …}"
        )
    if not math.isfinite(squares):
        raise UseError("a checkpoint holds nan or infinity: leave out those in which training had diverged")
    axes = axes or _principal(differences)
    stacked = {name: torch.stack([axis[name] for axis in axes.vectors]).double() for name in last}
    points = torch.linalg.solve(_products(stacked, stacked), _products(stacked, differences)).mT
    rest = {
        name: tensor.double() - torch.tensordot(points.to(tensor.device), stacked[name], dims=1)
        for name, tensor in differences.items()
    }
    away = _products(rest, rest).diagonal().sqrt()
    if axes.kind == "principal":
        explained = tuple((points.square().sum(0) / squares).tolist())
    else:
        explained = (max(0.0, 1 - float(away.square().sum()) / squares),)
    return Trajectory(axes, points.numpy(), explained, tuple(away.tolist()), last)


def _principal(differences: State) -> Axes:
    """The first right singular vectors of M, from the small matrix `M Mᵀ`."""
    values, left = torch.linalg.eigh(_products(differences, differences))
    order = [-1, -2] if len(values) > 2 and values[-2] > FLAT**2 * values[-1] else [-1]
    vectors = []
    for index in order:
        column = left[:, index]
        column = column * torch.sign(column[column.abs().argmax()]) / values[index].sqrt()
        vectors.append(
            {
                name: torch.tensordot(column.to(tensor.device), tensor.double(), dims=1).to(tensor.dtype)
                for name, tensor in differences.items()
            }
        )
    return Axes("principal", tuple(vectors), tuple(f"component {index + 1}" for index in range(len(order))))


def _products(one: State, other: State) -> Tensor:
    """Inner products of stacked directions (n, …) and (k, …): (n, k), in float64 on the CPU."""
    parts = [one[name].flatten(1).double() @ other[name].flatten(1).double().mT for name in one]
    return torch.stack(parts).sum(0).cpu()
