"""Stochastic gradient descent, by its formula."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from theodolite.optimizers import Base, Hyper

from .reference import Factors, Reference, State


def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    """With momentum and coupled decay."""
    state["m"] = 0.9 * state.get("m", torch.zeros_like(g)) + g + hyper.weight_decay * w
    return w - hyper.lr * state["m"]


def rows(n: float, L: float) -> dict[str, Factors]:
    return {
        "input": (n, 1 / n, 1),
        "hidden": (L, 1 / L, 1),
        "output": (n, 1 / n, 1),
        "vector in block": (n * L, 1 / (n * L), 1),
        "input in block": (n * L, 1 / (n * L), 1),
        "output in block": (n * L, 1 / (n * L), 1),
        "fixed in block": (L, 1 / L, 1),
        "fixed": (1, 1, 1),
    }


def rows_alone(n: float, L: float) -> dict[str, Factors]:
    return {
        "hidden": (1, 1 / sqrt(L), 1),
        "vector in block": (n, 1 / (n * sqrt(L)), 1),
        "input in block": (n, 1 / (n * sqrt(L)), 1),
    }


REFERENCES = {
    "sgd": Reference(
        step,
        first=lambda gradient, **_: gradient,
        rows=rows,
        rows_alone=rows_alone,
        unequal=lambda i, o, L: (L * o / i, i / (o * L), 1),
        base=Base(lr=0.01, weight_decay=0.1),
        options={"momentum": 0.9},
    )
}
