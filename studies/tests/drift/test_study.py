"""The study of drift: claims on made-up records, and tiny runs of each part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from theodolite_studies.drift import study
from theodolite_studies.drift.study import STUDY
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report


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
