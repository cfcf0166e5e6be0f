"""Slices of the loss through some weights: `L(θ + a d₁ + b d₂)` over a grid of a and b.

A slice shows little of a space of a million dimensions, so it comes with numbers: how far the loss takes to
double along each axis, and the curvature there, once from a parabola through the grid's points next to the
centre and once as `d'Hd`. Where the two agree, the grid is fine enough to show the curvature at the centre.

A batch norm makes the loss ignore the scale of the weights before it, as long as its statistics are those of
the weights. Stored statistics belong to the centre: kept while the weights move, they show walls that are not
there. So every point takes the statistics of the batch, unless `batch_norm="frozen"`.

References:
    Li et al., Visualizing the loss landscape of neural nets, 2018.
    Investigating generalization capabilities of neural networks by means of loss landscapes and Hessian
    analysis (LLA), 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from theodolite.core.batches import Batches
from theodolite.core.building import in_one_line
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.axes import Axes, Named, State, checkpoint_axes, random_axes, require_kind
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import hessian
from theodolite.probes.curvature.replicas import on_all_ranks
from theodolite.probes.curvature.rescaling import exchanged
from theodolite.probes.curvature.slicing import Range, Slice, second_difference, with_centre
from theodolite.probes.curvature.surface import BatchNorm, batch_norms, losses, with_statistics
from theodolite.probes.curvature.trajectory import Trajectory

Where = Named | Axes | Trajectory | Sequence[State]

NUM_POINTS = {1: 41, 2: 21}
"""Along each axis, by the number of axes."""


@dataclass(frozen=True, eq=False)
class Landscape:
    """The loss on a line or a plane through some weights. Made by `landscape`."""

    axes: Axes
    places: tuple[NDArray[np.float64], ...]
    """By axis: coordinates of the grid, in lengths of the axis."""
    values: NDArray[np.float64]
    """`values[i]` or `values[i, j]`: the loss at `places[0][i]` and `places[1][j]`. May hold nan and inf."""
    slices: tuple[Slice, ...]
    """By axis: the line through the centre."""
    loss: float
    """At the centre."""
    batch_norm: BatchNorm | None
    """Where batch norms took their statistics from; None if there are none."""
    path: Trajectory | None = None
    no_hessian: str | None = None
    """Why there is no `d'Hd`, if so."""

    def save(self, path: str | Path) -> Path:
        """Write one self-contained page with figures, and the numbers as JSON beside it."""
        from theodolite.core.files import html_path, write_whole
        from theodolite.probes.curvature.landscape_page import as_json, page

        path = html_path(path, kind="landscape")
        write_whole(path, page(self))
        write_whole(path.with_suffix(".json"), as_json(self))
        return path

    def __str__(self) -> str:
        shape = " × ".join(str(len(places)) for places in self.places)
        ranges = " and ".join(f"{places[0]:.4g} to {places[-1]:.4g}" for places in self.places)
        lines = [
            f"{shape} points, {ranges}, along axes that are {self.axes}",
            *self._said(),
            "",
            *self._table(),
        ]
        return "\n".join(lines)

    def _said(self) -> list[str]:
        finite = np.isfinite(self.values)
        lines = [f"loss {self.loss:.4g} at the centre"]
        if finite.any():
            least = np.unravel_index(np.where(finite, self.values, np.inf).argmin(), self.values.shape)
            most = np.unravel_index(np.where(finite, self.values, -np.inf).argmax(), self.values.shape)
            lines[0] += f"; on the grid least {self._at(least)}, greatest {self._at(most)}"
        if not finite.all():
            lines.append(f"{(~finite).sum()} of {finite.size} points are not finite")
        if self.batch_norm is not None:
            taken = (
                "of the batch, at every point"
                if self.batch_norm == "batch"
                else "stored, those of the centre"
            )
            lines.append(f"batch norm: statistics {taken}")
        if self.path is not None:
            lines.append(str(self.path))
        if self.no_hessian is not None:
            lines.append(f"no d'Hd: {self.no_hessian}")
        return lines

    def _at(self, index: tuple[np.intp, ...]) -> str:
        place = ", ".join(f"{places[i]:.4g}" for places, i in zip(self.places, index, strict=True))
        return f"{self.values[index]:.4g} at ({place})"

    def _table(self) -> list[str]:
        wide = max(4, *(len(one.label) for one in self.slices))
        rows = [f"{'axis':<{wide}}  {'doubles at':<17}  {'parabola':>10}  {'d' + chr(39) + 'Hd':>10}"]
        for one in self.slices:
            low, high = one.doubles
            where = f"{_side(low, one.places[0]):<7} {_side(high, one.places[-1]):<7}"
            rows.append(f"{one.label:<{wide}}  {where:<17}  {one.parabola:>10.4g}  {one.exact:>10.4g}")
        return rows


@exclusive()
@on_all_ranks
def landscape(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    *,
    axes: Where = "filter",
    dimensions: int = 2,
    num: int | None = None,
    radius: float | Range | None = None,
    parameters: str | Sequence[str] | None = None,
    batch_norm: BatchNorm = "batch",
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Landscape:
    """The loss on a line or a plane through the model's weights.

    Args:
        model: any module, in the mode it is to be looked at; wrapped or not.
        loss: `loss(logits, targets) -> scalar`.
        batch: a pair (inputs, targets), or several: a list or a loader. The mean over all.
        axes: `filter`, `random` or `hessian`; one or two state dicts: lines from here to there; `Axes` of an
            earlier landscape; or a `Trajectory`: its axes, with the path on it and the last checkpoint in the
            centre.
        dimensions: 1 or 2, where the axes leave it open.
        num: points along each axis: 41 on a line, 21 on a plane.
        radius: how far to go on both sides, in lengths of the axis, or a pair (low, high). If not given 1;
            −0.5 to 1.5 towards checkpoints; the whole path and some more on a trajectory.
        parameters: patterns of the names that move; all that require a gradient if None.
        batch_norm: `batch`: statistics of the batch at every point; `frozen`: those that are stored.
        seed: of random axes.
        progress: told which part is done.

    Nothing of the model is changed. On a GPU many points are computed at once, fewer when memory is short.

    >>> line = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(line.weight, 2.0)
    >>> def squared(logits, targets):
    ...     return (logits - targets).square().mean()
    >>> batch = torch.ones(1, 1), torch.ones(1, 1)
    >>> found = landscape(line, squared, batch, axes=[{"weight": torch.ones(1, 1)}], num=5)
    >>> [round(value, 4) for value in found.values.tolist()]  # (2 − a − 1)² from a = −0.5 to 1.5
    [2.25, 1.0, 0.25, 0.0, 0.25]
    >>> round(found.slices[0].parabola, 4), round(found.slices[0].exact, 4)
    (2.0, 2.0)
    """
    _check(dimensions, num, radius)
    objective = Objective(model, loss, batch, parameters=parameters)
    path = axes if isinstance(axes, Trajectory) else None
    with ExitStack() as stack:
        if path is not None:
            last = _matching(path, objective)
            stack.enter_context(exchanged(objective.tensors, lambda name, before: last[name]))
        stack.enter_context(batch_norms(objective.model, batch_norm))
        chosen = _axes(axes, objective, model, dimensions, seed)
        grid = [
            np.linspace(low, high, num or NUM_POINTS[len(chosen.vectors)])
            for low, high in _ranges(chosen, radius, path)
        ]
        lines = [with_centre(places) for places in grid]
        found = losses(objective, chosen, _places(grid, lines), progress=progress).numpy()
        exact, no_hessian = _exact(objective, model, chosen)
    shape = tuple(len(places) for places in grid)
    values, rest = found[: math.prod(shape)].reshape(shape), found[math.prod(shape) :]
    slices = []
    for label, places, step, bent in zip(
        chosen.labels, lines, (places[1] - places[0] for places in grid), exact, strict=True
    ):
        own, rest = rest[: len(places)], rest[len(places) :]
        slices.append(Slice(label, places, own, second_difference(places, own, step), bent))
    return Landscape(
        axes=chosen,
        places=tuple(grid),
        values=values,
        slices=tuple(slices),
        loss=float(slices[0].values[slices[0].places == 0][0]),
        batch_norm=batch_norm if with_statistics(objective.model) else None,
        path=path,
        no_hessian=no_hessian,
    )


def _axes(axes: Where, objective: Objective, model: nn.Module, dimensions: int, seed: int) -> Axes:
    if isinstance(axes, Trajectory):
        return axes.axes
    if isinstance(axes, Axes):
        _require_names(axes.vectors[0], objective)
        return axes
    if not isinstance(axes, str):
        if not isinstance(axes, Sequence) or len(axes) not in (1, 2):
            raise UseError("axes is to be one or two state dicts in a list, as in axes=[state]")
        return checkpoint_axes(objective, model, axes)  # type: ignore[arg-type]
    require_kind(axes)
    if axes == "hessian":
        return _hessian_axes(objective, model, dimensions)
    return random_axes(objective, dimensions, filters=axes == "filter", seed=seed)


def _hessian_axes(objective: Objective, model: nn.Module, dimensions: int) -> Axes:
    from theodolite.probes.curvature.eigenvalues import eigenvalues

    operator = hessian(model, objective.given_loss, objective.batches, parameters=objective.names)
    found = eigenvalues(operator, k=dimensions)
    vectors = tuple(operator.split(vector) for vector in found.vectors.mT)
    return Axes("hessian", vectors, tuple(f"λ = {float(value):.4g}" for value in found.values))


def _ranges(axes: Axes, radius: float | Range | None, path: Trajectory | None) -> list[Range]:
    if radius is None and path is not None:
        ranges = []
        for low, high in zip(path.points.min(0), path.points.max(0), strict=True):
            air = 0.2 * max(high - low, 0.2 * float(np.ptp(path.points)))
            ranges.append((float(low - air), float(high + air)))
        return ranges
    if radius is None:
        radius = (-0.5, 1.5) if axes.kind == "checkpoints" else 1.0
    low, high = (-radius, radius) if isinstance(radius, (int, float)) else radius
    return [(low, high)] * len(axes.vectors)


def _places(grid: list[NDArray[np.float64]], lines: list[NDArray[np.float64]]) -> Tensor:
    """All of the grid, then all of the slices; (n, axes)."""
    found = [np.stack(np.meshgrid(*grid, indexing="ij"), -1).reshape(-1, len(grid))]
    for axis, places in enumerate(lines):
        line = np.zeros((len(places), len(grid)))
        line[:, axis] = places
        found.append(line)
    return torch.from_numpy(np.concatenate(found))


def _exact(objective: Objective, model: nn.Module, axes: Axes) -> tuple[list[float], str | None]:
    """`d'Hd` along each axis; or nan, and why."""
    try:
        operator = hessian(model, objective.given_loss, objective.batches, parameters=objective.names)
        vectors = [operator.flat(axis) for axis in axes.vectors]
        return [float((vector * (operator @ vector)).sum()) for vector in vectors], None
    except (UseError, torch.OutOfMemoryError) as error:
        return [math.nan] * len(axes.vectors), in_one_line(error)


def _side(where: float, end: float) -> str:
    if math.isnan(where):
        return "–"
    return f"{where:+.3g}" if math.isfinite(where) else f"{'<' if end < 0 else '>'} {end:.3g}"


def _matching(path: Trajectory, objective: Objective) -> State:
    _require_names(path.last, objective)
    return path.last


def _require_names(vector: State, objective: Objective) -> None:
    if tuple(vector) != objective.names:
        odd = next(iter(set(vector) ^ set(objective.names)), "the order")
        raise UseError(
            f"the axes are over other parameters than those chosen here: {odd} differs. Give the same "
            "parameters=… as for them"
        )


def _check(dimensions: int, num: int | None, radius: float | Range | None) -> None:
    if dimensions not in NUM_POINTS:
        raise UseError(f"dimensions is {dimensions!r}: a landscape has 1 or 2")
    if num is not None and (isinstance(num, bool) or not isinstance(num, int) or num < 3):
        raise UseError(f"num is {num!r}: give a whole number of at least 3 points along each axis")
    if radius is None:
        return
    ends = (-radius, radius) if isinstance(radius, (int, float)) else tuple(radius)
    if len(ends) != 2 or not all(map(math.isfinite, ends)) or not ends[0] < ends[1]:
        raise UseError(f"radius is {radius!r}: give a positive number, or a pair (low, high)")
