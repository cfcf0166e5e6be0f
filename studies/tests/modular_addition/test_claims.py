"""Claims about modular addition on records whose verdict is known."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report
from theodolite_studies.modular_addition.claims import CLAIMS, WIDTHS, between, doublings, steps_to
from theodolite_studies.modular_addition.report import notes
from theodolite_studies.modular_addition.study import RECIPES, STUDY, AdditionSetting, cells

from .made_up import GOOD, records

LEAST = next(place for place, claim in enumerate(CLAIMS) if "so does the least" in claim.statement)


def verdicts(**changes: float) -> list[str]:
    return [each.verdict for each in STUDY.decide(records(**changes))]


def test_all_claims_hold_but_the_one_about_the_least_misalignment() -> None:
    found = verdicts()
    assert found.pop(LEAST) == "fails"
    assert found == ["holds"] * 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"single": 0.8}, ["nearly all"]),
        ({"alignment": 0.9}, ["output phases"]),
        ({"same": 0.9}, ["both layers"]),
        ({"unused": 1}, ["every frequency"]),
        ({"dispersion": 3.0}, ["balanced"]),
        ({"symmetry_2": 0.9}, ["r = 2, paper's", "r = 2, 20,000"]),
        ({"symmetry_4": 0.6}, ["r = 4, paper's", "r = 4, 20,000"]),
        ({"ghosts": 0.25}, ["2x and 2y"]),
        ({"ghosts": 0.75}, ["2x and 2y"]),
        ({"time": 0.64}, ["the flow predicts", "AdamW: the flow"]),
        ({"won": 0.9}, ["those that have one frequency"]),
        ({"misalignment": 0.4}, ["much more often"]),
        ({"equal": 0.5}, ["equal amplitudes"]),
        ({"even": 0.9}, ["any even part", "|x| and x⁴", "ReLU and GELU"]),
        ({"odd": 0.5}, ["odd functions"]),
        ({"memorised": 0.7}, ["does not generalise"]),
        ({"end": 0.8}, ["generalises later"]),
        ({"without": 0.9}, ["p 59, no decay"]),
        ({"rise": 0.05}, ["from memorising to generalising"]),
        ({"growth": 0.9}, ["norm still grows"]),
        ({"shrinkage": 1.1}, ["norm shrinks"]),
        ({"late_rise": -0.1}, ["concentration still rises"]),
        ({"doubling": 1.2}, ["twice the width"]),
        ({"new_at_first": 0.3}, ["new pairs are wrong"]),
        ({"new_in_the_end": 0.86}, ["in the end new pairs"]),
        ({"new_without": 0.9}, ["ordered pairs, no decay"]),
    ],
)
def test_a_fault_fails_its_claims_and_no_other(changes: dict[str, float], words: list[str]) -> None:
    found = [each for place, each in enumerate(STUDY.decide(records(**changes))) if place != LEAST]
    failed = [each.statement for each in found if each.verdict == "fails"]
    assert len(failed) == len(words)
    assert all(word in statement for word, statement in zip(words, failed, strict=True))
    assert {each.verdict for each in found} == {"holds", "fails"}


def test_every_made_up_value_is_used() -> None:
    """`symmetry 1` is printed and decides nothing."""
    changed = {name for name in GOOD if name not in ("symmetry 1",)}
    whole = [each.here for each in STUDY.decide(records())]
    for name in changed:
        other = [each.here for each in STUDY.decide(records(**{name: GOOD[name] * 0.7 + 0.1}))]
        assert other != whole, name


def test_the_least_misalignment_holds_where_it_is_right() -> None:
    assert verdicts(misalignment=0.6)[LEAST] == "holds"


def test_a_seed_that_never_generalises_takes_infinitely_many_steps_and_is_left_out_of_stages() -> None:
    rows = [
        one
        for one in records()
        if not (one.get("moment") == "generalised" and one["seed"] == 0 and one["network"] == WIDTHS[2])
    ]
    assert steps_to(rows, WIDTHS[2])[0] == math.inf
    assert math.isfinite(steps_to(rows, WIDTHS[1])[0])
    (_, wide) = doublings(rows)
    assert wide.values[0] == math.inf
    assert wide.values[1] == pytest.approx(0.7, abs=0.01)
    ratios = {each.where: each for each in between("norm", "memorised", "generalised", ratio=True)(rows)}
    assert f"{WIDTHS[2]}, 4 of 5 seeds" in ratios
    np.testing.assert_allclose(ratios[WIDTHS[0]].values, 1.2)
    found = {each.statement: each.verdict for each in STUDY.decide(rows)}
    assert found["twice the width generalises in fewer steps"] == "fails"


def test_claims_about_parts_that_were_not_run_are_left_out() -> None:
    only = [one for one in records() if one["part"] == "ordered"]
    found = [each.statement for each in STUDY.decide(only)]
    assert len([each for each in found if "p 23, ordered" in each]) == 3
    assert len([each for each in found if each.startswith("stage")]) == 4
    assert len(found) == 7


def test_the_report_draws_what_there_is(tmp_path: Path) -> None:
    Records(tmp_path / "sums.jsonl", STUDY.about(STUDY.full)).append(records())
    said = report(STUDY, tmp_path / "sums.jsonl")
    assert "30 of 31 claims hold" in said
    (row,) = [
        line for line in said.splitlines() if line.startswith("p 59, width 256") and "generalised" in line
    ]
    assert row.split()[4:10] == ["1", "generalised", "5", "1400", "to", "1456"]  # 2000·0.7, up to 4 % more
    shares = [line.split() for line in said.splitlines() if line.startswith("p 23, SGD, equal")][2]
    assert shares[4:9] == ["0.95", "0.60", "0.50", "0.95", "1.00"]
    for name in ("waves", "lottery", "stages", "widths"):
        assert (tmp_path / f"sums-{name}.svg").read_text().startswith("<svg")
    assert notes([]) == ""


def test_cells_have_every_network_decay_and_seed() -> None:
    found = cells(AdditionSetting(seeds=2))
    assert len(found) == 2 * sum(len(one.decays) for part in RECIPES.values() for one in part.values())
    assert len({tuple(cell.items()) for cell in found}) == len(found)
    assert {cell["decay"] for cell in found if cell["part"] == "ordered"} == {2.0, 0.0}
