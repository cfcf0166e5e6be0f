"""Claims about stragglers on records whose verdict is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report
from theodolite_studies.stragglers.report import GC, SLOPES, M, notes, ratios
from theodolite_studies.stragglers.study import STUDY, StragglerSetting, cells, run

from .made_up import records

NUM_CLAIMS = 15


def test_claims_hold_where_the_records_say_so() -> None:
    found = STUDY.decide(records())
    assert [claim.verdict for claim in found] == ["holds"] * NUM_CLAIMS


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"wrong": 1}, {0}),
        ({"lost": 2}, {1, 2}),
        ({"m": 0.45, "gc": 0.5}, {3, 5, 8}),  # 0.9 of GC, which is better than waiting; GC is never better
        ({"m_model": 1.1}, {4, 5, 8}),
        ({"gc": 0.9}, {5, 8, 9}),
        ({"gc_model": 0.99}, {4, 5, 6, 8}),
        ({"gc": 0.3, "m": 0.4}, {3, 5, 7}),
        ({"count": 0.5}, {5, 8, 9}),
        ({"backup": 0.36}, {5, 8, 10}),
        ({"regret": 1.1}, {11}),
        ({"amplification": 3e6}, {12}),
        ({"single": 1e-3}, {13}),
        ({"repetition": 1e-5}, {14}),
    ],
)
def test_and_fail_where_they_do_not(changes: dict[str, Any], failing: set[int]) -> None:
    verdicts = [claim.verdict for claim in STUDY.decide(records(**changes))]
    assert {place for place, verdict in enumerate(verdicts) if verdict == "fails"} == failing
    assert verdicts.count("holds") == NUM_CLAIMS - len(failing)


def test_ratios_are_paired_by_seed_whatever_the_order_of_the_records() -> None:
    rows = records()
    for row in rows:
        if row.get("scheme") in (GC, M):
            row["chosen"] = [(1 + row["seed"]) * (2.0 if row["scheme"] == M else 1.0)] * len(SLOPES)
    rows.sort(key=lambda row: row["seed"] if row.get("scheme") == M else -row["seed"])
    for one in ratios(rows, M, 4, 0.3, over=GC):
        assert one.values.tolist() == [2.0] * 4


def test_the_smallest_share_of_computing_with_the_saving_of_the_paper() -> None:
    rows = records()
    for row in rows:
        if row.get("scheme") == M:
            row["chosen"] = [0.5 * (1 - 0.3 * slope) for slope in SLOPES]
        elif row.get("scheme") == GC:
            row["chosen"] = [0.5] * len(SLOPES)
    lines = [
        line.split()
        for line in notes(rows).splitlines()
        if line.startswith("64 workers") and "groups" in line
    ]
    assert [line[-1] for line in lines] == ["0.6", "0.6"]  # 16 % of 30 % is reached at 0.53
    assert lines[0][4] == "0.910"


def test_a_tiny_study_from_end_to_end(tmp_path: Path) -> None:
    setting = StragglerSetting(small=True, seeds=1, rounds=12, patterns=2, failures=4)
    parts = ("GC(4, 2)", "M-SGC(6, 1, 2, 2)", "16 workers", "n = 20, s = 4", "")
    rows = [
        {**cell, **record}
        for cell in cells(setting)
        if cell["setting"] in parts
        for record in run(cell, setting)
    ]
    Records(tmp_path / "stragglers.jsonl", STUDY.about(STUDY.full)).append(rows)
    said = report(STUDY, tmp_path / "stragglers.jsonl")
    assert "loads are those of the formulas, exactly" in said
    assert "GC(4, 2)           all         1331          0" in said  # at most 2 of 4 late: 11 ways, 3 rounds
    for name in ("times", "waiting"):
        assert (tmp_path / f"stragglers-{name}.svg").read_text().startswith("<svg")


def test_cells_of_all_parts() -> None:
    found = cells(STUDY.full)
    assert len(found) == 1 + 18 + 20 * 7 + 20 * 3
    assert len(cells(STUDY.small)) == 1 + 18 + 7 + 3
