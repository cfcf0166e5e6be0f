"""Paired comparisons: mean difference over seeds, its interval and p, and Holm's rule for many tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from theodolite.core.errors import UseError

Verdict = Literal["holds", "fails", "unclear"]
LEVEL = 0.95
"""Of the interval."""
POWER = 0.8
"""The probability with which a visible effect is found."""


@dataclass(frozen=True, eq=False)
class Paired:
    """The differences of two ways to train, one for each seed that both have.

    The batches and the start that a seed shares cancel, so that effects far smaller than the spread of the
    losses can be seen. The difference is infinite where one of the two diverged, and nan where both did;
    there is no mean then.
    """

    differences: NDArray[np.float64]
    """The first way less the second, by seed."""

    @property
    def mean(self) -> float:
        """Over the seeds; nan if one of them is not finite."""
        return float(np.mean(self.differences)) if self._is_finite else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Of the mean, by Student's t: `mean ± t·s/√n` with n − 1 degrees of freedom, at 95 %."""
        half = float(stats.t.ppf((1 + LEVEL) / 2, len(self.differences) - 1)) * self._error
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        """Of the two-sided paired t-test."""
        if not math.isfinite(self._error):
            return math.nan
        if self._error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return 2 * float(stats.t.sf(abs(self.mean) / self._error, len(self.differences) - 1))

    def verdict(self, *, below: bool) -> Verdict:
        """Does the whole interval lie on the claimed side of zero?

        >>> gain = Paired(np.array([-0.010, -0.012, -0.011]))
        >>> gain.verdict(below=True), gain.verdict(below=False)
        ('holds', 'fails')
        >>> Paired(np.array([-0.010, 0.012, -0.011])).verdict(below=True)
        'unclear'

        Where runs diverged there is no interval: then all seeds, at least two, must be on one side.

        >>> Paired(np.array([math.inf, 0.02, 0.03])).verdict(below=False)
        'holds'
        >>> Paired(np.array([math.inf, -0.02, -0.03])).verdict(below=False)
        'unclear'
        """
        low, high = self.interval
        if len(self.differences) > 1 and not self._is_finite:
            low, high = float(np.min(self.differences)), float(np.max(self.differences))
        if high < 0:
            return "holds" if below else "fails"
        if low > 0:
            return "fails" if below else "holds"
        return "unclear"

    @property
    def _is_finite(self) -> bool:
        return len(self.differences) > 0 and bool(np.isfinite(self.differences).all())

    @property
    def _error(self) -> float:
        if len(self.differences) < 2 or not self._is_finite:
            return math.nan
        return float(np.std(self.differences, ddof=1) / math.sqrt(len(self.differences)))

    def __str__(self) -> str:
        """Mean, interval, p and how many seeds.

        >>> print(Paired(np.array([-0.010, -0.012, -0.011])))
        -0.0110 (-0.0135 to -0.0085), p 0.0027, 3 seeds
        >>> print(Paired(np.array([math.inf, -0.012, -0.011])))
        1 not finite, 1 higher, 2 lower, 3 seeds
        """
        low, high = self.interval
        count = f"{len(self.differences)} seed{'s' if len(self.differences) != 1 else ''}"
        if not self._is_finite:
            odd = int((~np.isfinite(self.differences)).sum())
            higher, lower = int((self.differences > 0).sum()), int((self.differences < 0).sum())
            return f"{odd} not finite, {higher} higher, {lower} lower, {count}"
        if not math.isfinite(low):
            return f"{self.mean:+.4f}, {count}"
        p = f"p {self.p:.2g}" if self.p >= 1e-4 else "p < 0.0001"
        return f"{self.mean:+.4f} ({low:+.4f} to {high:+.4f}), {p}, {count}"


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Paired:
    """The first less the second, for the seeds that both have; losses by seed.

    >>> paired({0: 1.5, 1: 1.25, 2: 1.0}, {1: 1.0, 0: 1.0}).differences
    array([0.5 , 0.25])
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise UseError(f"no seed is in both: {sorted(first)} and {sorted(second)}")
    one, other = (np.array([losses[seed] for seed in seeds]) for losses in (first, second))
    return Paired(less(one, other))


def less(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first less the second; nan where both diverged, as two that did not end are not alike.

    >>> less(np.array([math.inf, math.inf, 1.5]), np.array([math.inf, 1.0, 1.0]))
    array([nan, inf, 0.5])
    """
    with np.errstate(invalid="ignore"):
        return first - second


def standing(values: Sequence[float], level: float = 1 - LEVEL) -> tuple[bool, ...]:
    """Which of many tests stand if all of them together may err once in twenty times, by Holm's rule.

    The smallest p of m has to be at most level/m, the next level/(m − 1), and so on to the first that fails.

    >>> standing([0.04, 0.001, 0.02])
    (True, True, True)
    >>> standing([0.04, 0.001, 0.03])
    (False, True, False)

    References:
        Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    order = sorted(range(len(values)), key=lambda place: (math.isnan(values[place]), values[place]))
    found = [False] * len(values)
    for rank, place in enumerate(order):
        if not values[place] <= level / (len(values) - rank):
            break
        found[place] = True
    return tuple(found)


def visible_shift(num: int, *, sides: Literal[1, 2] = 1) -> float:
    """The smallest effect that is visible with so many seeds, in standard errors of their mean.

    A t-test at 5 %, one-sided or two-sided, finds it with the probability `POWER`.

    >>> round(visible_shift(5), 2), round(visible_shift(10_000), 2)  # 1.645 + 0.842 for many
    (3.04, 2.49)
    """
    limit = stats.t.isf((1 - LEVEL) / sides, num - 1)
    found: float = optimize.brentq(lambda shift: stats.nct.sf(limit, num - 1, shift) - POWER, 0.0, 100.0)
    return found


def smallest_effect(values: NDArray[np.float64], *, sides: Literal[1, 2] = 1) -> float:
    """The smallest effect that is visible, if the spread of these values is that of all seeds.

    It is a distance of the mean from its threshold; nan if a value is not finite or there is only one.

    >>> round(smallest_effect(np.array([0.9, 1.0, 1.1, 1.0, 1.0])), 3)
    0.096
    """
    num = len(values)
    if num < 2 or not np.isfinite(values).all():
        return math.nan
    return visible_shift(num, sides=sides) * float(np.std(values, ddof=1)) / math.sqrt(num)
