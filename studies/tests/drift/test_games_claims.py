"""Claims on games, on records whose verdict is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from theodolite_studies.drift import dirac, games_report, ring
from theodolite_studies.drift.study import STUDY, cells
from theodolite_studies.framework.claims import decide
from theodolite_studies.framework.records import Records, key_of
from theodolite_studies.framework.study import Setting, report

ENDS = {
    "simultaneous": (2.5, 1.0),
    "alternating": (0.98, 0.8),
    "interaction cancelled": (1.01, 1.3),
    "all drift cancelled": (1.0, 1.0),
    "consensus, γ = h/2": (0.97, 0.1),
    "consensus, γ = h": (0.1, 0.9),
}
"""Radii after long runs, if claims hold and if not."""


def _dirac(seed: int, *, holds: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    slight = 0.001 * seed
    for game in dirac.WAYS:
        for sizes, time, order in (
            (dirac.SIZES, dirac.TIME, 1.4),
            (dirac.FINE, dirac.SHORT, 2 if holds else 1.5),
        ):
            for h in sizes:
                radius = (
                    (1.2 if game == "simultaneous" else 0.97) if holds else (1.01, 0.9)[game == "alternating"]
                )
                left = h**order if holds or time == dirac.SHORT else 0.3
                row = {
                    "radius": radius + slight,
                    "flow radius": 1.0,
                    "distance": 1.0 if time == dirac.SHORT else 100 * left,
                }
                if not holds and time == dirac.TIME:
                    row["distance"] = 1.0
                found.append({"game": game, "h": h, "time": time, **row, "unexplained": left * (1 + slight)})
    for game, radii in ENDS.items():
        found.append({"game": game, "h": 0.2, "steps": dirac.LONG, "radius": radii[not holds] + slight})
    return [{"part": "dirac", "seed": seed, **row} for row in found]


def _rounds(seed: int, *, holds: bool) -> list[dict[str, Any]]:
    order = 3 if holds else 2.5
    return [
        {
            "part": "rounds",
            "seed": seed,
            "moment": moment,
            "game": way,
            "h": h,
            "length": h,
            "distance": h**2,
            "unexplained": (1 if holds else 10) * h**order * (1 + 0.01 * seed),
            "self only": h**2 / 2,
            "interaction only": h**2 / 3,
            "exact": True,
        }
        for way in ring.WAYS
        for moment in ring.MOMENTS
        for h in ring.SIZES
    ]


def _ring(*, holds: bool) -> list[dict[str, Any]]:
    """Arms are stable up to a rate. Distances are least at 0.2, on the tuning seeds and on the others."""
    edges = {"simultaneous": 0.4, "alternating": 0.6, "cancelled": 1.2}
    levels = {"simultaneous": 0.2, "alternating": 0.15, "cancelled": 0.1}
    if not holds:
        edges |= {"alternating": 0.2, "cancelled": 0.4}
        levels |= {"cancelled": 0.4}
    found = []
    for arm in ring.ARMS:
        for lr in ring.RATES:
            own: list[list[float | None]] = []
            for seed in range(ring.SEEDS):
                value = levels[arm] * (1 + abs(math.log2(lr / 0.2))) ** 0.1 + 0.001 * seed
                own.append([9.0, 9.0, value if lr <= edges[arm] else None])
            found.append({"part": "ring", "arm": arm, "lr": lr, "distances": own, "floor": 0.04})
    return found


def _records(*, holds: bool) -> list[dict[str, Any]]:
    found = [row for seed in range(5) for row in _dirac(seed, holds=holds) + _rounds(seed, holds=holds)]
    return found + _ring(holds=holds)


@pytest.mark.parametrize(("holds", "verdict"), [(True, "holds"), (False, "fails")])
def test_claims_say_what_records_say(holds: bool, verdict: str) -> None:
    found = decide(games_report.CLAIMS, _records(holds=holds))
    assert [(one.statement, one.verdict) for one in found] == [
        (claim.statement, verdict) for claim in games_report.CLAIMS
    ]


def test_a_rate_is_chosen_on_other_seeds_than_it_is_judged_on() -> None:
    def row(lr: float, tuning: float, others: float) -> dict[str, Any]:
        own = [[tuning]] * ring.TUNING + [[others]] * (ring.SEEDS - ring.TUNING)
        return {"part": "ring", "arm": "cancelled", "lr": lr, "distances": own, "floor": 0.04}

    records = [row(0.1, tuning=0.3, others=0.1), row(0.2, tuning=0.2, others=0.4), row(0.4, 0.9, 0.6)]
    lr, values = games_report.tuned(records, "cancelled")
    assert lr == 0.2
    assert values.tolist() == [0.4] * (ring.SEEDS - ring.TUNING)
    assert games_report.largest(records, "cancelled").tolist() == [0.2] * (ring.SEEDS - ring.TUNING)
    assert games_report.largest([row(0.4, 0.1, 0.6)], "cancelled").tolist() == [0.2] * 8


def test_the_end_of_a_run_is_its_last_third_and_infinite_once_it_has_diverged() -> None:
    row = {"distances": [[5, 4, 3, 2, 1.0, 2.0], [1, 1, 1, 1, 1, None]]}
    assert games_report.late(row).tolist() == [1.5, math.inf]


def test_notes_and_figures_are_of_games(tmp_path: Path) -> None:
    path = tmp_path / "drift.jsonl"
    Records(path, {"study": "drift"}).append(_records(holds=True))
    said = report(STUDY, path)
    assert sorted(file.name for file in tmp_path.glob("*.svg")) == ["drift-dirac.svg", "drift-ring.svg"]
    ends = next(line for line in said.splitlines() if line.startswith("consensus, γ = h "))
    assert ends.split()[-3:] == ["0.102", "0.100", "0.104"]
    arms = next(line for line in said.splitlines() if line.startswith("cancelled  "))
    assert float(arms.split()[1]) == 0.2
    assert float(arms.split()[-1]) == pytest.approx(0.8 * 2**0.5, rel=1e-2)
    differences = -0.1 * np.ones(8)
    assert f"cancelled less simultaneous: {differences.mean():+.4f}" in said


def test_cells_of_games_can_be_told_from_records_of_all_parts() -> None:
    listed = cells(Setting())
    keys = sorted({key for cell in listed for key in cell})
    own = {key_of(cell, keys) for cell in listed}
    assert len(own) == len(listed)
    rows = [
        {"part": "network", "seed": 0, "way": "flow", "edge": [1.0], "loss": [1.0]},
        *_records(holds=True),
    ]
    assert {key_of(row, keys) for row in rows} <= own
