"""What it costs to take the optimum of another size instead of tuning, and from how small a one one may."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from theodolite.size import Size
from theodolite.sweeping.curves import Curve
from theodolite.sweeping.drift import Along, lines_of
from theodolite.sweeping.optimum import UNKNOWN, Interval, Optimum, interval, losses_at, vertices
from theodolite.sweeping.scale import Floats, Scale

CLOSE = 0.5
"""Octaves: optima that are no farther apart are the same for use."""
SMALL_LOSS = 0.01
"""Of the loss: what is lost below this does not count."""


@dataclass(frozen=True)
class Transfer:
    """The loss at one size with the optimum of the base, less the loss with its own."""

    size: Size
    at: float
    """The value that was tried here nearest to the best one of the base."""
    loss: float
    """The mean loss there."""
    lost: float
    """That, less the least mean loss here."""
    interval: Interval
    """Of `lost`."""
    interpolated: float
    """The same between the points: on the parabolas, at the vertex of the base."""
    beyond: bool
    """Does the best value of the base lie outside what was tried here? Then at least so much is lost."""


@dataclass(frozen=True)
class Change:
    """From one size to the next larger one, both with the best value of the base."""

    along: Along
    smaller: Size
    larger: Size
    change: float
    """Of the loss: below zero where larger is better."""
    interval: Interval

    @property
    def worse(self) -> bool:
        """Is the larger one worse by more than the noise of seeds?"""
        return self.change > 0 and not self.interval.low <= 0


@dataclass(frozen=True)
class Reach:
    """The smallest size of a line from which the optimum transfers to the largest.

    It does where its optimum is within half an octave of the largest's, or where the largest loses with it
    less than 1 % or than the noise of seeds; and where all sizes between do as well.
    """

    along: Along
    largest: Size
    smallest: Size | None
    """None where not even the second largest will do."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """A curve, its optimum and its resampled means."""

    curve: Curve
    optimum: Optimum
    means: Floats
    """1 + resamples × values; the first row are the true means."""
    places: Floats

    def lowest(self, scale: Scale) -> tuple[Floats, Floats]:
        """Where each row is lowest, and how low."""
        return vertices(self.places, self.means, scale)


def transfers(drawn: Mapping[Size, Drawn], base: Size, scale: Scale) -> Iterator[Transfer]:
    """To every size from the base, if the base was run and not all of it diverged."""
    if base not in drawn or math.isnan(drawn[base].optimum.best):
        return
    source = drawn[base]
    for size, target in drawn.items():
        if math.isnan(target.optimum.best):
            continue
        losses, nearest = _losses_at_best_of(source, target)
        lost = losses - target.means.min(1)
        vertex, _ = source.lowest(scale)
        _, lowest = target.lowest(scale)
        between = losses_at(target.places, target.means[:1], vertex[:1], scale)[0] - lowest[0]
        yield Transfer(
            size=size,
            at=target.curve.values[nearest],
            loss=float(losses[0]),
            lost=float(lost[0]),
            interval=UNKNOWN
            if size == base
            else interval(float(lost[0]), lost[1:], _num_seeds(source, target)),
            interpolated=max(0.0, float(between)),
            beyond=_is_beyond(source, target),
        )


def changes(drawn: Mapping[Size, Drawn], base: Size) -> Iterator[Change]:
    """Along every line of sizes, step by step."""
    if base not in drawn or math.isnan(drawn[base].optimum.best):
        return
    for along in ("width", "depth"):
        for line in lines_of(list(drawn), along):
            # A size at which the base's best was not tried cannot be compared.
            for smaller, larger in pairwise(
                size for size in line if size == base or not _is_beyond(drawn[base], drawn[size])
            ):
                before, _ = _losses_at_best_of(drawn[base], drawn[smaller])
                after, _ = _losses_at_best_of(drawn[base], drawn[larger])
                with np.errstate(invalid="ignore"):
                    change = np.nan_to_num(after - before, nan=0.0, posinf=np.inf, neginf=-np.inf)
                num_seeds = _num_seeds(drawn[smaller], drawn[larger])
                around = interval(float(change[0]), change[1:], num_seeds)
                yield Change(along, smaller, larger, float(change[0]), around)


def reaches(drawn: Mapping[Size, Drawn], scale: Scale) -> Iterator[Reach]:
    """For every line of sizes: from how small a network does the optimum transfer to its largest?"""
    for along in ("width", "depth"):
        for line in lines_of([size for size, one in drawn.items() if one.optimum.found], along):
            *smaller, largest = line
            reached: Size | None = None
            for size in reversed(smaller):
                if not _good_for(drawn[size], drawn[largest], scale):
                    break
                reached = size
            yield Reach(along, largest, reached)


def _good_for(source: Drawn, target: Drawn, scale: Scale) -> bool:
    apart = abs(scale.place(source.optimum.value) - scale.place(target.optimum.value))
    if scale.log and apart <= CLOSE:
        return True
    if _is_beyond(source, target):
        return False
    losses, _ = _losses_at_best_of(source, target)
    least = target.means[0].min()
    column = target.curve.losses[:, int(np.argmin(target.means[0]))]
    column = column[np.isfinite(column)]
    noise = column.std(ddof=1) / math.sqrt(len(column)) if len(column) > 1 else 0.0
    return bool(losses[0] - least <= max(SMALL_LOSS * abs(least), noise))


def _losses_at_best_of(source: Drawn, target: Drawn) -> tuple[Floats, int]:
    """The means of the target at the point nearest to the source's best, draw by draw; which in the first."""
    best = source.places[np.argmin(source.means, axis=1)]
    nearest = np.argmin(np.abs(target.places[None] - best[:, None]), axis=1)
    return np.take_along_axis(target.means, nearest[:, None], 1)[:, 0], int(nearest[0])


def _is_beyond(source: Drawn, target: Drawn) -> bool:
    """Is the source's best further from all that was tried at the target than half its narrowest step?"""
    best = source.places[np.argmin(source.means[0])]
    steps = np.diff(target.places)
    return bool(np.abs(target.places - best).min() > (steps.min() / 2 if len(steps) else 0.0) + 1e-9)


def _num_seeds(*drawn: Drawn) -> int:
    return min(one.optimum.num_seeds for one in drawn)
