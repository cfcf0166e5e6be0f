"""From rows of a ledger to curves of the loss, or of a metric, and from a curve to its optimum."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from theodolite.core.arguments import is_number
from theodolite.core.errors import UseError
from theodolite.core.metric_names import HELD_OUT_LOSS
from theodolite.core.size import Size, rounded
from theodolite.present.text import number

Floats = NDArray[np.float64]
Row = Mapping[str, Any]
"""One run, as `Ledger.rows` gives it."""
Key = tuple[str, str, str]
"""Optimizer, parameterization, and the values of the further axes as JSON."""
Edge = Literal["", "low", "high", "only"]

NUM_RESAMPLES = 1000
REACH = 1.0
"""Octaves to either side of the best point: the parabola goes through the points there, three at least."""
LEVEL = 0.95
"""Of every interval."""


@dataclass(frozen=True)
class Scale:
    """The axis along which an optimum is sought: in octaves if all values are positive, else linear.

    >>> rates = scale_of("lr", [2**-9, 2**-8])
    >>> rates.place(2**-8), rates.value(-7.5), rates.text(2**-8), rates.unit
    (-8.0, 0.005524271728019903, '2^-8', 'octaves')
    >>> scale_of("weight_decay", [0, 0.1]).place(0.1)
    0.1
    """

    name: str
    log: bool

    def place(self, value: float) -> float:
        """Where a value lies on the axis: its log2, or itself."""
        return math.log2(value) if self.log else float(value)

    def value(self, place: float) -> float:
        """The inverse of `place`."""
        return 2.0 ** min(place, 1000.0) if self.log else place

    def text(self, value: float) -> str:
        """A value as a reader expects it: `2^-7.2`, or `0.1`."""
        if not math.isfinite(value):
            return "–"
        if not self.log:
            return f"{value:.3g}"
        exponent = f"{math.log2(value):.2f}".rstrip("0").rstrip(".")
        return f"2^{'0' if exponent == '-0' else exponent}"

    @property
    def label(self) -> str:
        """The title of the axis."""
        return f"log2 of {self.name}" if self.log else self.name

    @property
    def unit(self) -> str:
        """Of a difference on the axis."""
        return "octaves" if self.log else f"of {self.name}"


@dataclass(frozen=True)
class Criterion:
    """What runs are compared by: the held-out loss, or a metric of the workload. Lower is better.

    >>> by = Criterion("solver iterations")
    >>> by.of({"status": "finished", "solver iterations": 17.0}), by.of({"status": "diverged"})
    (17.0, inf)
    >>> by.text(17.0), by.text(math.inf), Criterion().text(0.5)
    ('17', 'inf', '0.500')
    """

    metric: str | None = None
    """None for the held-out loss."""

    @staticmethod
    def named(name: str | None) -> Criterion:
        """By the name of a metric; None or `held-out loss` for the loss."""
        return Criterion(None if name == HELD_OUT_LOSS else name)

    @property
    def name(self) -> str:
        """In titles and on axes."""
        return self.metric or HELD_OUT_LOSS

    @property
    def column(self) -> str:
        """In the rows of a ledger."""
        return self.metric or "held_out"

    @property
    def noun(self) -> str:
        """In sentences."""
        return "metric" if self.metric else "loss"

    @property
    def least_shown(self) -> float:
        """The least difference that `text` shows: the loss has three decimals."""
        return 5e-324 if self.metric else 0.0005

    def knows(self, row: Row) -> bool:
        """Has the run a value? Not if it failed, or was made before there was the metric."""
        return row["status"] != "failed" and (row["status"] == "diverged" or self.column in row)

    def of(self, row: Row) -> float:
        """The value of a run; infinite where it has none, as where it diverged."""
        value = row.get(self.column)
        return math.inf if value is None else float(value)

    def text(self, value: float) -> str:
        """The loss with three decimals or `diverged`, a metric with four digits."""
        if self.metric:
            return number(value, 4)
        return "diverged" if math.isinf(value) else f"{value:.3f}"


LOSS = Criterion()


def scale_of(name: str, values: Collection[Any]) -> Scale:
    """The scale for the values that a quantity takes, which must be numbers."""
    for value in values:
        if not is_number(value):
            raise UseError(
                f"{name} takes the value {value!r}, which is no number, so it has no optimum. "
                "Leave it an axis, and sweep over another quantity, as in over='lr'"
            )
    return Scale(name, log=all(value > 0 for value in values))


@dataclass(frozen=True, eq=False)
class SweepCurve:
    """The loss, or a metric, at one size, everything else but the swept quantity and the seed being fixed."""

    size: Size
    values: tuple[float, ...]
    """Of the swept quantity, rising."""
    seeds: tuple[int, ...]
    losses: Floats
    """Seeds × values: infinite where the run diverged or its metric is infinite, nan where there is none."""

    @property
    def means(self) -> Floats:
        """The mean over the seeds that were run, by value; one that diverged makes it infinite."""
        return resampled_means(self, self.seeds, np.ones((1, len(self.seeds))))[0]

    @property
    def num_seeds(self) -> tuple[int, ...]:
        """How many were run, by value."""
        return tuple(int(count) for count in (~np.isnan(self.losses)).sum(0))


def curves_of(
    rows: Sequence[Row], over: str, axes: Sequence[str] = (), criterion: Criterion = LOSS
) -> dict[Key, list[SweepCurve]]:
    """The curves of all sizes, by what else they differ in. Runs without a value are left out."""
    cells: dict[Key, dict[Size, dict[tuple[float, int], float]]] = {}
    for row in rows:
        if criterion.knows(row):
            others = json.dumps({name: setting(row, name) for name in axes}, sort_keys=True)
            sizes = cells.setdefault((row["optimizer"], row["parameterization"], others), {})
            losses = sizes.setdefault(size_of(row), {})
            losses[setting(row, over), row["seed"]] = criterion.of(row)
    return {
        key: [_curve(size, losses) for size, losses in sorted(sizes.items())] for key, sizes in cells.items()
    }


def size_of(row: Row) -> Size:
    """The size of a run.

    >>> print(size_of({"width": 64, "depth": 2, "batch": 32, "planned_tokens": 10**6}))
    64 × 2, batch 32, 1M tokens
    """
    return Size(row["width"], row["depth"], row.get("batch"), row.get("planned_tokens"))


def labels(sizes: Collection[Size]) -> dict[Size, str]:
    """What tells sizes apart, of which all have something in common.

    >>> list(labels([Size(64, 2, 16, 10**6), Size(64, 2, 32, 10**6)]).values())
    ['batch 16', 'batch 32']
    >>> list(labels([Size(64, 2), Size(128, 2)]).values())
    ['64 × 2', '128 × 2']
    >>> list(labels([Size(64, 2, tokens=10_000), Size(64, 2, tokens=10_040)]).values())
    ['10000 tokens', '10040 tokens']
    """
    networks, batches, tokens = (
        {getattr(size, name) for size in sizes} for name in ("network", "batch", "tokens")
    )
    # Lengths that are the same in three digits are written in full.
    exact = len({rounded(size.tokens) for size in sizes if size.tokens}) < len(tokens - {None})
    alike = max(map(len, (networks, batches, tokens)), default=1) == 1

    def label(size: Size) -> str:
        parts = [str(size.network)] if len(networks) > 1 or alike or size.batch is size.tokens is None else []
        if size.batch is not None and (len(batches) > 1 or alike):
            parts.append(f"batch {size.batch}")
        if size.tokens is not None and (len(tokens) > 1 or alike):
            parts.append(f"{size.tokens if exact else rounded(size.tokens)} tokens")
        return ", ".join(parts)

    return {size: label(size) for size in sizes}


def setting(row: Row, name: str) -> Any:
    """The value of an axis. What a row calls `held_out` is the loss, not the number of batches it is of."""
    return row["held_out_batches" if name == "held_out" else name]


def resamples(num: int) -> Floats:
    """How often each of `num` seeds counts: once in row 0, then as drawn with replacement.

    The draws are the same every time.
    """
    drawn = np.random.default_rng(0).multinomial(num, [1 / num] * num, size=NUM_RESAMPLES)
    return np.concatenate([np.ones((1, num)), drawn])


def resampled_means(curve: SweepCurve, seeds: Sequence[int], weights: Floats) -> Floats:
    """Resamples × values: the mean loss, each seed counted as often as it was drawn.

    All values and sizes share a draw, so that what a seed does to all of them cancels in differences. Where
    no seed of a draw was run, it is the mean over those that were.
    """
    own = weights[:, [seeds.index(seed) for seed in curve.seeds]]
    finite, diverged = np.isfinite(curve.losses), np.isinf(curve.losses)
    losses = np.where(finite, curve.losses, 0.0)
    count = own @ finite
    everyone = np.where(diverged.any(0), np.inf, losses.sum(0) / np.maximum(finite.sum(0), 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(count > 0, own @ losses / count, everyone)
    return np.where(own @ diverged > 0, np.inf, means)


def _curve(size: Size, losses: Mapping[tuple[float, int], float]) -> SweepCurve:
    values = sorted({value for value, _ in losses})
    seeds = sorted({seed for _, seed in losses})
    table = [[losses.get((value, seed), math.nan) for value in values] for seed in seeds]
    return SweepCurve(size, tuple(values), tuple(seeds), np.array(table, dtype=np.float64))


@dataclass(frozen=True)
class SeedInterval:
    """An interval at 95 % over seeds; nan where one seed says nothing about it."""

    low: float
    high: float

    @property
    def known(self) -> bool:
        """Is there one?"""
        return not math.isnan(self.low)


UNKNOWN = SeedInterval(math.nan, math.nan)


@dataclass(frozen=True)
class Optimum:
    """The best value of the swept quantity at one size."""

    size: Size
    best: float
    """The best value that was tried; nan where no run has a finite loss."""
    loss: float
    """The mean loss there."""
    value: float
    """The vertex of the parabola, not beyond the neighbours of the best."""
    interval: SeedInterval
    """Of `value`."""
    fitted: float
    """The loss of the parabola at its vertex."""
    edge: Edge
    """`low` or `high` where the best is the first or the last that was tried: a bound, no optimum."""
    noisy: bool
    """Is the interval wider than the range of values that were tried? Then the seeds do not tell where the
    optimum is, and `interval` is not known."""
    num_seeds: int
    """How many there are at the best value and its neighbours."""

    @property
    def found(self) -> bool:
        """Is it known, and no bound?"""
        return not self.edge and not self.noisy and math.isfinite(self.value)


@dataclass(frozen=True, eq=False)
class Resampled:
    """A curve, its resamples, and its optimum. Row 0 of each array is the curve itself."""

    curve: SweepCurve
    places: Floats
    """Of the values."""
    means: Floats
    """1 + resamples × values."""
    vertex: Floats
    """The place of the optimum, by row."""
    lowest: Floats
    """The loss there, by row."""
    optimum: Optimum


def resampled(curve: SweepCurve, scale: Scale, seeds: Sequence[int], weights: Floats) -> Resampled:
    """The curve with its resamples, and its optimum with an interval from them."""
    places = np.array([scale.place(value) for value in curve.values])
    means = resampled_means(curve, seeds, weights)
    vertex, lowest = vertices(places, means, scale)
    index, last = int(np.argmin(means[0])), len(places) - 1
    is_finite = math.isfinite(vertex[0])  # unless all diverged
    edge: Edge = "only" if last == 0 else "low" if index == 0 else "high" if index == last else ""
    edge = edge if is_finite else ""
    num_seeds = min(curve.num_seeds[max(index - 1, 0) : index + 2] if is_finite else curve.num_seeds)
    around = UNKNOWN if edge else interval(vertex, num_seeds)
    noisy = around.high - around.low > places[-1] - places[0]
    optimum = Optimum(
        size=curve.size,
        best=curve.values[index] if is_finite else math.nan,
        loss=float(means[0, index]),
        value=scale.value(float(vertex[0])),
        interval=UNKNOWN if noisy else SeedInterval(scale.value(around.low), scale.value(around.high)),
        fitted=float(lowest[0]),
        edge=edge,
        noisy=noisy,
        num_seeds=num_seeds,
    )
    return Resampled(curve, places, means, vertex, lowest, optimum)


def vertices(places: Floats, means: Floats, scale: Scale) -> tuple[Floats, Floats]:
    """Where each row of means is lowest, and how low: vertices of parabolas.

    A parabola goes through the best point and its neighbours, or by least squares through all points within
    an octave of the best, if those are more. Its vertex stays between the neighbours. The best point is the
    answer itself where it is the first or last, and where a neighbour has diverged.

    >>> places = np.array([-9.0, -8.0, -7.0, -6.0])
    >>> vertices(places, (places[None] + 7.25) ** 2 + 1, Scale("lr", log=True))
    (array([-7.25]), array([1.]))
    """
    best = np.argmin(means, axis=1)
    lowest = np.take_along_axis(means, best[:, None], 1)[:, 0]
    found = np.where(np.isinf(lowest), np.nan, places[best])
    for index in range(1, len(places) - 1):
        rows = np.flatnonzero((best == index) & np.isfinite(means[:, [index - 1, index + 1]]).all(1))
        if rows.size:
            low, high = places[[index - 1, index + 1]] - places[index]
            a, b, c = _parabolas(places, means[rows], index, scale)
            bent = a > 0
            vertex = np.where(bent, -b / (2 * np.where(bent, a, 1.0)), 0.0).clip(low, high)
            found[rows] = places[index] + vertex
            lowest[rows] = np.where(bent, c + b * vertex + a * vertex**2, lowest[rows])
    return found, lowest


def loss_at(places: Floats, means: Floats, place: float, scale: Scale) -> float:
    """The mean loss at a place, on the parabola around the nearest point.

    Beyond the points the nearest end counts; where a point next to the place has diverged, so has the place.
    """
    return float(losses_at(places, means[None], np.array([place]), scale)[0])


def losses_at(places: Floats, means: Floats, at: Floats, scale: Scale) -> Floats:
    """`loss_at` for each row of means and its place."""
    at = at.clip(places[0], places[-1])
    nearest = np.argmin(np.abs(places[None] - at[:, None]), axis=1)
    found: Floats = np.take_along_axis(means, nearest[:, None], 1)[:, 0].copy()
    between = ~np.isclose(at, places[nearest])
    middles = nearest.clip(1, len(places) - 2)
    for middle in np.unique(middles[between]):
        rows = np.flatnonzero(between & (middles == middle))
        offset = at[rows] - places[middle]
        with np.errstate(invalid="ignore"):
            a, b, c = _parabolas(places, means[rows], middle, scale)
            found[rows] = np.nan_to_num(c + b * offset + a * offset**2, nan=np.inf, posinf=np.inf)
    return found


def _parabolas(places: Floats, means: Floats, index: int, scale: Scale) -> Floats:
    """`a, b, c` of `a t² + b t + c` for each row of means, t being the distance from the point at `index`.

    Points that have diverged are left out, unless they are neighbours.
    """
    offsets = places - places[index]
    core = np.zeros(len(places), dtype=bool)
    core[max(index - 1, 0) : index + 2] = True
    near = core | (np.abs(offsets) <= REACH + 1e-9) if scale.log else core
    near = near & (np.isfinite(means).all(0) | core)
    found = _least_squares(offsets[near], means[:, near])
    if near.sum() > 3 and (found[0] <= 0).any():  # too rough for many points: the nearest three
        found = np.where(found[0] > 0, found, _least_squares(offsets[core], means[:, core]))
    return found


def _least_squares(offsets: Floats, means: Floats) -> Floats:
    design = np.stack([offsets**2, offsets, np.ones_like(offsets)], axis=1)
    if len(offsets) < 3:  # a line
        design[:, 0] = 0.0
    found: Floats = np.linalg.pinv(design) @ means.T
    return found


def interval(values: Floats, num_seeds: int, *, num_together: int = 1) -> SeedInterval:
    """`v ± t √(n/(n−1)) s`: v the first of the values, s the spread of the others, which are resamples, and t
    Student's at 97.5 % with n − 1 degrees.

    For a mean this is Student's interval. The plain quantiles of a bootstrap over three seeds are the least
    and the greatest seed, which hold the truth three times in four, not nineteen in twenty. Of several
    intervals that are to hold all together each has its share of the 5 % (Bonferroni).
    """
    value, drawn = float(values[0]), values[1:]
    if num_seeds < 2 or not math.isfinite(value):
        return UNKNOWN
    outside = (1 - LEVEL) / num_together / 2
    if not np.isfinite(drawn).all():
        low, high = np.quantile(drawn, [outside, 1 - outside], method="nearest")
        return SeedInterval(float(low), float(high))
    wide = float(stdtrit(num_seeds - 1, 1 - outside)) * math.sqrt(num_seeds / (num_seeds - 1))
    reach = wide * float(drawn.std())
    return SeedInterval(value - reach, value + reach)
