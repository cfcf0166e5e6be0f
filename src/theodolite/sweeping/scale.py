"""How a swept quantity is measured and written: in octaves where it is a positive scale, else as it is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theodolite.core.errors import UseError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """The axis along which an optimum is sought.

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
        if self.log:
            return f"2^{_short(math.log2(value))}"
        return f"{value:.3g}"

    @property
    def label(self) -> str:
        """What stands at the axis."""
        return f"log2 of {self.name}" if self.log else self.name

    @property
    def unit(self) -> str:
        """Of a difference on the axis."""
        return "octaves" if self.log else f"of {self.name}"


def scale_of(name: str, values: Iterable[Any]) -> Scale:
    """The scale for the values that a quantity takes; refused if they are not numbers."""
    values = list(values)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise UseError(
                f"{name} takes the value {value!r}, which is no number, so it has no optimum. "
                "Leave it an axis, and sweep over another quantity, as in over='lr'"
            )
    return Scale(name, log=all(value > 0 for value in values))


def _short(exponent: float) -> str:
    """Two digits behind the point, and none that say nothing."""
    text = f"{exponent:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
