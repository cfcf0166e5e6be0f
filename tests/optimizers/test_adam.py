"""AdamW, by its formula."""

from __future__ import annotations

from torch import Tensor

from theodolite.optimizers import Base, Hyper

from .reference import (
    Reference,
    State,
    adam_update,
    moved,
    sign_first,
    sign_rows,
    sign_rows_alone,
    sign_unequal,
)


def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    return moved(w, adam_update(g, hyper, state, t), hyper)


REFERENCES = {
    "adamw": Reference(
        step,
        first=sign_first,
        rows=sign_rows,
        rows_alone=sign_rows_alone,
        unequal=sign_unequal,
        base=Base(lr=0.02, weight_decay=0.5, eps=0.05),
        eps=lambda entry, norm: entry,
    )
}
