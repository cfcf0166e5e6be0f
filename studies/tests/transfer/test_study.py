"""The transfer study: which runs it asks for, and what it makes of them."""

import dataclasses
import math

import pytest

from theodolite import Size
from theodolite_studies.framework.study import conduct, read, report, summarise
from theodolite_studies.transfer.study import FULL, SMALL, STUDY, OptimizerPart, wanted

from .runs import row


def exponents(runs, kind, size):
    mine = [run for run in runs if run.parameterization == kind and run.size == size]
    return sorted({round(math.log2(run.lr)) for run in mine})


def test_windows_lie_around_where_the_optimum_is_expected():
    runs = wanted(FULL, "adamw", [])
    assert exponents(runs, "plan", Size(128, 4)) == [-9, -8, -7, -6, -5]
    assert exponents(runs, "plan", Size(1024, 4)) == [-8, -7, -6]
    assert exponents(runs, "standard", Size(1024, 4)) == [-11, -10, -9]
    assert {run.seed for run in runs} == {0, 1, 2}
    assert {run.size.depth for run in runs} == {2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize(
    "losses, expected",
    [
        ({-8: 2.0, -7: 1.0, -6: 2.0}, [-8, -7, -6]),
        ({-8: 1.0, -7: 2.0, -6: 3.0}, [-9, -8, -7, -6]),
        ({-8: 3.0, -7: 2.0, -6: 1.0}, [-8, -7, -6, -5]),
        ({-8: None, -7: None, -6: None}, [-9, -8, -7, -6]),
        ({-11: 1.0, -10: 2.0, -9: 3.0, -8: 4.0, -7: 5.0, -6: 6.0}, [-11, -10, -9, -8, -7, -6]),
    ],
)
def test_a_window_widens_where_its_best_is_at_an_edge_and_not_for_ever(losses, expected):
    rows = [row(1024, 4, exponent, loss, seed=k) for exponent, loss in losses.items() for k in range(3)]
    assert exponents(wanted(FULL, "adamw", rows), "plan", Size(1024, 4)) == expected


def test_half_a_window_is_not_widened():
    """An interrupted study asks for the same runs as one that was not."""
    rows = [row(1024, 4, exponent, 3.0 - exponent, seed=0) for exponent in (-8, -7, -6)]
    assert exponents(wanted(FULL, "adamw", rows), "plan", Size(1024, 4)) == [-8, -7, -6]


def test_the_study_runs_and_goes_on_and_is_drawn(tmp_path):
    part = OptimizerPart("tiny", "gpt-pre", "adamw", (Size(32, 1), Size(64, 1)), -7)
    tiny = dataclasses.replace(
        SMALL, parts=(part,), base=Size(32, 1), steps=2, warmup=0, held_out=1, seeds=(0,)
    )
    study, told = dataclasses.replace(STUDY, small=tiny), []
    assert conduct(study, tmp_path, setting=tiny, engine="serial", tell=told.append) == 0
    _, records = read(study, tmp_path)
    assert {(each["width"], each["parameterization"]) for each in records} >= {(64, "plan"), (64, "standard")}
    told.clear()
    assert conduct(study, tmp_path, setting=tiny, engine="serial", tell=told.append) == 0
    assert told == [f"tiny: {len(records)} runs, 0 of them to make"]
    summarise(study, tmp_path, tmp_path / "few.jsonl")
    assert len(read(study, tmp_path / "few.jsonl")[1]) == len(records)
    assert "gpt-pre: adamw, plan" in report(study, tmp_path)


def test_an_unknown_part_and_a_file_that_is_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no part 'adam': it has adamw, muon-kimi"):
        conduct(STUDY, tmp_path / "x", parts=["adam"])
    with pytest.raises(ValueError, match="is not there"):
        report(STUDY, tmp_path / "none.jsonl")
