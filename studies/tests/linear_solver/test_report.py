"""Claims of the study of linear solvers on records whose verdict is known, and their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report
from theodolite_studies.linear_solver.figures import figures
from theodolite_studies.linear_solver.report import notes
from theodolite_studies.linear_solver.study import STUDY

from .made_up import records


def changed(rows: list[dict[str, Any]], key: str, factor: float, **only: Any) -> list[dict[str, Any]]:
    """The value of a key times a factor in some records; each number of a list."""
    found = []
    for row in rows:
        value = row.get(key)
        if value is not None and all(row.get(name) == wanted for name, wanted in only.items()):
            row = {
                **row,
                key: [factor * each for each in value] if isinstance(value, list) else factor * value,
            }
        found.append(row)
    return found


def unlike_holding(rows: list[dict[str, Any]]) -> dict[int, str]:
    verdicts = [claim.verdict for claim in STUDY.decide(rows)]
    assert len(verdicts) == 17
    return {place: verdict for place, verdict in enumerate(verdicts) if verdict != "holds"}


def test_all_claims_hold_where_the_records_say_so() -> None:
    assert unlike_holding(records()) == {}


@pytest.mark.parametrize(
    ("key", "factor", "only", "failing"),
    [
        ("identity", 1.1, {"side": 64, "seed": 3}, {0}),
        ("network", 2, {"kind": "random", "side": 32}, {1}),
        ("network", 2, {"kind": "smooth", "side": 32}, {2}),
        ("network", 3.5, {"side": 64}, {3}),
        ("network", 2, {"side": 128, "levels": 4}, {4}),
        ("network", 2, {"side": 128, "levels": 6}, {5}),
        ("loss", 3, {"width": 8}, {6}),  # 0.12: above width 4
        ("network", 1.3, {"width": 8, "kind": "random", "side": 32}, {7}),  # 23
        ("loss", 3, {"depth": 2}, {8, 10}),
        ("network", 1.5, {"depth": 2, "kind": "random", "side": 32}, {9, 10}),  # 18
        ("network", 0.5, {"parameterization": "standard"}, {11}),
        ("network", 2, {"kind": "edge"}, {12}),
        ("network", 6, {"kind": "highest wave"}, {13}),
        ("multigrid", 4, {"side": 32}, {14}),
        ("network work", 6, {}, {15}),
        ("multigrid work", 10, {"kind": "smooth"}, {16}),
    ],
)
def test_each_fails_where_they_do_not(
    key: str, factor: float, only: dict[str, Any], failing: set[int]
) -> None:
    assert unlike_holding(changed(records(), key, factor, **only)) == dict.fromkeys(sorted(failing), "fails")


def test_a_system_that_is_not_solved_counts_as_infinite() -> None:
    rows = [
        {**row, "network": [12, None]} if (row.get("depth"), row["side"], row["seed"]) == (2, 32, 1) else row
        for row in records()
    ]
    assert unlike_holding(rows) == {9: "unclear", 10: "unclear"}  # one seed of five is higher
    (line,) = [line for line in notes(rows).splitlines() if line.startswith("network 16 × 2 ")][:1]
    assert line.count("unsolved by 1 of 5") == 2  # random and smooth


def test_seeds_that_disagree_decide_nothing() -> None:
    rows = [
        {**row, "network": [26, 26]} if row["seed"] == 0 and row.get("width") == 8 else row
        for row in records(seeds=3)
    ]
    found = {claim.statement: claim.verdict for claim in STUDY.decide(rows)}
    assert found["random right sides: the trained network takes a third"] == "unclear"


def test_half_a_study_gives_the_claims_it_can() -> None:
    known = [row for row in records() if row["part"] == "known"]
    assert [claim.verdict for claim in STUDY.decide(known)] == ["holds", "holds"]
    assert [name for name, _ in figures(known)] == ["residuals"]
    assert "multigrid" in notes(known)


def test_tables_and_figures_show_the_records(tmp_path: Path) -> None:
    Records(tmp_path / "linear-solver.jsonl", STUDY.about(STUDY.full)).append(records())
    said = report(STUDY, tmp_path / "linear-solver.jsonl")
    assert "17 of 17 claims hold" in said
    lines = [line.split() for line in said.partition("floating-point operations")[2].splitlines()]
    work = next(line for line in lines if line[:4] == ["network", "4", "×", "1"])
    # 30 for each iteration and point, 20.4 iterations; 20·80 and 20·160 of conjugate gradients
    assert [float(each) for each in work[4:]] == pytest.approx([30, 612, 0.3825, 30, 612, 0.19125], rel=0.01)
    for name in ("residuals", "widths"):
        assert (tmp_path / f"linear-solver-{name}.svg").read_text().startswith("<svg")
