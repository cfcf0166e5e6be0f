"""How far the optimum moves when the network grows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from theodolite.core.size import Size
from theodolite.sweeping.optimum import UNKNOWN, Interval, Optimum, interval
from theodolite.sweeping.scale import Floats, Scale

Along = Literal["width", "depth"]
ALONG: tuple[Along, ...] = ("width", "depth")
SEEN = 0.005
"""The least movement that two digits behind the point show."""


@dataclass(frozen=True)
class Drift:
    """The slope of the optimum against the log2 of width or depth, over all lines of sizes."""

    along: Along
    slope: float
    """On the scale of the swept quantity (octaves of a learning rate) per doubling; nan where `bounded`."""
    interval: Interval
    movement: float
    """Between the lowest and the highest optimum of the line on which they are farthest apart; at least so
    much where `bounded`."""
    sizes: tuple[Size, ...]
    bounded: bool
    """Is one of the optima a bound, or not known?"""

    @property
    def told(self) -> bool:
        """Do the runs say anything about how far the optimum moves?"""
        return not self.bounded or self.movement >= SEEN


def drifts(optima: Sequence[Optimum], resampled: Mapping[Size, Floats], scale: Scale) -> Iterator[Drift]:
    """Along width and depth, where there are at least two sizes. `resampled`: places of the optima, drawn."""
    for along in ALONG:
        lines = lines_of([optimum.size for optimum in optima if math.isfinite(optimum.value)], along)
        if not lines:
            continue
        chosen = {optimum.size: optimum for optimum in optima}
        sizes = [size for line in lines for size in line]
        places = {size: scale.place(chosen[size].value) for size in sizes}
        least = {size: _least_place(chosen[size], scale) for size in sizes}
        greatest = {size: _greatest_place(chosen[size], scale) for size in sizes}
        slope = float(_slopes(lines, {size: np.array([place]) for size, place in places.items()}, along)[0])
        num_seeds = min(chosen[size].num_seeds for size in sizes)
        bounded = not all(chosen[size].found for size in sizes)
        around = interval(slope, _slopes(lines, resampled, along), num_seeds)
        yield Drift(
            along=along,
            slope=math.nan if bounded else slope,
            interval=UNKNOWN if bounded else around,
            movement=max(
                0.0,
                *(max(least[size] for size in line) - min(greatest[size] for size in line) for line in lines),
            ),
            sizes=tuple(sizes),
            bounded=bounded,
        )


def lines_of(sizes: Sequence[Size], along: Along) -> list[list[Size]]:
    """Sizes that differ in width alone (or in depth alone), from small to large; lines of two and more.

    >>> [[str(size) for size in line] for line in lines_of([Size(64, 2), Size(32, 2), Size(64, 4)], "width")]
    [['32 × 2', '64 × 2']]
    """
    lines: dict[int, list[Size]] = {}
    for size in sorted(sizes):
        lines.setdefault(size.depth if along == "width" else size.width, []).append(size)
    return [line for line in lines.values() if len(line) > 1]


def extent(size: Size, along: Along) -> int:
    """How large it is along the axis."""
    return size.width if along == "width" else size.depth


def _least_place(optimum: Optimum, scale: Scale) -> float:
    """The optimum lies there or above."""
    return scale.place(optimum.value) if optimum.found or optimum.edge == "high" else -math.inf


def _greatest_place(optimum: Optimum, scale: Scale) -> float:
    """The optimum lies there or below."""
    return scale.place(optimum.value) if optimum.found or optimum.edge == "low" else math.inf


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
