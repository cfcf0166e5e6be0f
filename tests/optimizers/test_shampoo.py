"""Shampoo, by its formula; and what is fixed in pytorch_optimizer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS, Base, Hyper, borrowed

from .reference import (
    Reference,
    State,
    compact_svd,
    moved,
    orthogonal_rows,
    orthogonal_rows_alone,
    orthogonal_unequal,
    with_eps,
)
from .small import noise, stepped


def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    roots = []
    for name, gram in (("left", g @ g.T), ("right", g.T @ g)):
        state[name] = state.get(name, hyper.eps * torch.eye(len(gram), dtype=g.dtype)) + gram
        values, vectors = torch.linalg.eigh(state[name])
        roots.append(vectors * values**-0.25 @ vectors.T)
    return moved(w, roots[0] @ g @ roots[1], hyper)


def first(gradient: Tensor, eps: float, **_: Any) -> Tensor:
    u, s, v = compact_svd(gradient)
    return u * (s / (s**2 + eps).sqrt()).unsqueeze(-2) @ v


REFERENCES = {
    "shampoo": Reference(
        step,
        first,
        rows=with_eps(orthogonal_rows, 2),
        rows_alone=with_eps(orthogonal_rows_alone, 2),
        unequal=lambda i, o, L: (*orthogonal_unequal(i, o, L)[:2], i / o / L**2),
        base=Base(lr=0.03, weight_decay=0.5, eps=0.02),
        eps=lambda entry, norm: norm**2,
    )
}


def test_it_moves_before_its_roots_are_due_again() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    grad = noise(4, 3)
    ours, theirs = (
        stepped(one, grad, 2, preconditioning_compute_steps=3) for one in (borrowed.Shampoo, source.Shampoo)
    )
    assert ours.norm() > 1
    assert theirs.norm() == 0
    param = nn.Parameter(grad.clone())
    optimizer = borrowed.Shampoo([param])
    param.grad = grad
    optimizer.step()
    assert "momentum_buffer" not in optimizer.state[param]


def test_sums_in_bfloat16_stop_growing() -> None:
    """Why it refuses bfloat16: after 1000 steps of ones its statistics are at 256."""
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        total += 1
    assert total == 256


def test_momentum_is_refused_with_the_reason() -> None:
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(UseError, match=r"cannot be used with shampoo: .*raw gradients with preconditioned"):
        OPTIMIZERS["shampoo"].maker({"momentum": 0.9})
