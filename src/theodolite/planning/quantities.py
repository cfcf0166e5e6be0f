"""What a rule's formulas are made of: growths in symbols, in numbers and in words.

All of them in units of the base size,

    r_in, r_out, r_L   fan-in, fan-out and number of residual branches
    o                  what the network's own forward pass multiplies the layer by
    α                  multiplier of the layer beside o, absorbed into everything else
    c, u, w            sizes ‖·‖_R of the change allowed, of an update and of the weight
    f                  what eps is compared with
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from theodolite.anatomy.part import Part
from theodolite.optimizers.condition import change, gradient, gradient_entry
from theodolite.optimizers.decay_policies import Policy
from theodolite.optimizers.hyper import Base, Hyper, Ratios
from theodolite.planning.law import Law


@dataclass(frozen=True)
class Case:
    """One tensor under one rule: all that its reasons are made of."""

    part: Part
    partner: Part
    ratios: Ratios
    num_branches: tuple[int, int]
    """At the target and at the base size."""
    rule: str
    policy: Policy
    base: Base
    law: Law
    """How it starts at base size."""
    explicit: Hyper
    """With the multiplier beside the weight."""
    hyper: Hyper
    """With the multiplier absorbed."""
    readout: float = 1.0
    """A multiplier that stays beside the weight, on the readout of a tied embedding."""


def update_size(case: Case) -> float:
    """By how much `‖A‖_R` grew, as the rule's learning rate implies."""
    return change(case.part, case.ratios) * case.base.lr / case.explicit.lr


@dataclass(frozen=True)
class Quantity:
    """A growth in symbols, in numbers and in words."""

    symbol: Callable[[Case], str]
    value: Callable[[Case], float]
    why: Callable[[Case], str]


def _gradient_symbol(case: Case) -> str:
    """g of `gradient`: the share of a branch, over the change allowed."""
    below = [] if case.part.block is None else ["r_L"]
    above = "√(r_in/r_out)"
    if case.part.role == "output":
        below.append("r_in")
    # In a branch of one layer 1/r_L and the 1/√r_L of c leave 1/√r_L.
    if case.part.branch_layers == 1:
        below = ["√r_L" if piece == "r_L" else piece for piece in below]
    return f"{above}/{_bracketed(below)}" if below else above


def _entry_symbol(case: Case) -> str:
    return _inverse(_entry_factors(case))


def _entry_factors(case: Case) -> list[str]:
    """What an entry of the gradient is inverse to."""
    # On the stream 1/r_L and the 1/r_L of c leave 1.
    below = [] if case.part.block is None else ["√r_L" if case.part.branch_layers == 1 else "r_L"]
    return below + (["r_out", "r_in"] if case.part.role == "output" else ["r_out"])


def _aspect(case: Case) -> float:
    return math.sqrt(case.ratios.fan_in / case.ratios.fan_out)


def _own_scale(case: Case) -> float:
    return update_size(case) / _aspect(case)


_SIGN = Quantity(
    lambda case: "r_in",
    lambda case: case.ratios.fan_in,
    lambda case: (
        "each entry of a vector moves by about one"
        if case.part.role in ("bias", "gain")
        else "each entry of the update is about one, and the fan-in adds up"
    ),
)
_ORTHOGONAL = Quantity(
    lambda case: "√(r_in/r_out)", _aspect, lambda case: "the update is an orthogonal matrix"
)
_UNIT = Quantity(lambda case: "1", lambda case: 1.0, lambda case: "the update has ‖A‖_R = 1 at every shape")


def _scaled(scale: str) -> Quantity:
    return Quantity(
        lambda case: f"{fraction(_own_scale(case))}·√(r_in/r_out)",
        update_size,
        lambda case: (
            f"the update is an orthogonal matrix times {scale}, which is "
            f"{fraction(_own_scale(case))} times what it was"
        ),
    )


UPDATES = {
    "sgd": Quantity(
        lambda case: f"√(r_in/r_out)·{_gradient_symbol(case)}",
        lambda case: _aspect(case) * gradient(case.part, case.ratios),
        lambda case: f"the update is the gradient, whose norm goes as {_gradient_symbol(case)}",
    ),
    "adamw": _SIGN,
    "diffgrad": _SIGN,
    "schedule-free": _SIGN,
    "lion": _SIGN,
    "sophia": Quantity(
        lambda case: "·".join(["r_in", *_entry_factors(case)]),
        lambda case: case.ratios.fan_in / gradient_entry(case.part, case.ratios),
        lambda case: "the update is clipped at p, which grows as m/h does, and the fan-in adds up",
    ),
    "muon": _ORTHOGONAL,
    "muon-original": _scaled("√max(1, fan-out/fan-in)"),
    "muon-kimi": _scaled("0.2·√max(fan-in, fan-out)"),
    "muon-spectral": _UNIT,
    "shampoo": _ORTHOGONAL,
    "soap": _ORTHOGONAL,
    "sso": _UNIT,
}
"""The size `‖A‖_R` of an update, by rule."""

_ENTRY = Quantity(
    _entry_symbol,
    lambda case: gradient_entry(case.part, case.ratios),
    lambda case: "eps is added to what goes as an entry of the gradient",
)
_NORM = Quantity(
    _gradient_symbol,
    lambda case: gradient(case.part, case.ratios),
    lambda case: "eps is added to what goes as the norm of the gradient",
)


def _squared(one: Quantity) -> Quantity:
    return Quantity(
        lambda case: f"({one.symbol(case)})²",
        lambda case: one.value(case) ** 2,
        lambda case: one.why(case).replace("goes as", "goes as the square of"),
    )


COMPARED = {
    **dict.fromkeys(("adamw", "diffgrad", "schedule-free"), _ENTRY),
    "sophia": _squared(_ENTRY),
    "shampoo": _squared(_NORM),
    **dict.fromkeys(("muon", "muon-original", "muon-kimi", "muon-spectral", "soap", "sso"), _NORM),
}
"""What eps is compared with, by rule."""

EXTENTS = {
    "sophia": Quantity(
        lambda case: "·".join(_entry_factors(case)),
        lambda case: 1 / gradient_entry(case.part, case.ratios),
        lambda case: "m/h goes as one over an entry of the gradient",
    )
}
"""What an option in units of the weight follows beside the multiplier, by rule."""


def alpha_symbol(case: Case) -> str:
    """The multiplier α."""
    below = ["r_in"] if case.part.role == "output" else []
    if case.part.ends_branch:
        below.append("√r_L" if case.part.branch_layers == 1 else "r_L")
    return _inverse([*below, "o"] if case.ratios.own != 1 else below)


def fraction(value: float) -> str:
    """A whole number, one over a whole number, or digits.

    >>> [fraction(value) for value in (4.0, 0.125, 2**0.5)]
    ['4', '1/8', '1.414']
    """
    if not value:
        return "0"
    for whole, written in ((value, "{}"), (1 / value, "1/{}")):
        if abs(whole) >= 1 and math.isclose(whole, round(whole), rel_tol=1e-12):
            return written.format(round(whole))
    return digits(value)


def digits(value: float) -> str:
    """Four of them."""
    return f"{value:.4g}"


def _inverse(factors: Sequence[str]) -> str:
    return f"1/{_bracketed(factors)}" if factors else "1"


def _bracketed(factors: Sequence[str]) -> str:
    return factors[0] if len(factors) == 1 else f"({'·'.join(factors)})"
