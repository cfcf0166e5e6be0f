"""One line through the centre of a landscape: how far the loss takes to double, and how it bends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Range = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Slice:
    """The loss along one axis through the centre."""

    label: str
    places: NDArray[np.float64]
    """In lengths of the axis, 0 among them."""
    values: NDArray[np.float64]
    parabola: float
    """The second difference of the loss at the centre, over a step of the grid."""
    exact: float
    """`d'Hd`, which the parabola tends to on a finer grid; nan where there is no Hessian."""

    @property
    def doubles(self) -> Range:
        """Where the loss first is twice that of the centre, on both sides; infinite if nowhere.

        nan where the loss of the centre is not a positive number, which has no double.
        """
        centre = float(self.values[self.places == 0][0])
        if not 0 < centre < math.inf:
            return math.nan, math.nan
        behind, ahead = self.places <= 0, self.places >= 0
        return (
            -_first_above(-self.places[behind][::-1], self.values[behind][::-1], 2 * centre),
            _first_above(self.places[ahead], self.values[ahead], 2 * centre),
        )


def with_centre(places: NDArray[np.float64]) -> NDArray[np.float64]:
    """The places of a slice: the grid's, and the centre with a neighbour on each side."""
    step = places[1] - places[0]
    near = np.array([-step, 0.0, step])
    far = places[(np.abs(places[:, None] - near) > 1e-6 * step).all(1)]
    return np.sort(np.concatenate([far, near]))


def second_difference(places: NDArray[np.float64], values: NDArray[np.float64], step: float) -> float:
    """`(f(h) − 2 f(0) + f(−h)) / h²` at the centre."""
    before, here, after = (float(values[places == place][0]) for place in (-step, 0.0, step))
    return float((before - 2 * here + after) / step**2)


def _first_above(places: NDArray[np.float64], values: NDArray[np.float64], level: float) -> float:
    """Going outwards from 0: where the values first reach a level, between points by a straight line."""
    for index in range(1, len(places)):
        if not values[index] < level:  # nan too
            low, high = values[index - 1], values[index]
            part = (level - low) / (high - low) if math.isfinite(high) else 1.0
            return float(places[index - 1] + part * (places[index] - places[index - 1]))
    return math.inf
