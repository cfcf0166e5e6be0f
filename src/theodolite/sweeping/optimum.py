"""Where a curve is lowest: a parabola through its best points, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from theodolite.core.size import Size
from theodolite.sweeping.curves import Curve, resampled_means
from theodolite.sweeping.scale import Floats, Scale

Edge = Literal["", "low", "high", "only"]

REACH = 1.0
"""Octaves to either side of the best point: the parabola goes through the points there, three at least."""
LEVEL = 0.95
"""Of every interval."""


@dataclass(frozen=True)
class Interval:
    """Where a value lies, at 95 %; nan where one seed says nothing about it."""

    low: float
    high: float

    @property
    def known(self) -> bool:
        """Is there one?"""
        return not math.isnan(self.low)


UNKNOWN = Interval(math.nan, math.nan)


@dataclass(frozen=True)
class Optimum:
    """The best value of the swept quantity at one size."""

    size: Size
    best: float
    """The best value that was tried; nan where all runs diverged."""
    loss: float
    """The mean loss there."""
    value: float
    """The vertex of the parabola, not beyond the neighbours of the best."""
    interval: Interval
    """Of `value`."""
    fitted: float
    """The loss that the parabola has at its vertex."""
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


def find_optimum(curve: Curve, scale: Scale, seeds: Sequence[int], weights: Floats) -> Optimum:
    """The optimum of a curve, with an interval from the resamples in `weights`."""
    places = np.array([scale.place(value) for value in curve.values])
    means = curve.means
    found, fitted = vertices(places, means[None], scale)
    vertex = float(found[0])
    if math.isnan(vertex):
        seeds_of_all = min(curve.num_seeds)
        return Optimum(curve.size, math.nan, math.inf, math.nan, UNKNOWN, math.inf, "", False, seeds_of_all)
    index = int(np.argmin(means))
    last = len(means) - 1
    edge: Edge = "only" if last == 0 else "low" if index == 0 else "high" if index == last else ""
    num_seeds = min(curve.num_seeds[max(index - 1, 0) : index + 2])
    drawn, _ = vertices(places, resampled_means(curve, seeds, weights), scale)
    around = UNKNOWN if edge else interval(vertex, drawn, num_seeds)
    noisy = around.high - around.low > places[-1] - places[0]
    around = UNKNOWN if noisy else around
    return Optimum(
        size=curve.size,
        best=curve.values[index],
        loss=float(means[index]),
        value=scale.value(vertex),
        interval=Interval(scale.value(around.low), scale.value(around.high)),
        fitted=float(fitted[0]),
        edge=edge,
        noisy=noisy,
        num_seeds=num_seeds,
    )


def vertices(places: Floats, means: Floats, scale: Scale) -> tuple[Floats, Floats]:
    """Where each row of means is lowest, and how low: vertices of parabolas.

    A parabola goes through the best point and its neighbours, or by least squares through all points within
    an octave of the best, if those are more. Its vertex is not let beyond the neighbours. The best point is
    the answer itself where it is the first or last, and where a neighbour has diverged.

    >>> places = np.array([-9.0, -8.0, -7.0, -6.0])
    >>> vertices(places, (places[None] + 7.25) ** 2 + 1, Scale("lr", log=True))
    (array([-7.25]), array([1.]))
    """
    best = np.argmin(means, axis=1)
    found = places[best]
    lowest = np.take_along_axis(means, best[:, None], 1)[:, 0]
    found = np.where(np.isinf(lowest), np.nan, found)
    for index in range(1, len(places) - 1):
        rows = np.flatnonzero((best == index) & np.isfinite(means[:, [index - 1, index + 1]]).all(1))
        if rows.size:
            low, high = places[[index - 1, index + 1]] - places[index]
            a, b, c = parabolas(places, means[rows], index, scale)
            bent = a > 0
            vertex = np.where(bent, -b / (2 * np.where(bent, a, 1.0)), 0.0).clip(low, high)
            found[rows] = places[index] + vertex
            lowest[rows] = np.where(bent, c + b * vertex + a * vertex**2, lowest[rows])
    return found, lowest


def losses_at(places: Floats, means: Floats, place: Floats, scale: Scale) -> Floats:
    """Each row of means read off at a place of its own, on the parabola around the nearest point.

    Beyond the points the nearest end counts; where a point next to the place has diverged, so has the place.
    """
    place = place.clip(places[0], places[-1])
    nearest = np.argmin(np.abs(places[None] - place[:, None]), axis=1)
    values = np.take_along_axis(means, nearest[:, None], 1)[:, 0].copy()
    apart = ~np.isclose(place, places[nearest])
    for index in range(len(places)):
        rows = np.flatnonzero((nearest == index) & apart)
        if rows.size:
            middle = min(max(index, 1), len(places) - 2)
            offset = place[rows] - places[middle]
            with np.errstate(invalid="ignore"):
                a, b, c = parabolas(places, means[rows], middle, scale)
                values[rows] = np.nan_to_num(c + b * offset + a * offset**2, nan=np.inf, posinf=np.inf)
    return values


def parabolas(places: Floats, means: Floats, index: int, scale: Scale) -> Floats:
    """`a, b, c` of `a t² + b t + c` for each row of means, t being the distance from the point at `index`.

    Points that have diverged are left out, if they are no neighbours.
    """
    offsets = places - places[index]
    near = np.zeros(len(places), dtype=bool)
    near[max(index - 1, 0) : index + 2] = True
    core = near.copy()
    if scale.log:
        near |= np.abs(offsets) <= REACH + 1e-9
    near &= np.isfinite(means).all(0) | core
    found = _least_squares(offsets[near], means[:, near])
    if near.sum() > 3 and (found[0] <= 0).any():  # too rough for many points: the nearest three
        found = np.where(found[0] > 0, found, _least_squares(offsets[core], means[:, core]))
    return found


def interval(value: float, resampled: Floats, num_seeds: int, *, num_together: int = 1) -> Interval:
    """`value ± t √(n/(n−1)) s`: s the spread of the resamples, t Student's at 97.5 % with n − 1 degrees.

    For a mean this is Student's interval. The plain quantiles of a bootstrap over three seeds are the least
    and the greatest seed, which hold the truth three times in four, not nineteen in twenty. Of several
    intervals that are to hold all together each has its share of the 5 % (Bonferroni).
    """
    if num_seeds < 2 or not math.isfinite(value):
        return UNKNOWN
    outside = (1 - LEVEL) / num_together / 2
    if not np.isfinite(resampled).all():
        low, high = np.quantile(resampled, [outside, 1 - outside], method="nearest")
        return Interval(float(low), float(high))
    wide = float(stdtrit(num_seeds - 1, 1 - outside)) * math.sqrt(num_seeds / (num_seeds - 1))
    reach = wide * float(resampled.std())
    return Interval(value - reach, value + reach)


def _least_squares(offsets: Floats, means: Floats) -> Floats:
    design = np.stack([offsets**2, offsets, np.ones_like(offsets)], axis=1)
    if len(offsets) < 3:  # a line
        design[:, 0] = 0.0
    found: Floats = np.linalg.pinv(design) @ means.T
    return found
