"""The study of ghosts: one small cell of each part, and claims on records whose truth is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report
from theodolite_studies.ghosts import study as ghosts


def test_a_tiny_study_runs_from_cells_to_claims_and_figures(tmp_path: Path, monkeypatch: Any) -> None:
    fewer = {
        "TRAINED": 20,
        "TEMPERATURES": (0.1, 10.0),
        "FACTORS": (1.0, 1e4),
        "BEFORE": 15,
        "AFTER": 15,
        "MULTIPLES": ghosts.MULTIPLES[::4],
    }
    for name, value in fewer.items():
        monkeypatch.setattr(ghosts, name, value)
    file = Records(tmp_path / "ghosts.jsonl", {"study": "ghosts"})
    for cell in ghosts.cells(ghosts.STUDY.small)[::4]:  # one of each part
        file.append({**cell, **record} for record in ghosts.run(cell))
    said = report(ghosts.STUDY, tmp_path / "ghosts.jsonl")
    assert "no step with r < 1 raises the loss" in said
    assert "controller acted on" in said
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {"ghosts-collapse.svg", "ghosts-temperature.svg", "ghosts-spike.svg"}

    runs = {
        (one["optimizer"], one["method"], one["factor"]): one for one in file.all if one["part"] == "spike"
    }
    calm, spiked, safe = (
        runs["sgd", method, factor] for method, factor in (("nothing", 1.0), ("nothing", 1e4), ("safe", 1e4))
    )
    assert spiked["before"] == calm["before"]
    assert calm["end"] < calm["before"]
    assert spiked["end"] is None or spiked["end"] > 2 * spiked["before"]
    assert safe["end"] < safe["before"]
    assert safe["largest"] == pytest.approx(1, abs=1e-4)
    radii = [one["radius"] for one in file.all if one["part"] == "temperature"]
    assert radii[1] > 30 * radii[0]  # T is a hundred times larger


def test_where_a_level_is_crossed() -> None:
    class Found:
        lengths = torch.tensor([0.0, 1.0, 10.0, 100.0]).double().numpy()
        losses = torch.tensor([1.0, 0.5, 1.5, math.inf]).double().numpy()

    assert ghosts._crossing(Found(), 1.0) == pytest.approx(math.sqrt(10))  # type: ignore[arg-type]
    assert ghosts._crossing(Found(), 2.0) == pytest.approx(100)  # type: ignore[arg-type]
