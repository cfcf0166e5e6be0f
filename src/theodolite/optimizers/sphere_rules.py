"""The spectral sphere optimizer, SSO."""

from __future__ import annotations

from theodolite.anatomy.part import Part
from theodolite.optimizers.condition import gradient, meet
from theodolite.optimizers.hyper import Base, Hyper, Ratios


def sso(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """`A = √(n_out/n_in)·Φ` with `‖Φ‖₂ = 1`: `‖A‖_R = 1` by construction.

    The weight is put back on the sphere `‖W‖₂ = R·√(n_out/n_in)` after each step, so `‖W‖_R` stays: for
    hidden weights, whose norm the condition wants constant. A multiplier shrinks the sphere with the weight
    (`extent`).
    """
    return meet(part, ratios, base, update=1.0, floor=gradient(part, ratios))
