"""Sophia, by its formula; and what it says where gradients cannot be differentiated."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.errors import UseError
from theodolite.optimizers import Base, Hyper, borrowed

from .reference import Reference, State, averaged, moved, sign_rows, sign_rows_alone, with_eps
from .small import model, plan_for


def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    m = averaged(state, "m", g, 0.96)
    h = averaged(state, "h", h, 0.99) if t % 2 else state["h"]
    limit = 0.5 * hyper.extent
    return moved(w, (m / h.clamp_min(hyper.eps)).clamp(-limit, limit), hyper)


def first(gradient: Tensor, eps: float, clip: float, curvature: Tensor, **_: Any) -> Tensor:
    return (gradient / curvature.clamp_min(eps)).clamp(-clip, clip)


REFERENCES = {
    "sophia": Reference(
        step,
        first,
        rows=with_eps(sign_rows, 2),
        rows_alone=with_eps(sign_rows_alone, 2),
        unequal=lambda i, o, L: (1 / i, i, 1 / (o * L) ** 2),
        base=Base(lr=0.05, weight_decay=0.5, eps=0.01),
        eps=lambda entry, norm: entry**2,
        # Of a sum over entries z ⊙ Hz is the diagonal itself for signs z.
        options={"update_period": 2, "hessian_distribution": "rademacher", "p": 0.5},
    )
}


def test_it_says_that_gradients_need_a_graph() -> None:
    pytest.importorskip("pytorch_optimizer")
    network = model()
    optimizer = plan_for("sophia").optimizer(network)
    for param in network.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(UseError, match=r"no graph.*create_graph=True"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_it_says_which_attention_can_be_differentiated() -> None:
    pytest.importorskip("pytorch_optimizer")
    inputs = torch.randn(1, 2, 4, 8)
    refused = pytest.raises(UseError, match=r"flash.*has no second derivative.*SDPBackend\.MATH")
    for backend, ends in ((SDPBackend.FLASH_ATTENTION, refused), (SDPBackend.MATH, nullcontext())):
        query = nn.Parameter(torch.randn(1, 2, 4, 8))
        optimizer = borrowed.SophiaH([query], lr=0.1)
        with sdpa_kernel(backend):
            attended = nn.functional.scaled_dot_product_attention(query, inputs, inputs)
            attended.square().sum().backward(create_graph=True)
        before = query.detach().clone()
        with ends:
            optimizer.step()
        assert torch.equal(query, before) == (ends is refused)
        query.grad = None  # a graph and its parameters hold each other
