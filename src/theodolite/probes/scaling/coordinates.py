"""The coordinate check: do the values of a network keep their size when it grows?

Each value is fitted by a power of the size: least squares on two logarithmic axes, for every seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from theodolite.anatomy import dissect
from theodolite.core import arguments
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, silent
from theodolite.core.size import Size
from theodolite.optimizers import Rule
from theodolite.planning.counterparts import lone_branches
from theodolite.planning.factory import MakeOptimizer, check_pure
from theodolite.planning.parameterization import Parameterization, chosen, plan_for
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted
from theodolite.probes.scaling.first_steps import Track, follow_from_zero
from theodolite.probes.signal.gradient_statistics import mean_interval
from theodolite.workloads import Workload

Axis = Literal["width", "depth"]
AXES: tuple[Axis, ...] = ("width", "depth")


@dataclass(frozen=True)
class Slope(Result):
    """A quantity goes as the size to the power `value`, and should go as its power `expected`.

    >>> Slope("branch.0", "depth", value=-0.8, low=-0.9, high=-0.7, expected=-1.0).at_ten_times
    1.58...
    """

    kind: ClassVar[str] = "slope"
    loads: ClassVar[bool] = True
    quantity: str
    axis: Axis
    value: float
    low: float
    high: float
    """The 95 % interval: a t interval over the slopes of the seeds; nan with a single seed. It covers
    the noise between seeds, not a curve that is no straight line."""
    expected: float

    @property
    def excess(self) -> float:
        """The difference from the expected slope."""
        return self.value - self.expected

    @property
    def judged(self) -> bool:
        """Does it say something about the parameterization?

        The `logits` do not: a readout that starts at random should start smaller in a wider network; the
        change of the logits is judged instead. Nor does, along the depth, the stream before its end: after
        one block it is at another point at every depth, and at depth 2 its middle is one step of two.
        """
        on_the_way = self.axis == "depth" and self.quantity in ("stream.first", "stream.middle")
        return self.quantity != "logits" and not on_the_way

    @property
    def at_ten_times(self) -> float:
        """The factor by which the quantity is off at ten times the size."""
        return 10.0**self.excess if math.isfinite(self.value) else math.nan

    def within(self, atol: float) -> bool:
        """Is the slope within ±atol of the expected one? The slope of a run that diverged never is."""
        return abs(self.excess) <= atol

    def blocks(self) -> Iterator[Block]:
        """One sentence."""
        if not math.isfinite(self.value):
            yield f"{self.quantity} against {self.axis}: a run diverged"
            return
        spread = f" ({self.low:+.2f} to {self.high:+.2f})" if math.isfinite(self.low) else ""
        yield (
            f"{self.quantity} goes as {self.axis}^{self.value:+.2f}{spread}, expected {self.expected:+g}: "
            f"×{self.at_ten_times:.2g} at 10×"
        )


@dataclass(frozen=True)
class Coordinates(Result):
    """How large values are against width and depth. Made by `coordinates`."""

    kind: ClassVar[str] = "coordinate check"
    loads: ClassVar[bool] = True
    parameterization: Parameterization
    optimizer: str
    lr: float | None
    """At base size; None for that of the own optimizer."""
    base: Size | None
    """None if nothing starts from one."""
    steps: int
    tracks: tuple[Track, ...]
    """One for each size and seed."""
    notes: tuple[str, ...] = ()
    """What to know of the own optimizer, such as the tensors that it leaves out."""

    @property
    def slopes(self) -> tuple[Slope, ...]:
        """Of every quantity along every axis, after the last step."""
        return self.slopes_after(self.steps)

    def slopes_after(self, step: int) -> tuple[Slope, ...]:
        """The same after another step; 0 is before training."""
        return fit_slopes(self.tracks, step=step)

    def bent(self, atol: float = 0.1) -> tuple[Slope, ...]:
        """The slopes further than `atol` from the expected ones, worst first; each prints what it means.

        Only slopes with `Slope.judged` count.
        """
        return worst_first(slope for slope in self.slopes if slope.judged and not slope.within(atol))

    def flat(self, atol: float = 0.1) -> bool:
        """Is every slope within ±atol of the expected one?"""
        return not self.bent(atol)

    def blocks(self) -> Iterator[Block]:
        """Slopes and intervals after the last step."""
        at_base = "" if self.base is None else f" at {self.base}"
        rate = "" if self.lr is None else f", lr {self.lr:.4g}{at_base}"
        yield (
            f"{self.parameterization}, {self.optimizer}{rate}: slopes after "
            f"{counted(self.steps, 'step')}, {counted(len({track.seed for track in self.tracks}), 'seed')}"
        )
        yield self.table()
        yield from self.notes

    def table(self) -> Table:
        """One row for each quantity and axis; no expected slope where none is judged."""
        columns = (
            "quantity",
            "axis",
            Column("slope", lambda value: "diverged" if math.isnan(value) else f"{value:+.2f}"),
            Column("95 % from", _signed),
            Column("to", _signed),
            Column("expected", lambda value: "–" if value is None else f"{value:g}", side="right"),
        )
        rows = [
            (one.quantity, one.axis, one.value, one.low, one.high, one.expected if one.judged else None)
            for one in self.slopes
        ]
        return Table(columns, rows)


@exclusive()
def coordinates(
    workload: Workload,
    sizes: Sequence[Size],
    *,
    base: Size | None = None,
    lr: float | None = None,
    optimizer: str | Rule | MakeOptimizer | None = None,
    weight_decay: float = 0.0,
    parameterization: Parameterization = "plan",
    steps: int = 10,
    seeds: int | Sequence[int] = 3,
    device: str = "cpu",
    progress: Progress | None = None,
    **planning: Any,
) -> Coordinates:
    """Train a network of several sizes for a few steps, and see which values grow or vanish with the size.

    With the right parameterization the stream, and the change of stream and logits in a step, are the same at
    every width and depth, and each of L branches is 1/L of that. The readout starts at zero, so that the
    logits only hold what was learnt, unless it is also the embedding or is divided by its own norm.

    Args:
        workload: the network, its data and its loss.
        sizes: at least two. Sizes of equal depth are compared along the width, and vice versa.
        base: the size at which `lr` was tuned. Under `own` there is none.
        lr: learning rate at base size; under `own` that of the optimizer by default.
        optimizer: as in `theodolite.plan`, which also takes `weight_decay` and `planning` (eps, roles, …),
            AdamW by default; under `own` the function (model) -> Optimizer, the workload's by default.
        weight_decay: at base size.
        parameterization: `plan`; `standard`: the network's own initialisation at each size and the plain
            optimizer with one learning rate for all tensors; or `own`: the network as it builds itself, with
            the optimizer that its author makes.
        steps: how many to train.
        seeds: a number of seeds, or the seeds, of the initialisation and of the batches.
        device: where to train.
        progress: called with a title and the fraction done.

    >>> import theodolite as th
    >>> sizes = [th.Size(width, 2) for width in (32, 64, 128)]
    >>> mlp = th.workload("mlp-mixture")
    >>> planned = coordinates(mlp, sizes, base=sizes[0], lr=2**-7, steps=4)
    >>> standard = coordinates(mlp, sizes, base=sizes[0], lr=2**-7, steps=4, parameterization="standard")
    >>> planned.flat(0.2), standard.flat(0.2)
    (True, False)

    References:
        Yang et al., Tensor Programs V, 2022, appendix D.
    """
    sizes = list(dict.fromkeys(sizes))
    for size in sizes:
        if not isinstance(size, Size):
            raise UseError(f"sizes holds {size!r}: give Sizes, for example [Size(64, 4), Size(256, 4)]")
    if all(len({getattr(size, axis) for size in sizes}) == len(sizes) for axis in AXES):
        raise UseError(
            f"sizes are {', '.join(map(str, sizes))}: give at least two of equal depth, to compare widths, "
            "or two of equal width, to compare depths"
        )
    each_seed = arguments.seeds("seeds", seeds)
    arguments.whole("steps", steps, least=1)
    options = chosen(
        parameterization,
        factory=workload.optimizer,
        base=base,
        lr=lr,
        optimizer=optimizer,
        weight_decay=weight_decay,
        planning=planning,
    )
    inputs = workload.draw(each_seed[0], 0)[0]
    needed = {*sizes, *([base] if parameterization == "plan" and base else [])}
    roles = workload.roles_with(planning.get("roles"))
    anatomies = {size: dissect(workload.build, inputs, size=size, roles=roles) for size in needed}
    if parameterization == "own" and options["make_optimizer"] is not None:
        check_pure(options["make_optimizer"], workload.build, min(sizes))
    tell = progress or silent
    tracks: list[Track] = []
    for size in sizes:
        plan = plan_for(workload.build, inputs, size, anatomies=anatomies, **options)
        lone = lone_branches(anatomies[size], [anatomies[one] for one in sizes if one.depth != size.depth])
        for seed in each_seed:
            tell(f"{workload.name} {size}, seed {seed}", len(tracks) / len(sizes) / len(each_seed))
            tracks.append(follow_from_zero(workload, plan, seed=seed, steps=steps, device=device, lone=lone))
    start, notes = (None, plan.notes) if parameterization == "own" else (base, ())
    return Coordinates(parameterization, plan.optimizer_name, lr, start, steps, tuple(tracks), notes)


def fit_slopes(tracks: Iterable[Track], *, step: int = -1) -> tuple[Slope, ...]:
    """The slope of every quantity along every axis on which the sizes differ, after a step.

    Along the width, sizes of equal depth are compared, and along the depth those of equal width. For each
    seed it is the least-squares slope of log₂ of the quantity against log₂ of the size, with an intercept of
    its own for each group of sizes; the value is the mean over seeds.
    """
    tracks = list(tracks)
    names = [
        name for name in (tracks[0].values if tracks else ()) if all(name in one.values for one in tracks)
    ]
    seeds = sorted({one.seed for one in tracks})
    found = []
    for axis in AXES:
        groups = [_groups([one for one in tracks if one.seed == seed], axis) for seed in seeds]
        compared = [each for each in groups if any(len({one.size for one in group}) > 1 for group in each)]
        if not compared:
            continue
        values = partial(_value, step=step)
        slopes = np.stack([_slopes(each, names, axis, values) for each in compared], axis=1)
        wanted = _slopes(compared[0], names, axis, _wanted) if axis == "depth" else np.zeros(len(names))
        for name, by_seed, expected in zip(names, slopes, wanted.round(9).tolist(), strict=True):
            mean, low, high = float(by_seed[0]), math.nan, math.nan
            if len(by_seed) > 1:
                mean, low, high = mean_interval(torch.from_numpy(by_seed))
            found.append(Slope(name, axis, mean, low, high, expected))
    return tuple(found)


def worst_first(slopes: Iterable[Slope]) -> tuple[Slope, ...]:
    """Sorted by distance from the expected slope; runs that diverged come first."""
    return tuple(
        sorted(slopes, key=lambda one: abs(one.excess) if math.isfinite(one.excess) else math.inf)[::-1]
    )


def _value(track: Track, name: str, *, step: int) -> float:
    return track.values[name][step]


def _wanted(track: Track, name: str) -> float:
    return track.expected.get(name, 1.0)


def _slopes(
    groups: Sequence[Sequence[Track]], names: Sequence[str], axis: Axis, value: Callable[[Track, str], float]
) -> NDArray[Any]:
    """By name: least squares within groups of sizes that differ along the axis alone.

    It is nan where a value is not finite. A quantity that is 0 everywhere does not move: its slope is 0.
    """
    sizes = [np.log2([getattr(track.size, axis) for track in group]) for group in groups]
    values = [np.array([[value(track, name) for track in group] for name in names]) for group in groups]
    still = np.all([(one == 0).all(1) for one in values], axis=0)
    known = np.all([(np.isfinite(one) & (one > 0)).all(1) for one in values], axis=0)
    across, covariance = 0.0, np.zeros(len(names))
    for x, one in zip(sizes, values, strict=True):
        y = np.log2(np.where(known[:, None], one, 1.0))
        across += float(((x - x.mean()) ** 2).sum())
        covariance += ((x - x.mean()) * (y - y.mean(1, keepdims=True))).sum(1)
    return np.where(still, 0.0, np.where(known, covariance / across, math.nan))


def _groups(tracks: Sequence[Track], axis: Axis) -> list[list[Track]]:
    other: Axis = "depth" if axis == "width" else "width"
    fixed = sorted({getattr(track.size, other) for track in tracks})
    return [[track for track in tracks if getattr(track.size, other) == value] for value in fixed]


def _signed(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else ""
