"""Updates whose entries are all about one: AdamW, Lion and Sophia.

Without momentum `A = sign(∇W)`. At low rank `‖A‖₂ ~ ‖A‖_F = √(n_in·n_out)`, so `‖A‖_R ~ n_in`.
"""

from __future__ import annotations

import dataclasses

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

    m/h has the units of the weight, and is of degree −1: h goes as the square of the gradient's entries g, so
    m/h as 1/g. The clip p follows it (`extent`), so that the share of entries that are clipped stays, and
    lr·p is what lr is for AdamW. A multiplier scales m/h and p as it does the weight, and eps as h.
    """
    entry = gradient_entry(part, ratios)
    met = meet(part, ratios, base, update=ratios.fan_in / entry, degree=-1, floor=entry**2, floor_degree=2)
    return dataclasses.replace(met, extent=1 / entry)
