"""A number that was estimated, and how far it can be trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass

NORMAL_95 = 1.959964
"""Standard errors on each side of an interval that covers 95 %."""


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error.

    >>> Estimate(10.0, 0.5)
    Estimate(value=10.0, error=0.5)
    >>> print(Estimate(10.0, 0.5))
    10 (9.02 to 11)
    >>> print(Estimate(10.0, 0.0))
    10 (exact)
    >>> print(Estimate(math.nan, 0.0))
    nan (not finite)
    """

    value: float
    error: float
    """One standard error; 0 where the value is exact."""

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return self.value - NORMAL_95 * self.error

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""
        return self.value + NORMAL_95 * self.error

    @property
    def exact(self) -> bool:
        """Was it computed, not estimated? What is not finite is not known."""
        return self.error == 0 and math.isfinite(self.value)

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return f"{self.value} (not finite)"
        return (
            f"{self.value:.3g} (exact)"
            if self.exact
            else f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"
        )
