"""How a size grows from block to block: by an addition each time, or by a factor.

Branches of constant size (with a norm at their head) that are independent add up like independent vectors,
`RMS² = a + b·l`. Branches that grow with their input multiply it, `RMS² = a·(1 + c)^l`. Both laws have two
parameters, so for a constant relative error the law with the smaller sum of squares S of the logarithms is
more likely, by

    ΔAIC = n·ln(S_linear/S_exponential)

A difference of 6 is a likelihood ratio of e³ = 20. Neither law holds if the better one leaves a quarter of
the variance, or if one block alone makes more than half of the change: of the logarithm for the exponential
law, of the square for the linear one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from theodolite.present.text import counted

Kind = Literal["flat", "falling", "linear", "exponential", "unclear"]

FEWEST = 4
"""Blocks needed to tell two curves with two parameters each apart."""
FLAT = 1.5
"""Sizes that stay within this factor of the first have not grown."""
SURE = 6.0
"""ΔAIC at which one law counts as better."""
NOISE = 0.005
"""Relative error below which fits count as equal: sizes are means over a finite width."""
UNEXPLAINED, ONE_STEP = 0.25, 0.5
"""Fractions of the variance and of the change above which no law holds."""


@dataclass(frozen=True)
class GrowthLaw:
    """How a size changes with depth. Made by `fit_growth`."""

    kind: Kind
    blocks: int
    ratio: float
    """The last size over the first; nan if one of the sizes is zero, not finite or missing."""
    factor: float
    """The factor per block of the exponential law, √(1 + c)."""
    rise: float
    """The growth of the square per block by the linear law, relative to its start, b/a."""
    evidence: float
    """ΔAIC: above 0 for the exponential law, below for the linear one; nan if neither fits."""

    def __str__(self) -> str:
        many = counted(self.blocks, "block")
        if self.kind in ("flat", "falling"):
            return f"{self.kind} ({self.ratio:.3g}× over {many})"
        if math.isnan(self.ratio):
            return f"unclear over {many}: a size is zero, not finite or missing"
        total = f"{self.ratio:.3g}× over {many}"
        if self.kind == "unclear":
            why = "neither law fits" if math.isnan(self.evidence) else "both laws fit about as well"
            why = f"{many} {'is' if self.blocks == 1 else 'are'} too few" if self.blocks < FEWEST else why
            return f"{total}; linear or exponential is unclear: {why}"
        rise = f"RMS² grows by {self.rise:.2g} of its start in each block"
        law = rise if self.kind == "linear" else f"×{self.factor:.3g} in each block"
        return f"{self.kind}, {total}: {law} (ΔAIC {abs(self.evidence):.0f})"


def fit_growth(sizes: Sequence[float]) -> GrowthLaw:
    """The law that the root mean squares `sizes[l]`, l = 0 … L, follow.

    >>> print(fit_growth([(1 + block) ** 0.5 for block in range(9)]))
    linear, 3× over 8 blocks: RMS² grows by 1 of its start in each block (ΔAIC 67)
    >>> print(fit_growth([1.5 ** block for block in range(9)]))
    exponential, 25.6× over 8 blocks: ×1.5 in each block (ΔAIC 98)
    """
    blocks = len(sizes) - 1
    squares = np.square(np.asarray(sizes, dtype=np.float64))
    if blocks < 1 or not np.isfinite(squares).all() or (squares <= 0).any():
        return GrowthLaw("unclear", max(blocks, 0), math.nan, math.nan, math.nan, math.nan)
    ratio = float(sizes[-1] / sizes[0])
    levels, places = np.log(squares), np.arange(blocks + 1, dtype=np.float64)
    slope, height = np.polyfit(places, levels, 1)
    exponential = float(np.square(levels - height - slope * places).sum())
    linear, rise = _linear(places, levels)
    factor = math.exp(slope / 2)
    floor = len(places) * NOISE**2
    evidence = len(places) * math.log(max(linear, floor) / max(exponential, floor))
    steps = np.abs(np.diff(levels if evidence > 0 else squares))
    kind: Kind
    high, low = float(np.sqrt(squares.max())) / sizes[0], float(np.sqrt(squares.min())) / sizes[0]
    if 1 / FLAT < low <= high < FLAT:
        kind, evidence = "flat", math.nan
    elif ratio <= 1 / FLAT and high < FLAT:
        kind, evidence = "falling", math.nan
    elif blocks < FEWEST:
        kind = "unclear"
    elif (
        ratio < FLAT
        or min(linear, exponential) > UNEXPLAINED * float(np.square(levels - levels.mean()).sum())
        or steps.max() > ONE_STEP * steps.sum()
    ):
        kind, evidence = "unclear", math.nan
    elif abs(evidence) < SURE:
        kind = "unclear"
    else:
        kind = "exponential" if evidence > 0 else "linear"
    return GrowthLaw(kind, blocks, ratio, factor, rise, evidence)


def _linear(places: np.ndarray, levels: np.ndarray) -> tuple[float, float]:
    """The least squares of `levels = ln a + ln(1 + t·l)`, and t = b/a."""

    def squares(log_t: float) -> float:
        rest = levels - np.log1p(math.exp(log_t) * places)
        return float(np.square(rest - rest.mean()).sum())

    from scipy.optimize import minimize_scalar  # slow to import

    coarse = np.linspace(math.log(1e-6), math.log(1e6), 97)
    best = int(np.argmin([squares(one) for one in coarse]))
    low, high = coarse[max(best - 1, 0)], coarse[min(best + 1, len(coarse) - 1)]
    found = minimize_scalar(squares, bounds=(low, high), method="bounded")
    return float(found.fun), math.exp(float(found.x))
