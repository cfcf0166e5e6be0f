"""The study of drift: claims on made-up records, and tiny runs of each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from theodolite_studies.drift import study
from theodolite_studies.drift.claims import claims
from theodolite_studies.drift.study import STUDY
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report


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
    assert [claim.verdict for claim in claims(_records(follows=True))] == ["holds"] * 11
    found = claims(_records(follows=False))
    assert [claim.verdict for claim in found] == ["fails"] * 11


def test_a_tiny_study_from_end_to_end(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = {
        "quadratic": list(study.quadratics(size=2, steps=1, rtol=1e-4)),
        "network": list(study.course(steps=6, every=2, finer=2)),
        "rates": list(study.rates(steps=4)),
    }
    path = tmp_path / "drift.jsonl"
    records = Records(path, {"study": "drift"})
    records.append({"part": part, "seed": 0, **row} for part, rows in parts.items() for row in rows)
    said = report(STUDY, path)
    assert "on a quadratic the principal flow is gradient descent" in said
    assert sorted(file.name for file in tmp_path.glob("*.svg")) == ["drift-edge.svg", "drift-rates.svg"]
    assert all(row["principal"] < 1e-3 < row["flow"] for row in parts["quadratic"])
    descent, flow, *moments = parts["network"]
    # Where both are at the start, the finer one is as near to the edge of the coarser one.
    assert descent["edge"][0] == pytest.approx(flow["edge"][0], rel=1e-3)
    assert [moment["step"] for moment in moments] == [2, 3]
    kept = {row["rate"]: row for row in parts["rates"]}
    assert kept[2**-6]["lrs"] == [0.0156] * 4
    assert not kept[2**-6]["diverged"]
    assert kept["DAL 1"]["lrs"][0] != 1.0  # it was set
