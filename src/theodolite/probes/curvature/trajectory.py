"""The way of the weights through training, seen on a plane.

Checkpoints θ_0, …, θ_n span a space through the last one. Its plane is that of the two directions along which
the differences θ_i − θ_n are largest: with the differences as rows of M and `M = U Σ Vᵀ`,

    axes        the first two columns of V
    explained   σ_k² / Σ σ²: which part of all squared distances to the last lies along each

The mean is not subtracted, so the plane holds the last checkpoint itself, not a point near the path. On a
random walk, too, the first two components explain most (Antognini and Sohl-Dickstein, 2018): a high share
alone does not say that training is simple.

References:
    Li et al., Visualizing the loss landscape of neural nets, 2018, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.axes import Axes, State, dot, read_state
from theodolite.probes.curvature.objective import Objective

FLAT = 1e-6
"""Of the greatest distance: a second direction shorter than that is rounding."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Checkpoints projected onto axes through the last of them. Made by `trajectory`."""

    axes: Axes
    points: NDArray[np.float64]
    """(checkpoints, axes): coordinates in lengths of the axes. The last is 0."""
    explained: tuple[float, ...]
    """The part of all squared distances to the last checkpoint, by component; of given axes, which need not
    be at right angles, one number for all."""
    away: tuple[float, ...]
    """By checkpoint: its distance from the plane."""
    last: State
    """The weights of the last checkpoint, by canonical name."""

    def __str__(self) -> str:
        shares = " + ".join(f"{100 * share:.1f} %" for share in self.explained)
        total = f" = {100 * sum(self.explained):.1f} %" if len(self.explained) > 1 else ""
        return (
            f"{len(self.points)} checkpoints: along the axes lie {shares}{total} of their squared distances "
            "to the last one"
        )


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
        model: whose parameters they are; what values it has does not matter.
        checkpoints: state dicts, in the order of training. Buffers in them are left out.
        axes: as of a `Landscape`; without them the first two principal components.
        parameters: patterns of names; all that require a gradient if None.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> path = [[[4.0, 3.0, 0.0]], [[2.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]]
    >>> seen = trajectory(model, [{"weight": torch.tensor(weight)} for weight in path])
    >>> bool(sum(seen.explained) > 0.999999)  # they lie in a plane
    True
    """
    objective = Objective(model, lambda logits, targets: logits.sum(), [], parameters=parameters)
    states = [read_state(objective, model, state) for state in checkpoints]
    if len(states) < 2:
        raise UseError(
            f"{len(states)} checkpoints make no path: give at least two state dicts, three for a plane"
        )
    last = states[-1]
    differences = {name: torch.stack([state[name] - last[name] for state in states]) for name in last}
    squares = float(sum(tensor.double().square().sum() for tensor in differences.values()))
    if not 0 < squares < float("inf"):
        raise UseError(
            "all checkpoints are the same. Did you keep state_dict() without copying it? Its tensors are the "
            "model's own: keep {name: tensor.clone() for …}"
            if squares == 0
            else "a checkpoint holds nan or infinity: leave those out in which training had diverged"
        )
    if axes is None:
        axes = _principal(differences)
    points = _projected(differences, axes)
    away = _distances(differences, axes, points)
    return Trajectory(
        axes=axes,
        points=points,
        explained=_explained(points, axes, away, squares),
        away=tuple(away.tolist()),
        last=last,
    )


def _principal(differences: State) -> Axes:
    """The first right singular vectors, by way of the small matrix `M Mᵀ`."""
    small = sum(
        (tensor.flatten(1).double() @ tensor.flatten(1).double().T for tensor in differences.values()),
        torch.zeros((), dtype=torch.float64),
    )
    values, left = torch.linalg.eigh(small)
    order = [-1, -2] if len(values) > 2 and values[-2] > FLAT**2 * values[-1] else [-1]
    vectors = []
    for index in order:
        column = left[:, index]
        column = column * torch.sign(column[column.abs().argmax()]) / values[index].sqrt()
        vectors.append(
            {
                name: torch.tensordot(column, tensor.double(), dims=1).to(tensor.dtype)
                for name, tensor in differences.items()
            }
        )
    return Axes("principal", tuple(vectors), tuple(f"component {index + 1}" for index in range(len(order))))


def _projected(differences: State, axes: Axes) -> NDArray[np.float64]:
    """Coordinates in least squares; the axes need not be at right angles."""
    num = len(next(iter(differences.values())))
    products = [
        [dot({name: tensor[row] for name, tensor in differences.items()}, axis) for axis in axes.vectors]
        for row in range(num)
    ]
    found = np.linalg.solve(axes.gram().numpy(), np.array(products).T).T
    return np.asarray(found, dtype=np.float64)


def _distances(differences: State, axes: Axes, points: NDArray[np.float64]) -> NDArray[np.float64]:
    def left_over(name: str, tensor: Tensor) -> Tensor:
        at = torch.from_numpy(points).to(tensor.device)
        stacked = torch.stack([axis[name].double() for axis in axes.vectors])
        return (tensor.double() - torch.tensordot(at, stacked, dims=1)).flatten(1).square().sum(1)

    total = torch.stack([left_over(name, tensor) for name, tensor in differences.items()]).sum(0)
    return np.asarray(total.sqrt().cpu().numpy(), dtype=np.float64)


def _explained(
    points: NDArray[np.float64], axes: Axes, away: NDArray[np.float64], squares: float
) -> tuple[float, ...]:
    if axes.kind == "principal":
        return tuple(float((points[:, index] ** 2).sum() / squares) for index in range(points.shape[1]))
    return (max(0.0, 1 - float((away**2).sum()) / squares),)
