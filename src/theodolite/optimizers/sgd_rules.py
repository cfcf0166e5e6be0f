"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

import math

from theodolite.anatomy.part import Part
from theodolite.optimizers.condition import gradient, meet
from theodolite.optimizers.hyper import Base, Hyper, Ratios


def sgd(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """`A = ∇W`, so `‖A‖_R = √(n_in/n_out)·‖∇W‖₂`: the size of the update is that of the gradient.

    It is of degree one: an absorbed multiplier α changes the learning rate by α².
    """
    update = math.sqrt(ratios.fan_in / ratios.fan_out) * gradient(part, ratios)
    return meet(part, ratios, base, update=update, degree=1)
