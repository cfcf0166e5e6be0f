"""How far the optimum moves when the network grows, and the loss from using another size's optimum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from theodolite.core.size import Size
from theodolite.sweeping.curves import UNKNOWN, Floats, Resampled, Scale, SeedInterval, interval, loss_at

Along = Literal["width", "depth", "batch", "tokens"]
ALONG: tuple[Along, ...] = ("width", "depth", "batch", "tokens")
OF_NETWORK: tuple[Along, ...] = ("width", "depth")
"""Along these a larger one should not be worse; a larger batch may be."""
LEAST_SHOWN = 0.005
"""The least movement that two decimals show."""
CLOSE = 0.5
"""Octaves; optima that are no farther apart count as the same."""
SMALL_LOSS = 0.01
"""Fraction of the loss; smaller losses from transfer do not count."""


@dataclass(frozen=True)
class OptimumDrift:
    """The slope of the optimum against the log2 of width, depth, batch or tokens, over all lines of sizes."""

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


def drifts(curves: Mapping[Size, Resampled]) -> Iterator[OptimumDrift]:
    """Along width, depth, batch and tokens, if there are two sizes."""
    chosen = {size: one.optimum for size, one in curves.items() if math.isfinite(one.optimum.value)}
    least = {size: float(curves[size].vertex[0]) for size in chosen}
    most = dict(least)  # an optimum that is not found may lie beyond
    for size, one in chosen.items():
        # Where the first or last value is the best, the optimum is beyond half the way to its neighbour.
        steps = np.diff(curves[size].places) / 2
        if not one.found:
            least[size] = least[size] - steps[-1] if one.edge == "high" else -math.inf
            most[size] = most[size] + steps[0] if one.edge == "low" else math.inf
    for along in ALONG:
        lines = lines_of(list(chosen), along)
        if not lines:
            continue
        sizes = [size for line in lines for size in line]
        slopes = _slopes(lines, curves, along)
        bounded = not all(chosen[size].found for size in sizes)
        around = interval(slopes, min(chosen[size].num_seeds for size in sizes))
        apart = [max(least[size] for size in line) - min(most[size] for size in line) for line in lines]
        yield OptimumDrift(
            along=along,
            slope=math.nan if bounded else float(slopes[0]),
            interval=UNKNOWN if bounded else around,
            movement=max(0.0, *apart),
            sizes=tuple(sizes),
            bounded=bounded,
        )


def lines_of(sizes: Sequence[Size], along: Along) -> list[list[Size]]:
    """Lines of two or more sizes that differ in width alone (or depth, …), from small to large.

    >>> [[str(size) for size in line] for line in lines_of([Size(64, 2), Size(32, 2), Size(64, 4)], "width")]
    [['32 × 2', '64 × 2']]
    """
    lines: dict[tuple[int | None, ...], list[Size]] = {}
    for size in sorted(sizes):
        if getattr(size, along) is not None:
            rest = tuple(getattr(size, other) for other in ALONG if other != along)
            lines.setdefault(rest, []).append(size)
    return [line for line in lines.values() if len(line) > 1]


def _slopes(lines: Sequence[Sequence[Size]], curves: Mapping[Size, Resampled], along: Along) -> Floats:
    """By resample, least squares with one slope for all lines and a level for each."""
    above: Floats = np.zeros(1)
    below = 0.0
    for line in lines:
        octaves = np.log2([getattr(size, along) for size in line])
        octaves -= octaves.mean()
        above = above + octaves @ np.stack([curves[size].vertex for size in line])
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
    bound: bool
    """Is `lost` a lower bound, because the best value of the base lies outside what was tried here, or the
    best one here is the last tried?"""


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


def transfers(curves: Mapping[Size, Resampled], base: Size, scale: Scale) -> Iterator[Transfer]:
    """From the base to every size, unless all of the base diverged."""
    if base not in curves or math.isnan(curves[base].optimum.best):
        return
    source = curves[base]
    for size, target in curves.items():
        if math.isnan(target.optimum.best):
            continue
        losses, nearest = _losses_at_best_of(source, target)
        lost = losses - target.means.min(1)
        at_vertex = loss_at(target.places, target.means[0], float(source.vertex[0]), scale)
        between = max(0.0, at_vertex - float(target.lowest[0]))
        around = interval(lost, min(source.optimum.num_seeds, target.optimum.num_seeds))
        if source.optimum.edge:
            lost, between, around = np.full_like(lost, np.nan), math.nan, UNKNOWN
        yield Transfer(
            size=size,
            at=target.curve.values[nearest],
            loss=float(losses[0]),
            lost=float(lost[0]),
            interval=around if lost.any() else UNKNOWN,
            interpolated=between,
            bound=size != base and (_is_beyond(source, target) or bool(target.optimum.edge)),
        )


def changes(curves: Mapping[Size, Resampled], base: Size) -> Iterator[Change]:
    """Along every line of widths or depths, without sizes at which the base's best was not tried."""
    if base not in curves or math.isnan(curves[base].optimum.best):
        return
    source = curves[base]
    tried = [size for size, one in curves.items() if size == base or not _is_beyond(source, one)]
    pairs = [
        (along, *pair) for along in OF_NETWORK for line in lines_of(tried, along) for pair in pairwise(line)
    ]
    for along, smaller, larger in pairs:
        before, here = _losses_at_best_of(source, curves[smaller])
        after, there = _losses_at_best_of(source, curves[larger])
        with np.errstate(invalid="ignore"):
            change = np.nan_to_num(after - before, nan=0.0, posinf=np.inf, neginf=-np.inf)
        num_seeds = min(curves[smaller].curve.num_seeds[here], curves[larger].curve.num_seeds[there])
        around = interval(change, num_seeds, num_together=len(pairs))
        yield Change(along, smaller, larger, float(change[0]), around)


def reaches(curves: Mapping[Size, Resampled], scale: Scale) -> Iterator[TransferReach]:
    """For every line of sizes, the smallest from which the optimum transfers to the largest."""
    for along in ALONG:
        for *smaller, largest in lines_of([size for size, one in curves.items() if one.optimum.found], along):
            reached: Size | None = None
            for size in reversed(smaller):
                if not _good_for(curves[size], curves[largest], scale):
                    break
                reached = size
            yield TransferReach(along, largest, reached)


def _good_for(source: Resampled, target: Resampled, scale: Scale) -> bool:
    if scale.log and abs(source.vertex[0] - target.vertex[0]) <= CLOSE:
        return True
    if _is_beyond(source, target):
        return False
    losses, _ = _losses_at_best_of(source, target)
    least = target.means[0].min()
    column = target.curve.losses[:, int(np.argmin(target.means[0]))]
    column = column[np.isfinite(column)]
    noise = column.std(ddof=1) / math.sqrt(len(column)) if len(column) > 1 else 0.0
    return bool(losses[0] - least <= max(SMALL_LOSS * abs(least), noise))


def _losses_at_best_of(source: Resampled, target: Resampled) -> tuple[Floats, int]:
    """By resample, the target's mean at the point nearest to the source's best; its index in the first."""
    best = source.places[np.argmin(source.means, axis=1)]
    nearest = np.argmin(np.abs(target.places[None] - best[:, None]), axis=1)
    return np.take_along_axis(target.means, nearest[:, None], 1)[:, 0], int(nearest[0])


def _is_beyond(source: Resampled, target: Resampled) -> bool:
    """Is the source's best farther than half the narrowest step from everything tried at the target?"""
    best = source.places[np.argmin(source.means[0])]
    steps = np.diff(target.places)
    return bool(np.abs(target.places - best).min() > (steps.min() / 2 if len(steps) else 0.0) + 1e-9)
