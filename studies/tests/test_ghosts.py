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
    for cell in ghosts.cells(small=True)[::4]:  # one of each part
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


def synthetic(*, onset: float, spread: float, survives: dict[str, float]) -> list[dict[str, Any]]:
    """Records in which the onset is at a given r, up to a spread, whatever the radius is."""
    records: list[dict[str, Any]] = []
    for seed in range(3):
        for place, network in enumerate(("mlp", "gpt")):
            base = {"network": network, "seed": seed}
            for count, direction in enumerate(("gradient", "random")):
                for stage in ("start", "trained"):
                    r = onset * (1 + 0.001 * seed) * spread ** (1 if (count + place) % 2 else -1)
                    where = {"part": "collapse", "stage": stage, "direction": direction, **base}
                    records.append({**where, **_reading(r, 10.0 ** (2 * count + place))})
            for power in (-2, 0, 2):
                where = {"part": "temperature", "temperature": 10.0**power, **base}
                records.append({**where, **_reading(onset * spread**power * (1 + 0.001 * seed), 10.0**power)})
            for method, ratio in survives.items():
                for factor in (1.0, 1e4):
                    records.append(
                        {
                            **{
                                "part": "spike",
                                "optimizer": "sgd",
                                "method": method,
                                "factor": factor,
                                **base,
                            },
                            "before": 1.0,
                            "end": (ratio if factor > 1 else 0.5) * (1 + 0.001 * seed),
                            "acted": 0.0,
                            "largest": 1.0 + 1e-9 * seed,
                        }
                    )
    return records


def _reading(r: float, radius: float) -> dict[str, float]:
    return {
        "radius": radius,
        "loss": 1.0,
        "rises": r / 2,
        "above": r,
        "collapse": 2 * r,
        "quadratic": 3.0,
        "ghost": 1.5,
    }


def verdicts(records: list[dict[str, Any]]) -> list[str]:
    return [claim.verdict for claim in ghosts.claims(records)]


SURVIVES = {"nothing": 9.0, "clip": 8.0, "safe": 0.6}


def test_claims_hold_in_the_papers_world() -> None:
    found = verdicts(synthetic(onset=1.4, spread=1.05, survives=SURVIVES))
    assert found == ["holds"] * 10


def test_and_each_fails_where_its_own_claim_is_not_so() -> None:
    early = verdicts(synthetic(onset=0.4, spread=1.05, survives=SURVIVES))
    assert early[:3] == ["fails", "fails", "holds"]
    late = verdicts(synthetic(onset=8.0, spread=1.05, survives=SURVIVES))
    assert late[:3] == ["holds", "holds", "fails"]
    wide = verdicts(synthetic(onset=8.0, spread=30.0, survives=SURVIVES))
    assert wide[3:5] == ["fails", "fails"]
    controller = verdicts(
        synthetic(onset=1.4, spread=1.05, survives={"nothing": 0.9, "clip": 0.9, "safe": 1.2})
    )
    assert controller[5:8] == ["fails", "fails", "fails"]
    longer = synthetic(onset=1.4, spread=1.05, survives=SURVIVES)
    harmful = [
        {**one, "largest": 1.01, "end": 0.7 * (1 + 0.001 * one["seed"])}
        if one.get("method") == "safe"
        else one
        for one in longer
    ]
    assert verdicts(harmful)[8:] == ["fails", "fails"]


def test_notes_give_the_spread_in_each_unit() -> None:
    said = ghosts.notes(synthetic(onset=1.4, spread=1.0, survives=SURVIVES))
    assert "onset over temperatures, in units of: the length itself 1.63, ρ_a 0.00" in said
    assert "Onset along random: before r = 1 in 0 of 12 steps, least r 1.4, median 1.4" in said
    assert "Survived with safe, of 6: ×1 6, ×10000 6" in said
    assert "Survived with clip, of 6: ×1 6, ×10000 0" in said
    assert "onset over temperatures ≥ 1, in units of: the length itself 1.00, ρ_a 0.00" in said
