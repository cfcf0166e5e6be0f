"""The reasons behind a row, in words and numbers."""

from __future__ import annotations

from theodolite.anatomy.part import Part
from theodolite.planning.law import Law
from theodolite.planning.plan import Plan
from theodolite.rules.hyper import Base, Hyper, Ratios


def reasons(
    part: Part, partner: Part, ratios: Ratios, base: Base, law: Law, explicit: Hyper, hyper: Hyper
) -> dict[str, str]:
    """What the tensor is, and for each column the formula with its numbers."""
    return {}


def explained(plan: Plan, name: str) -> str:
    """One row and its reasons."""
    row = plan[name]
    return "\n".join(f"{column}: {reason}" for column, reason in row.reasons.items())
