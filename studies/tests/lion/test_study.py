"""The study of Lion: one small cell of each kind, and claims on records whose verdict is known."""

from __future__ import annotations

import pytest
import torch

from theodolite_studies.lion.study import follow, run

pytest.importorskip("pytorch_optimizer")


def test_a_constant_pull_is_followed_in_closed_form() -> None:
    """Along a constant gradient of signs s, x comes nearer to −s/λ by 1 − ελ a step."""
    slope = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weights = torch.nn.Parameter(torch.tensor([3.0, -4.0, 5.0], dtype=torch.float64))
    start, lr, decay = weights.detach().clone(), 0.1, 0.5
    followed = follow(
        weights,
        lambda: (slope * weights).sum(),
        lr=lr,
        decay=decay,
        steps=20,
        smoothness=1.0,
        betas=(0.9, 0.99),
    )
    end = -slope.sign() / decay
    expected = end + (1 - lr * decay) ** 20 * (start - end)
    torch.testing.assert_close(weights.detach(), expected)
    assert followed.heights[0] == followed.losses[0] == pytest.approx((slope * start).sum().item())
    # H after a step: f + c(‖m‖₁ + λ⟨m, x⟩) with m = 0.01·slope.
    x = end + (1 - lr * decay) * (start - end)
    implicit = lr / (1 - lr * decay)
    share = implicit * 0.9 / (implicit * decay * 0.1 + 0.01)
    expected_height = (slope * x).sum() + share * 0.01 * (slope.abs().sum() + decay * (slope * x).sum())
    assert followed.heights[1] == pytest.approx(expected_height.item())


def test_cells_from_end_to_end() -> None:
    (fall,) = run({"part": "fall", "pull": "out", "size": 0.1, "seed": 0})
    assert fall["slowest"] == pytest.approx(1, abs=1e-9)
    (box,) = run({"part": "box", "pull": "", "size": 0.1, "seed": 0})
    assert box["allowed"] < 0
    assert 0 < box["bound"] < 40
    assert box["distance"] < 0.3
