"""Claims about extrapolation on records whose verdict is known, the tables and the figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from theodolite_studies.extrapolation.readings import Trainings, relative
from theodolite_studies.extrapolation.setting import FULL
from theodolite_studies.extrapolation.study import STUDY
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report

from .made_up import records


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {each.statement: each.verdict for each in STUDY.decide(rows)}


def test_all_claims_hold_where_the_records_say_so() -> None:
    found = verdicts(records())
    assert len(found) == len(STUDY.claims)
    assert {*found.values()} == {"holds"}


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        (
            {"width": {"trained": -0.1}, "level": {"hole": 0.1}},
            ["more width lowers the error inside", "more width helps less at narrower gaps than inside"],
        ),
        (
            {"width": {"hole": -0.1}, "level": {"hole": 0.1}},
            ["more width lowers the error in the hole", "and so at other learning rates"],
        ),
        (
            {"width": {"narrower": 0.5}, "level": {"narrower": 3.0}},
            [
                "more width does not lower the error at narrower gaps",
                "more width helps less at narrower gaps than inside",
            ],
        ),
        ({"width": {"wider": 0.5}}, ["nor at wider gaps"]),
        ({"level": {"hole": 0.4}}, ["the error in the hole is like that inside"]),
        ({"level": {"narrower": 0.3}}, ["the error at narrower gaps is much larger"]),
        ({"level": {"wider": 0.3}}, ["and so at wider gaps"]),
        ({"everywhere": {"hole": 1.3}}, ["in the hole, training everywhere is no better"]),
        ({"everywhere": {"narrower": 1.0}, "near": 0.8}, ["at narrower gaps it is"]),
        ({"everywhere": {"wider": 1.0}}, ["and at wider gaps"]),
        ({"near": 2.5}, ["this cost grows with the distance from trained gaps"]),
        ({"by_width": -0.1}, ["and does not fall with width"]),
        ({"num": {"hole": -0.1}}, ["more data lower the error inside and in the hole"]),
        ({"num": {"narrower": 0.3}}, ["more data do not lower the error at narrower gaps"]),
        ({"num": {"wider": 0.3}}, ["nor do they at wider gaps"]),
        (
            {"flips": {"trained": 1.1}},
            [
                "mirrored flows lower the error inside and in the hole",
                "they are worth half of four times the flows",
            ],
        ),
        ({"flips": {"hole": 0.95}}, ["they are worth half of four times the flows"]),
        ({"flips": {"wider": 1.1}}, ["mirrored flows lower the error beyond too"]),
        ({"spread": 0.3, "speed": 0.0}, ["the spread of 4 networks ranks flows by their error"]),
        ({"speed": 0.8}, ["better than the largest coarse speed does"]),
        ({"beyond": 0.4}, ["beyond, the spread grows as the error does"]),
    ],
)
def test_a_claim_fails_where_the_records_contradict_it(changes: Any, failing: list[str]) -> None:
    found = verdicts(records(**changes))
    assert [name for name, verdict in found.items() if verdict == "fails"] == failing


@pytest.mark.parametrize(
    ("change", "place"), [({"order": 0.1}, 0), ({"through": 1e-6}, 1), ({"apart": 1e-4}, 2)]
)
def test_a_flow_that_is_none_is_seen(change: dict[str, float], place: int) -> None:
    rows = records()
    rows[0] |= change
    rows[1] |= change
    found = STUDY.decide(rows)
    assert [number for number, each in enumerate(found) if each.verdict != "holds"] == [place]


def test_errors_are_root_mean_squares_over_bins_by_hand() -> None:
    row = {"errors": [1.0, 4.0, 100.0], "misses": [2.0, 18.0, 1.0]}
    assert relative(row, [0, 1]) == pytest.approx(math.sqrt(5 / 20))
    assert relative({**row, "errors": [None, 1.0, 1.0]}, [0, 1]) == math.inf
    data = Trainings(records(), FULL)
    error = data.errors({"width": 8}, [0])[0]
    assert data.of({"width": 8})[0]["errors"][0] == pytest.approx(error**2)
    assert data.octaves({"width": 64}, {"width": 8}, "trained") == pytest.approx(np.full(6, -1.5), abs=0.03)
    assert data.octaves({"width": 64}, {"width": 3}, "trained").tolist() == []


def test_a_network_that_diverged_gives_an_error_without_an_end_and_no_verdict() -> None:
    rows = records()
    for row in rows:
        if row["part"] in ("train", "ensemble") and row["seed"] == 0 and row["width"] == 32:
            row["errors"] = [None] * 28
            row |= {"fit": None} if row["part"] == "train" else {"average": [None] * 28}
            if "ranks" in row:
                row["ranks"] = {name: dict.fromkeys(own) for name, own in row["ranks"].items()}
    found = verdicts(rows)
    assert found["the error in the hole is like that inside"] == "unclear"
    assert found["the spread of 4 networks ranks flows by their error"] == "unclear"
    assert found["more width lowers the error inside"] == "unclear"
    assert "nan" in STUDY.notes(Trainings(rows, FULL)) or "inf" in STUDY.notes(Trainings(rows, FULL))
    assert all(svg.startswith("<svg") for _, svg in STUDY.figures(Trainings(rows, FULL)))


def test_the_report_draws_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "extrapolation.jsonl"
    Records(path, STUDY.about(FULL)).append(records())
    said = report(STUDY, path)
    assert f"{len(STUDY.claims)} of {len(STUDY.claims)} claims hold" in said
    for name in ("widths", "data"):
        assert (tmp_path / f"extrapolation-{name}.svg").read_text().startswith("<svg")
    assert "width 64, everywhere" in said
    some = [row for row in records() if row["part"] == "flow" or row["seed"] == 0]
    assert "unclear" in verdicts(some).values()
    assert {*verdicts([row for row in some if row["part"] == "flow"]).values()} == {"holds"}
