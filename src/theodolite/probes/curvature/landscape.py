"""Slices of the loss through some weights: `L(θ + a d₁ + b d₂)` over a grid of a and b.

A slice shows little of a space of a million dimensions, so it comes with numbers: how far along each axis the
loss doubles, and the curvature there, from a parabola through the grid points next to the centre and as
`d'Hd`. If the two agree, the grid is fine enough to show the curvature at the centre.

With a batch norm the loss does not depend on the scale of the weights before it, as long as its statistics
belong to the weights. Stored statistics belong to the centre: kept while the weights move, they show walls
that are not there. So every point takes the statistics of the batch, unless `batch_norm="frozen"`.

References:
    Li et al., Visualizing the loss landscape of neural nets, 2018.
    Investigating generalization capabilities of neural networks by means of loss landscapes and Hessian
    analysis (LLA), 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.core.arguments import is_number, one_of, whole
from theodolite.core.batches import Batch, Batches
from theodolite.core.building import in_one_line
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, part, share
from theodolite.core.replicas import on_all_ranks
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table
from theodolite.probes.curvature.axes import Axes, Slice, State, Trajectory, checkpoint_axes, random_axes
from theodolite.probes.curvature.density import Density, density
from theodolite.probes.curvature.eigenvalues import Which, eigenvalues
from theodolite.probes.curvature.interpolation import norms_with_statistics
from theodolite.probes.curvature.landscape_figures import plane_figure, slices_figure
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, without_batching_warnings
from theodolite.probes.curvature.rescaling import exchanged

Named = Literal["random", "filter", "hessian"]
BatchNorm = Literal["batch", "frozen"]
Range = tuple[float, float]

NUM_POINTS = {1: 41, 2: 21}
"""Points along each axis, by the number of axes."""
MOST_AT_ONCE = 32
"""Points that are evaluated at once; halved when a GPU runs out of memory."""
MOST_ENTRIES_ON_CPU = 2**18
"""Of parameters and inputs, of all points that are evaluated at once on a CPU."""


@dataclass(frozen=True, eq=False)
class Landscape(Result):
    """The loss on a line or a plane through some weights. Made by `landscape`."""

    kind: ClassVar[str] = "landscape"

    axes: Axes
    places: tuple[NDArray[np.float64], ...]
    """By axis: coordinates of the grid, in lengths of the axis."""
    values: NDArray[np.float64]
    """`values[i]` or `values[i, j]`: the loss at `places[0][i]` and `places[1][j]`. May hold nan and inf."""
    slices: tuple[Slice, ...]
    """By axis: the line through the centre."""
    loss: float
    """The loss at the centre."""
    batch_norm: BatchNorm | None
    """Which statistics batch norms used; None if there are none."""
    path: Trajectory | None = None
    spectrum: Density | None = None
    """The spectral density at the centre, with the criteria `r_e` and `k_hn`, if it was asked for."""
    no_hessian: str | None = None
    """Why there is no `d'Hd`, if so."""

    @property
    def title(self) -> str:
        """The loss at the centre."""
        return f"The loss is {self.loss:.4g} at the centre."

    def blocks(self) -> Iterator[Block]:
        """The grid, its extremes and settings; the figures; a row for each slice."""
        yield "\n".join(self._lines())
        if self.values.ndim == 2:
            yield plane_figure(self.axes, self.places, self.values, self.loss, self.path)
        yield slices_figure(self.slices)
        ends = (Column("doubles behind at", side="right"), Column("doubles ahead at", side="right"))
        yield Table(
            ("axis", *ends, "parabola", "d'Hd"),
            [
                (one.label, *map(_end, one.doubles, one.places[[0, -1]]), one.parabola, one.exact)
                for one in self.slices
            ],
        )

    def table(self) -> Table:
        """The loss at every point of the grid."""
        columns = [*np.meshgrid(*self.places, indexing="ij"), self.values]
        rows = np.stack([column.ravel() for column in columns], 1).tolist()
        return Table((*self.axes.labels, "loss"), rows)

    def _lines(self) -> Iterator[str]:
        shape = " × ".join(str(len(places)) for places in self.places)
        ranges = " and ".join(f"{places[0]:.4g} to {places[-1]:.4g}" for places in self.places)
        yield f"{shape} points, {ranges}, along axes that are {self.axes}"
        finite = np.isfinite(self.values)
        extremes = ""
        if finite.any():
            least = np.where(finite, self.values, np.inf).argmin()
            most = np.where(finite, self.values, -np.inf).argmax()
            extremes = f"; on the grid least {self._at(least)}, greatest {self._at(most)}"
        yield f"loss {self.loss:.4g} at the centre{extremes}"
        if not finite.all():
            yield f"{(~finite).sum()} of {finite.size} points are not finite"
        if self.batch_norm is not None:
            taken = {"batch": "of the batch, at every point", "frozen": "stored, those of the centre"}
            yield f"batch norm: statistics {taken[self.batch_norm]}"
        if self.path is not None:
            yield self.path.summary
        if self.spectrum is not None:
            low, high = self.spectrum.smallest, self.spectrum.largest
            yield f"{self.spectrum.size:,} eigenvalues between {low:.4g} and {high:.4g} at the centre"
            half, one = self.spectrum.k_hn(0.5), self.spectrum.k_hn(1)
            yield f"r_e {self.spectrum.r_e}, K_H0.5 {half}, K_H1 {one}"
        if self.no_hessian is not None:
            yield f"no d'Hd: {self.no_hessian}"

    def _at(self, index: np.intp) -> str:
        found = np.unravel_index(index, self.values.shape)
        place = ", ".join(f"{places[i]:.4g}" for places, i in zip(self.places, found, strict=True))
        return f"{self.values[found]:.4g} at ({place})"


def _end(where: float, end: float) -> str:
    """Where the loss doubles on one side, or beyond which end of the axis."""
    if math.isnan(where):
        return "–"
    return f"{where:+.3g}" if math.isfinite(where) else f"{'<' if end < 0 else '>'} {end:.3g}"


@exclusive()
@on_all_ranks
def landscape(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    *,
    axes: Named | Axes | Trajectory | Sequence[State] = "filter",
    which: Which = "largest",
    dimensions: int = 2,
    num: int | None = None,
    radius: float | Range | None = None,
    parameters: str | Sequence[str] | None = None,
    batch_norm: BatchNorm = "batch",
    spectrum: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Landscape:
    """The loss on a line or a plane through the model's weights.

    Args:
        model: any module, in train or eval mode as it is; wrapped or not.
        loss: `loss(logits, targets) -> scalar`.
        batch: a pair (inputs, targets), or several: a list or a loader. The mean over all.
        axes: `filter`, `random` or `hessian`; one or two state dicts: lines from here to there; `Axes` of an
            earlier landscape; or a `Trajectory`: its axes, with the path drawn and the last checkpoint in the
            centre.
        which: which eigenvectors, for `axes="hessian"`: of the `largest` eigenvalues, the `smallest`, the
            largest in `magnitude`, or the largest and the smallest (`ends`).
        dimensions: 1 or 2, for axes given by name.
        num: points along each axis: 41 on a line, 21 on a plane.
        radius: how far to go on both sides, in lengths of the axis, or a pair (low, high). By default 1;
            −0.5 to 1.5 towards checkpoints; the whole path and a margin on a trajectory.
        parameters: patterns of the names that move; all that require a gradient if None.
        batch_norm: `batch`: statistics of the batch at every point; `frozen`: the stored ones.
        spectrum: measure the spectral density at the centre too, and with it the criteria r_e and K_Hn; by
            about 500 Hessian products.
        seed: seed of random axes, and of the spectrum's probes.
        progress: called with the fraction of the points that is done.

    The model is not changed. On a GPU many points are computed at once, fewer when memory is short.

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
    one_of("dimensions", dimensions, (1, 2))
    _check_which(which, axes, dimensions)
    if num is not None:
        whole("num", num, least=3)
    ends: Any = None
    if radius is not None:
        ends = (-radius, radius) if isinstance(radius, (int, float)) else tuple(radius)
        if len(ends) != 2 or not all(map(is_number, ends)) or not ends[0] < ends[1]:
            raise UseError(f"radius is {radius!r}: give a positive number, or a pair (low, high)")
    objective = Objective(model, loss, batch, parameters=parameters)
    path = axes if isinstance(axes, Trajectory) else None
    with ExitStack() as stack:
        if path is not None:
            _require_names(path.last, objective)
            stack.enter_context(exchanged(objective.tensors, lambda name, before: path.last[name]))
        stack.enter_context(_batch_norms(objective.model, batch_norm))
        chosen = _axes(axes, objective, which, dimensions, seed)
        points = num or NUM_POINTS[len(chosen.vectors)]
        grid = [np.linspace(low, high, points) for low, high in _ranges(chosen, ends, path)]
        lines = [_with_centre(places) for places in grid]
        report = share(progress, "landscape", 0.0, 0.5 if spectrum else 1.0)
        found = losses(objective, chosen, _places(grid, lines), report=report).numpy()
        exact, no_hessian = _exact(objective, chosen)
        second_half = part(progress, 0.5, 1.0)
        measured = density(Hessian(objective), seed=seed, progress=second_half) if spectrum else None
    shape = tuple(len(places) for places in grid)
    values, *rest = np.split(found, np.cumsum([math.prod(shape), *map(len, lines[:-1])]))
    slices = []
    for label, places, line, own, bent in zip(chosen.labels, grid, lines, rest, exact, strict=True):
        step = places[1] - places[0]
        before, here, after = (float(own[line == place][0]) for place in (-step, 0.0, step))
        slices.append(Slice(label, line, own, float((before - 2 * here + after) / step**2), bent))
    return Landscape(
        axes=chosen,
        places=tuple(grid),
        values=values.reshape(shape),
        slices=tuple(slices),
        loss=slices[0].centre,
        batch_norm=batch_norm if norms_with_statistics(objective.model) else None,
        path=path,
        spectrum=measured,
        no_hessian=no_hessian,
    )


def _check_which(which: Which, axes: Any, dimensions: int) -> None:
    one_of("which", which, get_args(Which))
    if which != "largest" and not (isinstance(axes, str) and axes == "hessian"):
        raise UseError(f"which is {which!r}, which chooses eigenvectors: it needs axes='hessian'")
    if which == "ends" and dimensions == 1:
        raise UseError("which is 'ends', the largest and the smallest eigenvalue: it needs dimensions=2")


def _axes(axes: Any, objective: Objective, which: Which, dimensions: int, seed: int) -> Axes:
    if isinstance(axes, Trajectory):
        return axes.axes
    if isinstance(axes, Axes):
        _require_names(axes.vectors[0], objective)
        return axes
    if not isinstance(axes, str):
        if not isinstance(axes, Sequence) or len(axes) not in (1, 2):
            raise UseError("axes has to be one or two state dicts in a list, as in axes=[state]")
        return checkpoint_axes(objective, axes)
    if axes not in get_args(Named):
        raise UseError(
            f"axes is {axes!r}: it is {', '.join(map(repr, get_args(Named)))}, one or two state dicts, Axes "
            "or a Trajectory"
        )
    if axes != "hessian":
        return random_axes(objective, dimensions, filters=axes == "filter", seed=seed)
    operator = Hessian(objective)
    found = eigenvalues(operator, k=1 if which == "ends" else dimensions, which=which)
    vectors = tuple(operator.split(vector) for vector in found.vectors.mT)
    return Axes("hessian", vectors, tuple(f"λ = {float(value):.4g}" for value in found.values))


def _require_names(vector: State, objective: Objective) -> None:
    if tuple(vector) != objective.names:
        odd = next(iter(set(vector) ^ set(objective.names)), "the order")
        raise UseError(
            f"the axes are over other parameters than those chosen here: {odd} differs. Give the same "
            "parameters=… as for them"
        )


def _ranges(axes: Axes, ends: Range | None, path: Trajectory | None) -> Iterator[Range]:
    """The ends of the grid, by axis."""
    if ends is None and path is not None:
        for low, high in zip(path.points.min(0), path.points.max(0), strict=True):
            air = 0.2 * max(high - low, 0.2 * float(np.ptp(path.points)))
            yield float(low - air), float(high + air)
        return
    for _ in axes.vectors:
        yield ends or ((-0.5, 1.5) if axes.kind == "checkpoints" else (-1.0, 1.0))


def _with_centre(places: NDArray[np.float64]) -> NDArray[np.float64]:
    """The places of a slice: those of the grid, and the centre with a neighbour on each side."""
    step = places[1] - places[0]
    near = np.array([-step, 0.0, step])
    far = places[(np.abs(places[:, None] - near) > 1e-6 * step).all(1)]
    return np.sort(np.concatenate([far, near]))


def _places(grid: list[NDArray[np.float64]], lines: list[NDArray[np.float64]]) -> Tensor:
    """The points of the grid, then those of the slices; (n, axes)."""
    found = [np.stack(np.meshgrid(*grid, indexing="ij"), -1).reshape(-1, len(grid))]
    for axis, places in enumerate(lines):
        line = np.zeros((len(places), len(grid)))
        line[:, axis] = places
        found.append(line)
    return torch.from_numpy(np.concatenate(found))


def _exact(objective: Objective, axes: Axes) -> tuple[list[float], str | None]:
    """`d'Hd` along each axis; or nan, and why."""
    try:
        operator = Hessian(objective)
        vectors = [operator.flat(axis) for axis in axes.vectors]
        return [float((vector * (operator @ vector)).sum()) for vector in vectors], None
    except (UseError, torch.OutOfMemoryError) as error:
        return [math.nan] * len(axes.vectors), in_one_line(error)


@contextmanager
def _batch_norms(model: nn.Module, how: BatchNorm) -> Iterator[None]:
    """Let batch norms use the statistics of the batch, or the stored ones, which do not change inside."""
    one_of("batch_norm", how, get_args(BatchNorm))
    norms = list(norms_with_statistics(model).values())
    before = [(norm.training, norm.track_running_stats) for norm in norms]
    try:
        for norm in norms:
            norm.training = how == "batch"
            if norm.training:
                norm.track_running_stats = False  # neither use nor update the stored statistics
        yield
    finally:
        for norm, (training, tracks) in zip(norms, before, strict=True):
            norm.training, norm.track_running_stats = training, tracks


def losses(
    objective: Objective, axes: Axes, places: Tensor, *, report: Callable[[float], None] | None = None
) -> Tensor:
    """The loss at each place, a mean over all batches; (n, axes) → (n,), in float64 on the CPU.

    The result may hold nan and inf. Each batch is drawn once for all places, so that a loader that shuffles
    does not add noise.
    """

    def own() -> Tensor:
        total, before = torch.zeros(len(places), dtype=torch.float64), 0.0
        at_once = MOST_AT_ONCE
        for batch, weight in objective.draw():
            done, at_once = 0, min(at_once, _first_try(objective, batch))
            while done < len(places):
                some = places[done : done + at_once].to(objective.device)
                values = _losses_at(objective, axes, some, batch)
                if isinstance(values, int):
                    at_once = values
                    continue
                total[done : done + len(some)] += weight * values
                done += len(some)
                if report is not None:
                    report(before + weight * done / len(places))
            before += weight
        return total.to(objective.device)

    return objective.averaged(own).cpu()


def _losses_at(objective: Objective, axes: Axes, places: Tensor, batch: Batch) -> Tensor | int:
    """The loss at some places; or the number of places to try instead."""

    def loss(place: Tensor) -> Tensor:
        steps = list(zip(place, axes.vectors, strict=True))
        chosen = {
            name: sum((at * axis[name] for at, axis in steps), tensor.detach()).to(objective.dtype)
            for name, tensor in objective.tensors.items()
        }
        return objective.value(objective.forward(chosen, batch), batch)

    with objective.conditions(), torch.no_grad():
        if len(places) == 1:
            return loss(places[0])[None].double().cpu()
        try:
            with without_batching_warnings():
                return torch.func.vmap(loss, randomness="same")(places).double().cpu()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return len(places) // 2
        except Exception:  # vmap does not work for this network; an error of its own shows again one by one
            return 1


def _first_try(objective: Objective, batch: Batch) -> int:
    """On a CPU many points of a large network at once are no faster than one after the other."""
    if objective.device.type != "cpu":
        return MOST_AT_ONCE
    given = sum(leaf.numel() for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor))
    entries = given + sum(shape.numel() for shape in objective.shapes.values())
    return max(1, min(MOST_AT_ONCE, MOST_ENTRIES_ON_CPU // entries))
