"""diffGrad, by its formula; and what is fixed in pytorch_optimizer's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from theodolite.optimizers import Base, Hyper, borrowed

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
from .small import stepped


def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    before = state.get("g", torch.zeros_like(g))
    state["g"] = g
    xi = 1 / (1 + torch.exp(-(before - g).abs()))
    return moved(w, xi * adam_update(g, hyper, state, t), hyper)


def small_gradients(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    """Where the sigmoid is one half, which the rule is for."""
    halved = dataclasses.replace(hyper, lr=hyper.lr / 2)
    return moved(w, adam_update(g, hyper, state, t), halved)


REFERENCES = {
    "diffgrad": Reference(
        step,
        first=lambda gradient, **given: 0.5 * sign_first(gradient, **given),
        rows=sign_rows,
        rows_alone=sign_rows_alone,
        unequal=sign_unequal,
        base=Base(lr=0.04, weight_decay=0.5, eps=0.05),
        eps=lambda entry, norm: entry,
        absorbable=small_gradients,
    )
}


def test_eps_is_added_after_the_bias_correction() -> None:
    """With constant gradients, m̂ = g and v̂ = g²: a step is ξ·g/(|g| + eps) long."""
    source = pytest.importorskip("pytorch_optimizer")
    grad = torch.full((3,), 1e-4, dtype=torch.float64)
    expected = -torch.sigmoid(grad) / 2
    torch.testing.assert_close(stepped(borrowed.DiffGrad, grad, eps=1e-4), expected)
    assert (stepped(source.DiffGrad, grad, eps=1e-4) / expected).max() < 0.1
