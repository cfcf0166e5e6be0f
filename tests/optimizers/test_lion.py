"""Lion, by its formula."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.optimizers import Base, Hyper

from .reference import (
    Reference,
    State,
    averaged,
    moved,
    sign_rows,
    sign_rows_alone,
    with_eps,
)


def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    update = (0.9 * state.get("m", torch.zeros_like(g)) + 0.1 * g).sign()
    averaged(state, "m", g, 0.99)
    return moved(w, update, hyper)


REFERENCES = {
    "lion": Reference(
        step,
        first=lambda gradient, **_: gradient.sign(),
        rows=with_eps(sign_rows, 0),
        rows_alone=with_eps(sign_rows_alone, 0),
        unequal=lambda i, o, L: (1 / i, i, 1),
        base=Base(lr=0.01, weight_decay=0.5),
    )
}
