"""Claims of the study of drift on records whose verdict is known."""

from __future__ import annotations

from typing import Any

from theodolite_studies.drift.study import STUDY


def _records(*, follows: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for seed in range(3):
        slight = 0.001 * seed
        for top in (0.5, 1.9):
            row = {"top": top, "flow": 0.4 if follows else 0.01, "modified": 0.1}
            found.append(
                {"part": "quadratic", "seed": seed, **row, "principal": 1e-9 if follows else 0.1 + slight}
            )
        edge = [0.2, 0.6, 1.0, 1.02, 1.0] if follows else [0.9, 0.5, 0.6, 0.6, 0.6]
        found.append({"part": "network", "seed": seed, "way": "descent", "edge": edge, "loss": [1.0] * 5})
        flow = [0.2, 1.0, 2.0 + slight] if follows else [0.2, 0.9 + slight, 1.0]
        found.append({"part": "network", "seed": seed, "way": "flow", "edge": flow, "loss": [1.0] * 3})
        for step in (1, 2, 3):
            moment = {"edge": 1.0, "relative": 0.5, "explained": 0.9, "by modified": 0.2, "growth": -1.05}
            if not follows:
                moment |= {"relative": 0.01, "explained": 0.1, "by modified": 0.8, "growth": 0.14}
            found.append({"part": "network", "seed": seed, "way": "moment", "step": step, **moment})
        found.append({"part": "rates", "seed": seed, "rate": 0.1, "diverged": False, "loss": 0.1, "lrs": []})
        found.append({"part": "rates", "seed": seed, "rate": 1.0, "diverged": True, "loss": None, "lrs": []})
        found.append(
            {
                "part": "rates",
                "seed": seed,
                "rate": "DAL 1",
                "diverged": not follows,
                "loss": 0.05 if follows else None,
                "lrs": [],
            }
        )
    return found


def test_claims_say_what_records_say() -> None:
    assert [claim.verdict for claim in STUDY.decide(_records(follows=True))] == ["holds"] * 11
    found = STUDY.decide(_records(follows=False))
    assert [claim.verdict for claim in found] == ["fails"] * 11
