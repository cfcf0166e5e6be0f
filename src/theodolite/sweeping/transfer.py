"""How far the optimum moves when the network grows, and the loss from using another size's optimum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from theodolite.core.size import Size
from theodolite.sweeping.curves import (
    UNKNOWN,
    Floats,
    Optimum,
    Scale,
    SeedInterval,
    SweepCurve,
    interval,
    losses_at,
    vertices,
)

Along = Literal["width", "depth"]
ALONG: tuple[Along, ...] = ("width", "depth")
LEAST_SHOWN = 0.005
"""The least movement that two decimals show."""
CLOSE = 0.5
"""Octaves; optima that are no farther apart count as the same."""
SMALL_LOSS = 0.01
"""Fraction of the loss; smaller losses from transfer do not count."""


@dataclass(frozen=True)
class OptimumDrift:
    """The slope of the optimum against the log2 of width or depth, over all lines of sizes."""

    along: Along
    slope: float
    """On the scale of the swept quantity (octaves of a learning rate) per doubling; nan where `bounded`."""
    interval: SeedInterval
    movement: float
    """The largest distance between two optima on one line of sizes; a lower bound where `bounded`."""
    sizes: tuple[Size, ...]
    bounded: bool
    """Is one of the optima only a bound, or unknown?"""

    @property
    def told(self) -> bool:
        """Do the runs say anything about how far the optimum moves?"""
        return not self.bounded or self.movement >= LEAST_SHOWN


def drifts(
    optima: Sequence[Optimum], resampled: Mapping[Size, Floats], scale: Scale
) -> Iterator[OptimumDrift]:
    """Along width and depth, if there are two sizes. `resampled`: places of the optima in each resample."""
    chosen = {optimum.size: optimum for optimum in optima if math.isfinite(optimum.value)}
    places = {size: scale.place(optimum.value) for size, optimum in chosen.items()}
    least, most = dict(places), dict(places)  # between which an optimum that is not found may lie
    for size, one in chosen.items():
        if not one.found and one.edge != "high":
            least[size] = -math.inf
        if not one.found and one.edge != "low":
            most[size] = math.inf
    for along in ALONG:
        lines = lines_of(list(chosen), along)
        if not lines:
            continue
        sizes = [size for line in lines for size in line]
        slope = float(_slopes(lines, {size: np.array([place]) for size, place in places.items()}, along)[0])
        num_seeds = min(chosen[size].num_seeds for size in sizes)
        bounded = not all(chosen[size].found for size in sizes)
        around = interval(slope, _slopes(lines, resampled, along), num_seeds)
        apart = [max(least[size] for size in line) - min(most[size] for size in line) for line in lines]
        yield OptimumDrift(
            along=along,
            slope=math.nan if bounded else slope,
            interval=UNKNOWN if bounded else around,
            movement=max(0.0, *apart),
            sizes=tuple(sizes),
            bounded=bounded,
        )


def lines_of(sizes: Sequence[Size], along: Along) -> list[list[Size]]:
    """Lines of two or more sizes that differ in width alone (or depth alone), from small to large.

    >>> [[str(size) for size in line] for line in lines_of([Size(64, 2), Size(32, 2), Size(64, 4)], "width")]
    [['32 × 2', '64 × 2']]
    """
    lines: dict[int, list[Size]] = {}
    for size in sorted(sizes):
        lines.setdefault(size.depth if along == "width" else size.width, []).append(size)
    return [line for line in lines.values() if len(line) > 1]


def extent(size: Size, along: Along) -> int:
    """Its width, or its depth."""
    return size.width if along == "width" else size.depth


def _slopes(lines: Sequence[Sequence[Size]], places: Mapping[Size, Floats], along: Along) -> Floats:
    """Least squares with one slope for all lines and a level for each."""
    above: Floats = np.zeros(1)
    below = 0.0
    for line in lines:
        octaves = np.log2([extent(size, along) for size in line])
        octaves -= octaves.mean()
        above = above + sum(octave * places[size] for octave, size in zip(octaves, line, strict=True))
        below += float(octaves @ octaves)
    return above / below


@dataclass(frozen=True)
class Transfer:
    """The loss at one size with the optimum of the base, less the loss with its own."""

    size: Size
    at: float
    """The value that was tried here nearest to the best one of the base."""
    loss: float
    """The mean loss there."""
    lost: float
    """That, less the least mean loss here; nan where the base's optimum is only a bound."""
    interval: SeedInterval
    """Of `lost`. Unknown where it is zero in every resample, which says more of the grid than of the loss."""
    interpolated: float
    """The same between the points: on the parabolas, at the vertex of the base."""
    beyond: bool
    """Does the best value of the base lie outside what was tried here?"""
    bound: bool
    """Is `lost` a lower bound, because of `beyond` or because the best value here is the last tried?"""


@dataclass(frozen=True)
class Change:
    """From one size to the next larger one, both with the best value of the base."""

    along: Along
    smaller: Size
    larger: Size
    change: float
    """Of the loss: below zero where larger is better."""
    interval: SeedInterval
    """Those of all changes of a family hold together at 95 %."""

    @property
    def worse(self) -> bool:
        """Is the larger one worse by more than the noise of seeds, or does it diverge?"""
        return self.change > 0 and (math.isinf(self.change) or self.interval.low > 0)

    @property
    def untold(self) -> bool:
        """Has the larger one the higher loss, with one seed alone, so that it may be noise?"""
        return self.change > 0 and not self.worse and not self.interval.known


@dataclass(frozen=True)
class TransferReach:
    """The smallest size of a line from which the optimum transfers to the largest.

    A size qualifies if its optimum is within half an octave of the largest's, or if with it the largest loses
    less than 1 % or than the noise of seeds; and if all sizes in between qualify.
    """

    along: Along
    largest: Size
    smallest: Size | None
    """None if not even the second largest qualifies."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """A curve, its optimum and its resampled means."""

    curve: SweepCurve
    optimum: Optimum
    means: Floats
    """1 + resamples × values; the first row are the true means."""
    places: Floats

    def lowest(self, scale: Scale) -> tuple[Floats, Floats]:
        """Where each row is lowest, and how low."""
        return vertices(self.places, self.means, scale)


def transfers(drawn: Mapping[Size, Drawn], base: Size, scale: Scale) -> Iterator[Transfer]:
    """From the base to every size, unless all of the base diverged."""
    if base not in drawn or math.isnan(drawn[base].optimum.best):
        return
    source = drawn[base]
    for size, target in drawn.items():
        if math.isnan(target.optimum.best):
            continue
        losses, nearest = _losses_at_best_of(source, target)
        lost, between = losses - target.means.min(1), _between(source, target, scale)
        around = interval(float(lost[0]), lost[1:], _num_seeds(source, target))
        if source.optimum.edge:
            lost, between, around = np.full_like(lost, np.nan), math.nan, UNKNOWN
        yield Transfer(
            size=size,
            at=target.curve.values[nearest],
            loss=float(losses[0]),
            lost=float(lost[0]),
            interval=around if lost.any() else UNKNOWN,
            interpolated=between,
            beyond=(beyond := _is_beyond(source, target)),
            bound=size != base and (beyond or bool(target.optimum.edge)),
        )


def changes(drawn: Mapping[Size, Drawn], base: Size) -> Iterator[Change]:
    """Along every line of sizes, without sizes at which the base's best was not tried."""
    if base not in drawn or math.isnan(drawn[base].optimum.best):
        return
    source = drawn[base]
    pairs = [
        (along, smaller, larger)
        for along in ALONG
        for line in lines_of(list(drawn), along)
        for smaller, larger in pairwise(
            size for size in line if size == base or not _is_beyond(source, drawn[size])
        )
    ]
    for along, smaller, larger in pairs:
        before, here = _losses_at_best_of(source, drawn[smaller])
        after, there = _losses_at_best_of(source, drawn[larger])
        with np.errstate(invalid="ignore"):
            change = np.nan_to_num(after - before, nan=0.0, posinf=np.inf, neginf=-np.inf)
        num_seeds = min(drawn[smaller].curve.num_seeds[here], drawn[larger].curve.num_seeds[there])
        around = interval(float(change[0]), change[1:], num_seeds, num_together=len(pairs))
        yield Change(along, smaller, larger, float(change[0]), around)


def reaches(drawn: Mapping[Size, Drawn], scale: Scale) -> Iterator[TransferReach]:
    """For every line of sizes, the smallest from which the optimum transfers to the largest."""
    for along in ("width", "depth"):
        for line in lines_of([size for size, one in drawn.items() if one.optimum.found], along):
            *smaller, largest = line
            reached: Size | None = None
            for size in reversed(smaller):
                if not _good_for(drawn[size], drawn[largest], scale):
                    break
                reached = size
            yield TransferReach(along, largest, reached)


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


def _between(source: Drawn, target: Drawn, scale: Scale) -> float:
    """The loss from transfer by the target's parabolas, at the vertex of the source."""
    vertex, _ = source.lowest(scale)
    _, lowest = target.lowest(scale)
    there = losses_at(target.places, target.means[:1], vertex[:1], scale)
    return max(0.0, float(there[0] - lowest[0]))


def _losses_at_best_of(source: Drawn, target: Drawn) -> tuple[Floats, int]:
    """By resample, the target's mean at the point nearest to the source's best; its index in the first."""
    best = source.places[np.argmin(source.means, axis=1)]
    nearest = np.argmin(np.abs(target.places[None] - best[:, None]), axis=1)
    return np.take_along_axis(target.means, nearest[:, None], 1)[:, 0], int(nearest[0])


def _is_beyond(source: Drawn, target: Drawn) -> bool:
    """Is the source's best farther than half the narrowest step from everything tried at the target?"""
    best = source.places[np.argmin(source.means[0])]
    steps = np.diff(target.places)
    return bool(np.abs(target.places - best).min() > (steps.min() / 2 if len(steps) else 0.0) + 1e-9)


def _num_seeds(*drawn: Drawn) -> int:
    return min(one.optimum.num_seeds for one in drawn)
