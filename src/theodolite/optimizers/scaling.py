"""How quantities scale from base to target size: as a number, in symbols, and in words.

Symbols, all in units of the base size: r_in, r_out and r_L for fan-in, fan-out and number of residual
branches. `plan.explain` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from theodolite.anatomy.part import Part
from theodolite.optimizers.condition import Ratios, gradient, gradient_entry

Words = str | Callable[[Part, Ratios], str]


@dataclass(frozen=True)
class Scaling:
    """By how much something is larger than at base size."""

    value: Callable[[Part, Ratios], float]
    symbols: Words
    reason: Words

    def formula(self, part: Part, ratios: Ratios) -> str:
        """The value in symbols."""
        return self.symbols if isinstance(self.symbols, str) else self.symbols(part, ratios)

    def why(self, part: Part, ratios: Ratios) -> str:
        """Where the value comes from: half a sentence."""
        return self.reason if isinstance(self.reason, str) else self.reason(part, ratios)

    def squared(self) -> Scaling:
        """The growth of the square."""
        return Scaling(
            lambda part, ratios: self.value(part, ratios) ** 2,
            lambda part, ratios: f"({self.formula(part, ratios)})²",
            lambda part, ratios: self.why(part, ratios).replace("goes as", "goes as the square of"),
        )


def aspect(part: Part, ratios: Ratios) -> float:
    """`‖A‖_R/‖A‖₂`."""
    return math.sqrt(ratios.fan_in / ratios.fan_out)


def gradient_symbols(part: Part) -> str:
    """`gradient` in symbols: the share of a branch, over the allowed change."""
    below = _branch(part) + ["r_in"] * (part.role == "output")
    return f"√(r_in/r_out)/{_bracketed(below)}" if below else "√(r_in/r_out)"


def entry_factors(part: Part) -> list[str]:
    """The symbols that an entry of the gradient is inversely proportional to."""
    return [*_branch(part), "r_out", *["r_in"] * (part.role == "output")]


def _branch(part: Part) -> list[str]:
    """The share 1/r_L of a branch, over its allowed change: 1/√r_L in a branch of one layer, 1/r_L on the
    stream, which leaves 1."""
    return [] if part.block is None else ["√r_L" if part.branch_layers == 1 else "r_L"]


# Sizes ‖A‖_R of updates

SIGN = Scaling(
    lambda part, ratios: ratios.fan_in,
    "r_in",
    lambda part, ratios: (
        "each entry of a vector moves by about one"
        if part.role in ("bias", "gain")
        else "each entry of the update is about one, and the fan-in adds up"
    ),
)
"""Entries of about one. At low rank `‖A‖₂ ~ ‖A‖_F = √(n_in·n_out)`, so `‖A‖_R ~ n_in`."""

ORTHOGONAL = Scaling(aspect, "√(r_in/r_out)", "the update is an orthogonal matrix")
"""Singular values of one: `‖A‖_R = √(n_in/n_out)`."""

UNIT = Scaling(lambda part, ratios: 1.0, "1", "the update has ‖A‖_R = 1 at every shape")

# What eps is compared with

GRADIENT_ENTRY = Scaling(
    gradient_entry,
    lambda part, ratios: inverse(entry_factors(part)),
    "eps is added to what goes as an entry of the gradient",
)
GRADIENT_NORM = Scaling(
    gradient,
    lambda part, ratios: gradient_symbols(part),
    "eps is added to what goes as the norm of the gradient",
)


def fraction(value: float) -> str:
    """An integer, one over an integer, or four digits.

    >>> [fraction(value) for value in (4.0, 0.125, 2**0.5)]
    ['4', '1/8', '1.414']
    """
    if not value:
        return "0"
    for whole, written in ((value, "{}"), (1 / value, "1/{}")):
        if abs(whole) >= 1 and math.isclose(whole, round(whole), rel_tol=1e-12):
            return written.format(round(whole))
    return f"{value:.4g}"


def inverse(factors: Sequence[str]) -> str:
    """One over a product of symbols."""
    return f"1/{_bracketed(factors)}" if factors else "1"


def _bracketed(factors: Sequence[str]) -> str:
    return factors[0] if len(factors) == 1 else f"({'·'.join(factors)})"
