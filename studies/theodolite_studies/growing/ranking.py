"""Does the signal's ranking of the insertion points predict what a block there gains?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import stats

from theodolite import data
from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.records import Record
from theodolite_studies.growing.training import (
    GrowingSetting,
    Lesson,
    Pupil,
    PupilSteps,
    enrolled,
    judged,
    optimizer_of,
    rounded,
    wsd,
)
from theodolite_studies.growing.ways import SignalLook, inserted, looked_at, tried

SIGNALS: Mapping[str, str] = {
    "gain": "the gain",
    "preconditioned": "the preconditioned gain",
    "relative": "the gain times the stream's mean square",
    "sign": "the sum of |M|",
    "jumped": "what a jump gains",
    "jumped preconditioned": "what a preconditioned jump gains",
}
"""What could rank the points. The sum of |M| is how fast the loss falls along its signs, as Adam steps at
first."""
VARIANTS = ("new", "all")
"""What is trained after an insertion: the new block alone, or everything."""
DRAWS = 1000
"""Of the bootstrap."""
FEWEST_SEEDS = 3
"""For an interval over seeds: two correlations, which end at ±1, may well be alike by chance."""
LEVEL = 0.95
"""Of intervals."""


def ranked(setting: GrowingSetting, seed: int, device: str) -> Iterator[Record]:
    """A record for each point, variant and order of the data: its signal, and what was gained there."""
    lesson = Lesson.of(setting, device)
    pupil = enrolled(setting, setting.width, setting.ranked_depth, seed, device)
    factors = wsd(setting.ranked_before, warmup=setting.warmup, decay=0)
    PupilSteps(pupil, lesson, order=seed, first=0, factors=factors).go(setting.ranked_before)
    look = looked_at(pupil, lesson, seed)
    known = _signals(pupil, lesson, look, seed)
    at_once = judged(pupil.model, lesson)
    for order in range(setting.orders):
        for variant in VARIANTS:
            control = dict.fromkeys(setting.moments, at_once)
            if variant == "all":
                control = _courses(pupil.copied(), lesson, f"{seed} {order}")
            for one in look.signal.points:
                other = pupil.copied()
                inserted(other, look, one.point)
                if variant == "new":
                    block = other.model.blocks[one.point.index]
                    other = Pupil(other.model, optimizer_of(block.parameters(), setting, device))
                losses = _courses(other, lesson, f"{seed} {order}")
                yield {
                    "variant": variant,
                    "order": order,
                    "point": one.point.index,
                    **known[one.point.index],
                    "control": {str(moment): rounded(loss) for moment, loss in control.items()},
                    "gained": {str(moment): rounded(control[moment] - losses[moment]) for moment in losses},
                }


def _signals(pupil: Pupil, lesson: Lesson, look: SignalLook, seed: int) -> dict[int, dict[str, float | None]]:
    """By point, everything that could rank it."""
    plain, conditioned = (
        tried(pupil, lesson, look, seed, preconditioned=which).by_point for which in (False, True)
    )
    found = {}
    for one in look.signal.points:
        values = {
            "gain": one.gain,
            "error": one.error,
            "preconditioned": one.preconditioned,
            "relative": look.relative(one),
            "sign": sum(float(each.abs().sum()) for each in one.directions.values()),
            "jumped": plain[one.point.index].gain,
            "jumped preconditioned": conditioned[one.point.index].gain,
        }
        found[one.point.index] = {name: rounded(value, 9) for name, value in values.items()}
    return found


def _courses(pupil: Pupil, lesson: Lesson, order: str) -> dict[int, float]:
    """The held-out loss at each of the moments of a short training."""
    moments = lesson.setting.moments
    factors = wsd(moments[-1], warmup=moments[0], decay=0)
    course = PupilSteps(pupil, lesson, order=f"after {order}", first=0, factors=factors)
    losses = {}
    for start, end in pairwise((0, *moments)):
        course.go(end - start)
        losses[end] = judged(pupil.model, lesson)
    return losses


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation over the points, a mean over seeds, and two intervals (95 %)."""

    value: float
    by_seed: tuple[float, ...]
    over_seeds: tuple[float, float]
    """By Student's t, cut off at ±1: for other networks of the kind. nan of too few seeds."""
    over_points: tuple[float, float]
    """By points that are drawn again within each seed: for the points of these networks, and as if they were
    independent, which neighbours are not."""

    def __str__(self) -> str:
        low, high = self.over_seeds
        seeds = f"{len(self.by_seed)} seed{'s' if len(self.by_seed) != 1 else ''}"
        if math.isnan(low):
            each = ", ".join(f"{value:+.2f}" for value in self.by_seed)
            return f"{self.value:+.2f} ({each}: {seeds}, no interval)"
        return f"{self.value:+.2f} ({low:+.2f} to {high:+.2f} over {seeds})"


def correlation(pairs: Mapping[int, tuple[Array, Array]]) -> Correlation:
    """Of two readings of the same points, by seed.

    A draw of points with all ties has no correlation, and is left out.

    >>> up = np.arange(8.0)
    >>> print(correlation({0: (up, up), 1: (up, up**3)}))
    +1.00 (+1.00, +1.00: 2 seeds, no interval)
    >>> print(correlation({0: (up, up), 1: (up, up**3), 2: (up, up[[1, 0, 2, 3, 4, 5, 6, 7]])}))
    +0.99 (+0.96 to +1.00 over 3 seeds)
    """
    generator = data.generator("growing", "bootstrap")
    seeds = sorted(pairs)
    by_seed = tuple(float(spearman(*pairs[seed])) for seed in seeds)
    again = np.stack([_resampled(*pairs[seed], generator) for seed in seeds])
    known = np.isfinite(again)
    counts = known.sum(0)
    drawn = np.where(known, again, 0).sum(0)[counts > 0] / counts[counts > 0]
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(drawn, tails) if len(drawn) else (np.nan, np.nan)
    return Correlation(
        float(np.mean(by_seed)), by_seed, _interval(np.array(by_seed)), (float(low), float(high))
    )


def spearman(one: Array, other: Array) -> Array:
    """The correlation of ranks along the last dimension; nan where one of them is constant."""
    first, second = (stats.rankdata(each, axis=-1) for each in (one, other))
    first, second = (each - each.mean(-1, keepdims=True) for each in (first, second))
    with np.errstate(invalid="ignore"):
        found: Array = (first * second).sum(-1) / np.sqrt((first**2).sum(-1) * (second**2).sum(-1))
    return found


def _interval(values: Array) -> tuple[float, float]:
    """Of the mean over seeds."""
    if len(values) < FEWEST_SEEDS:
        return math.nan, math.nan
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return max(-1.0, float(values.mean() - half)), min(1.0, float(values.mean() + half))


def _resampled(one: Array, other: Array, generator: np.random.Generator) -> Array:
    """The correlations of points that are drawn again."""
    places = generator.integers(len(one), size=(DRAWS, len(one)))
    return spearman(one[places], other[places])


def realised(records: Sequence[Record], variant: str, moment: int, column: str) -> dict[int, Array]:
    """By seed, a column of the points in their order: a signal, or what was gained; means over orders."""
    found = {}
    for seed in sorted({one["seed"] for one in records}):
        own = [one for one in records if one["seed"] == seed and one["variant"] == variant]
        points = sorted({one["point"] for one in own})
        values = [[_value(one, moment, column) for one in own if one["point"] == point] for point in points]
        if values:
            found[seed] = np.array([np.mean(each) for each in values])
    return found


def together(one: Mapping[int, Array], other: Mapping[int, Array]) -> dict[int, tuple[Array, Array]]:
    """Two readings of the seeds that both have."""
    return {seed: (one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())}


def in_two_orders(records: Sequence[Record], variant: str, moment: int) -> dict[int, tuple[Array, Array]]:
    """What was gained, with the data in two orders: no signal can be expected to agree better."""
    halves = [[one for one in records if one["order"] == order] for order in (0, 1)]
    return together(*(realised(half, variant, moment, "gained") for half in halves))


def _value(record: Record, moment: int, column: str) -> float:
    value = record["gained"][str(moment)] if column == "gained" else record[column]
    return float("nan") if value is None else float(value)
