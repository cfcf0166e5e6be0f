"""Claims about collapse on records whose verdict is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from theodolite_studies.collapse.study import STUDY
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report

from .made_up import flows, minima, networks

UP = [1.0, 0.8, 0.9, 0.4, 0.5, 0.1]
"""NC1 that falls at three of five blocks."""


def everything() -> list[dict[str, Any]]:
    return [*flows("central"), *flows("joint"), *minima(), *networks()]


def test_all_claims_hold_where_the_records_say_so() -> None:
    assert [claim.verdict for claim in STUDY.decide(everything())] == ["holds"] * 16


@pytest.mark.parametrize(
    ("fault", "places"),
    [
        (lambda: flows("central", rising=1), [0]),
        (lambda: flows("joint", rising=1), [1]),
        (lambda: flows("central", pinv=0.1), [2]),
        (lambda: flows("central", end=0.01), [3]),
        (lambda: minima(nc1=0.1), [4]),
        (lambda: minima(error=0.1), [5]),
        (lambda: minima(ratio=1.4), [6, 7]),
        (lambda: networks(**{"profile held out": UP}), [10]),
        (lambda: networks(**{"nc4 end": 0.9}), [13]),
        (lambda: networks(**{"nc2 end": 0.6}), [14]),
        (lambda: networks(**{"nc3 end": 0.6}), [15]),
    ],
)
def test_a_claim_fails_where_its_records_speak_against_it(
    fault: Callable[[], list[dict[str, Any]]], places: list[int]
) -> None:
    changed = fault()
    part = changed[0]["part"]
    found = STUDY.decide([*changed, *(one for one in everything() if one["part"] != part)])
    assert [place for place, claim in enumerate(found) if claim.verdict == "fails"] == places


@pytest.mark.parametrize(("arm", "places"), [("usual", [8]), ("features ×10", [9]), ("head ×10", [9])])
def test_shares_of_blocks_are_those_of_an_arm(arm: str, places: list[int]) -> None:
    rows = [{**row, **({"profile end": UP} if row["arm"] == arm else {})} for row in networks()]
    found = STUDY.decide([*flows("central"), *flows("joint"), *minima(), *rows])
    shares = (8, 9)
    assert [place for place in shares if found[place].verdict == "fails"] == places


def test_a_strong_tie_decides_nothing_about_weak_ones() -> None:
    rows = [{**row, "ratio": 0.7 if row["tie"] == 0.1 else row["ratio"]} for row in minima()]
    found = STUDY.decide([*flows("central"), *flows("joint"), *rows, *networks()])
    assert [found[place].verdict for place in (6, 7)] == ["fails", "holds"]


@pytest.mark.parametrize(("arm", "place"), [("features ×10", 11), ("penalty", 12)])
def test_an_arm_without_an_effect_fails(arm: str, place: int) -> None:
    usual = {(row["network"], row["seed"]): row["profile end"] for row in networks() if row["arm"] == "usual"}
    rows = [
        {**row, "profile end": usual[row["network"], row["seed"]]} if row["arm"] == arm else row
        for row in networks()
    ]
    found = STUDY.decide([*flows("central"), *flows("joint"), *minima(), *rows])
    assert found[place].verdict == "fails"


def test_the_report_has_tables_and_draws_what_there_is(tmp_path: Path) -> None:
    about = {"study": "collapse", "seeds": 10, "network seeds": 5}
    Records(tmp_path / "made.jsonl", about).append(everything())
    said = report(STUDY, tmp_path / "made.jsonl")
    assert "16 of 16 claims hold" in said
    for title in ("flows: means", "minima: NC1", "networks: NC1", "networks at the end", "quotients of"):
        assert title in said
    for name in ("flow", "decays", "depth"):
        assert (tmp_path / f"made-{name}.svg").read_text().startswith("<svg")


def test_a_part_of_the_records_is_reported_alone(tmp_path: Path) -> None:
    about = {"study": "collapse", "seeds": 10, "network seeds": 5}
    Records(tmp_path / "made.jsonl", about).append(minima())
    assert "4 of 4 claims hold" in report(STUDY, tmp_path / "made.jsonl")
