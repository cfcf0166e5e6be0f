"""One tensor under one rule: what the numbers of its row are made of.

Symbols, all in units of the base size:

    r_in, r_out, r_L   fan-in, fan-out and number of residual branches
    o                  what the network's own forward pass multiplies the layer by
    α                  multiplier of the layer beside o, absorbed into everything else
    c, u, w            sizes ‖·‖_R of the allowed change, of an update and of the weight
    f                  what eps is compared with
"""

from __future__ import annotations

from dataclasses import dataclass

from theodolite.anatomy.part import Part
from theodolite.optimizers import Base, Hyper, Policy, Ratios
from theodolite.optimizers.condition import change
from theodolite.optimizers.scaling import inverse
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


def alpha_symbol(case: Case) -> str:
    """The multiplier α."""
    below = ["r_in"] if case.part.role == "output" else []
    if case.part.ends_branch:
        below.append("√r_L" if case.part.branch_layers == 1 else "r_L")
    return inverse([*below, "o"] if case.ratios.own != 1 else below)
