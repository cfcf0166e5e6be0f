"""Updates whose entries are all about one: AdamW, Lion and Sophia.

Without momentum `A = sign(∇W)`. At low rank `‖A‖₂ ~ ‖A‖_F = √(n_in·n_out)`, so `‖A‖_R ~ n_in`.
"""

from __future__ import annotations

from theodolite.anatomy.part import Part
from theodolite.rules.condition import gradient_entry, meet
from theodolite.rules.hyper import Base, Hyper, Ratios


def adamw(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """`A = m/(√v + eps)`: eps follows the entries of the gradient, as √v does."""
    return meet(part, ratios, base, update=ratios.fan_in, floor=gradient_entry(part, ratios))


def lion(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """`A = sign(m)`, which has no eps."""
    return meet(part, ratios, base, update=ratios.fan_in)


def sophia(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """`A = clip(m/max(h, eps), ±p)` with h the Hessian's diagonal: entries of at most p.

    m/h has the units of the weight, not of the gradient: with a multiplier α it grows as `W' = αW` does, and
    the clip must (`extent`), while the learning rate stays. This is degree −1. eps follows h, a second
    derivative, as the square of the gradient's entries.
    """
    floor = gradient_entry(part, ratios) ** 2
    return meet(part, ratios, base, update=ratios.fan_in, degree=-1, floor=floor, floor_degree=2)
