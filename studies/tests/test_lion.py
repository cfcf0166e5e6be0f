"""The study of Lion: one small cell of each kind, and claims on records whose verdict is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from theodolite.core.files import write_whole
from theodolite_studies.framework.study import report
from theodolite_studies.lion.study import STUDY, follow, run

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


def _records(**changes: Any) -> list[dict[str, Any]]:
    found = []
    for seed in range(3):
        kept = {"steps": [0, 9], "largest then": [10.0, 1.0], "height then": [1.0, 0.1]}
        for pull in ("in", "out"):
            own = {
                "part": "fall",
                "pull": pull,
                "size": 0.01,
                "seed": seed,
                "slowest": 1.0,
                "farthest": 1e-12,
            }
            found.append({**own, "beyond": -0.1, "entered": 7, **kept})
        for size in (0.1, 0.01):
            own = {"part": "box", "pull": "", "size": size, "seed": seed, "beyond": 0.0, "allowed": -0.5}
            found.append({**own, "rising": 0.001, "rise": 0.001, "distance": size + seed * 1e-4, **kept})
        own = {"part": "network", "pull": "", "size": 4.0, "seed": seed, "largest": 1.0, "rise": 0.01}
        found.append({**own, **kept})
    return [{**one, **{key: value for key, value in changes.items() if key in one}} for one in found]


def test_claims_hold_where_the_records_say_so() -> None:
    assert [claim.verdict for claim in STUDY.claims(_records())] == ["holds"] * 10


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"slowest": 1.1}, 0),
        ({"farthest": 0.1}, 1),
        ({"beyond": 1e-3}, 2),
        ({"allowed": 0.1}, 3),
        ({"rising": 0.2}, 4),
        ({"distance": 0.1}, 6),
        ({"largest": 1.01}, 8),
    ],
)
def test_and_fail_where_they_do_not(changes: dict[str, float], place: int) -> None:
    assert STUDY.claims(_records(**changes))[place].verdict == "fails"


def test_the_report_draws_what_there_is(tmp_path: Any) -> None:
    import json

    lines = [{"study": "lion"}, *_records()]
    write_whole(tmp_path / "lion.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    said = report(STUDY, tmp_path / "lion.jsonl")
    assert "10 of 10 claims hold" in said
    for name in ("fall", "height", "network"):
        assert (tmp_path / f"lion-{name}.svg").read_text().startswith("<svg")
