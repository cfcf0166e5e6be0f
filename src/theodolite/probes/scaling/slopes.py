"""Powers of the size that values follow: least squares on two logarithmic axes, with seeds as an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from theodolite.probes.scaling.first_steps import Track

Axis = Literal["width", "depth"]
AXES: tuple[Axis, ...] = ("width", "depth")


@dataclass(frozen=True)
class Slope:
    """A quantity goes as the size to the power `value`, and should go as its power `expected`.

    >>> Slope("branch.0", "depth", value=-0.8, low=-0.9, high=-0.7, expected=-1.0).at_ten_times
    1.58...
    """

    quantity: str
    axis: Axis
    value: float
    low: float
    high: float
    """The 95 % interval: a t interval over the slopes of the seeds. nan with a single seed. It speaks of
    the noise between seeds alone, not of a curve that is no straight line."""
    expected: float

    @property
    def excess(self) -> float:
        """By how much it is off."""
        return self.value - self.expected

    @property
    def judged(self) -> bool:
        """Does it say something about the parameterization?

        Not so the `logits`: those of a readout that starts at random start the smaller the wider the network
        is, and should; their change is judged. Nor along the depth the stream on its way: after one block it
        is at another point at every depth, and at depth 2 its middle is one step of two.
        """
        on_the_way = self.axis == "depth" and self.quantity in ("stream.first", "stream.middle")
        return self.quantity != "logits" and not on_the_way

    @property
    def at_ten_times(self) -> float:
        """By what factor the quantity is off at ten times the size."""
        return 10.0**self.excess if math.isfinite(self.value) else math.nan

    def within(self, tolerance: float) -> bool:
        """Is the slope within ±tolerance of what it should be? One of a run that diverged never is."""
        return abs(self.excess) <= tolerance

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return f"{self.quantity} against {self.axis}: a run diverged"
        spread = f" ({self.low:+.2f} to {self.high:+.2f})" if math.isfinite(self.low) else ""
        return (
            f"{self.quantity} goes as {self.axis}^{self.value:+.2f}{spread}, expected {self.expected:+g}: "
            f"×{self.at_ten_times:.2g} at 10×"
        )


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
    found = []
    for axis in AXES:
        seeds = [
            chosen
            for seed in sorted({track.seed for track in tracks})
            if _varies(chosen := [track for track in tracks if track.seed == seed], axis)
        ]
        for name in names if seeds else ():
            slopes = [_slope(chosen, name, axis, step) for chosen in seeds]
            expected = tracks[0].expected.get(name, 0.0) if axis == "depth" else 0.0
            found.append(_gathered(name, axis, slopes, expected))
    return tuple(found)


def worst_first(slopes: Iterable[Slope]) -> tuple[Slope, ...]:
    """By how far they are off; those of runs that diverged before all others."""
    return tuple(
        sorted(slopes, key=lambda one: abs(one.excess) if math.isfinite(one.excess) else math.inf)[::-1]
    )


def _gathered(quantity: str, axis: Axis, slopes: Sequence[float], expected: float) -> Slope:
    mean = float(np.mean(slopes))
    low = high = math.nan
    if len(slopes) > 1:
        error = float(np.std(slopes, ddof=1)) / math.sqrt(len(slopes))
        half = float(stdtrit(len(slopes) - 1, 0.975)) * error
        low, high = mean - half, mean + half
    return Slope(quantity, axis, mean, low, high, expected)


def _slope(tracks: Sequence[Track], name: str, axis: Axis, step: int) -> float:
    """Least squares within groups of sizes that differ along the axis alone; nan where a value is not finite.

    A quantity that is 0 everywhere does not move: its slope is 0.
    """
    across = covariance = 0.0
    if not any(track.values[name][step] for track in tracks):
        return 0.0
    for group in _groups(tracks, axis):
        values = np.array([track.values[name][step] for track in group])
        if not (np.isfinite(values).all() and (values > 0).all()):
            return math.nan
        x = np.log2([_along(track, axis) for track in group])
        y = np.log2(values)
        across += float(((x - x.mean()) ** 2).sum())
        covariance += float(((x - x.mean()) * (y - y.mean())).sum())
    return covariance / across


def _groups(tracks: Sequence[Track], axis: Axis) -> list[list[Track]]:
    other: Axis = "depth" if axis == "width" else "width"
    fixed = sorted({_along(track, other) for track in tracks})
    return [[track for track in tracks if _along(track, other) == value] for value in fixed]


def _varies(tracks: Sequence[Track], axis: Axis) -> bool:
    return any(len({_along(track, axis) for track in group}) > 1 for group in _groups(tracks, axis))


def _along(track: Track, axis: Axis) -> int:
    return track.size.width if axis == "width" else track.size.depth
