"""Updates whose entries are all about one: AdamW, diffGrad, schedule-free AdamW, Lion and Sophia.

Without momentum `A = sign(∇W)`. At low rank `‖A‖₂ ~ ‖A‖_F = √(n_in·n_out)`, so `‖A‖_R ~ n_in`.
"""

from __future__ import annotations

import dataclasses

from theodolite.anatomy.part import Part
from theodolite.optimizers.condition import gradient_entry, meet
from theodolite.optimizers.hyper import Base, Hyper, Ratios


def adamw(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """`A = m/(√v + eps)`: eps follows the entries of the gradient, as √v does."""
    return meet(part, ratios, base, update=ratios.fan_in, floor=gradient_entry(part, ratios))


def diffgrad(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """AdamW's: `A = ξ·m/(√v + eps)` with `ξ = sigmoid(|∇W_before − ∇W|)`, which is between 1/2 and 1.

    Entries of the gradient fall as the width grows, so ξ goes to 1/2, and A is AdamW's at half the learning
    rate. That is what the rule is for: where entries are about one, ξ is up to twice as large, so a base size
    with such gradients does not transfer, nor is a multiplier absorbed exactly.
    """
    return adamw(part, ratios, base)


def schedule_free(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """AdamW's: `A = ∇W/(√v + eps)` moves z; the weights are averages of z, which are as large."""
    return adamw(part, ratios, base)


def lion(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """`A = sign(m)`, which has no eps."""
    return meet(part, ratios, base, update=ratios.fan_in)


def sophia(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """`A = clip(m/max(h, eps), ±p)` with h the Hessian's diagonal: entries of at most p.

    m/h has the units of the weight, and is of degree −1: h goes as the square of the gradient's entries g, so
    m/h as 1/g. The clip p follows it (`extent`), so that the share of entries that are clipped stays, and
    lr·p is what lr is for AdamW. A multiplier scales m/h and p as it does the weight, and eps as h.
    """
    entry = gradient_entry(part, ratios)
    met = meet(part, ratios, base, update=ratios.fan_in / entry, degree=-1, floor=entry**2, floor_degree=2)
    return dataclasses.replace(met, extent=1 / entry)
