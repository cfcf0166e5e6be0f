"""Claims of the study of ghosts on records whose truth is known."""

from __future__ import annotations

from typing import Any

from theodolite_studies.ghosts.report import notes
from theodolite_studies.ghosts.study import STUDY


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
    return [claim.verdict for claim in STUDY.decide(records)]


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
    said = notes(synthetic(onset=1.4, spread=1.0, survives=SURVIVES))
    assert "onset over temperatures, in units of: the length itself 1.63, ρ_a 0.00" in said
    assert "Onset along random: before r = 1 in 0 of 12 steps, least r 1.4, median 1.4" in said
    assert "Survived with safe, of 6: ×1 6, ×10000 6" in said
    assert "Survived with clip, of 6: ×1 6, ×10000 0" in said
    assert "onset over temperatures ≥ 1, in units of: the length itself 1.00, ρ_a 0.00" in said
