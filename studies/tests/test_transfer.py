"""The transfer study: which runs it asks for, and what it makes of them."""

import dataclasses
import math

import pytest

from theodolite import Size
from theodolite.fleet.engine import Resources
from theodolite_studies.transfer.report import claims, report
from theodolite_studies.transfer.study import (
    FULL,
    SMALL,
    Part,
    make,
    read_rows,
    summary,
    wanted,
    write_summary,
)


def row(width, depth, exponent, loss, *, kind="plan", seed=0, optimizer="adamw", workload="gpt-enwik8"):
    return {
        "workload": workload,
        "optimizer": optimizer,
        "parameterization": kind,
        "width": width,
        "depth": depth,
        "lr": 2.0**exponent,
        "seed": seed,
        "status": "diverged" if loss is None else "finished",
        "step": 500,
        "held_out": loss,
    }


def exponents(runs, kind, size):
    mine = [run for run in runs if run.parameterization == kind and run.size == size]
    return sorted({round(math.log2(run.lr)) for run in mine})


def test_windows_lie_around_where_the_optimum_is_expected():
    runs = wanted(FULL, FULL.parts[0], [])
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
    assert exponents(wanted(FULL, FULL.parts[0], rows), "plan", Size(1024, 4)) == expected


def test_half_a_window_is_not_widened():
    """An interrupted study asks for the same runs as one that was not."""
    rows = [row(1024, 4, exponent, 3.0 - exponent, seed=0) for exponent in (-8, -7, -6)]
    assert exponents(wanted(FULL, FULL.parts[0], rows), "plan", Size(1024, 4)) == [-8, -7, -6]


def ideal(fall, *, workload="gpt-enwik8", sizes=((128, 4), (256, 4), (512, 4), (1024, 4))):
    """Parabolas around an optimum that falls with the width by so many octaves per doubling."""
    for kind, slope in (("plan", 0.0), ("standard", fall)):
        for width, depth in sizes:
            centre = -7 - slope * math.log2(width / 128)
            for exponent in range(-13, -3):
                for seed in range(3):
                    loss = 2 - 0.1 * math.log2(width / 128) + 0.05 * (exponent - centre) ** 2 + 0.001 * seed
                    yield row(width, depth, exponent, loss, kind=kind, seed=seed, workload=workload)


def test_claims_are_judged_by_how_far_optima_move():
    found = {claim.claim: claim for claim in claims(list(ideal(1.0)), FULL)}
    assert found["adamw, width: the plan's optimum moves at most one octave"].holds
    moved = found["adamw, width: the standard one's moves more, beyond noise"]
    assert (moved.holds, moved.here) == (True, "3.00 octaves, 2^-7.00 to 2^-10.00")
    assert found["adamw: wider and deeper is never worse under the plan"].holds
    swapped = [
        {**each, "parameterization": {"plan": "standard", "standard": "plan"}[each["parameterization"]]}
        for each in ideal(1.0)
    ]
    assert [claim.holds for claim in claims(swapped, FULL)] == [False, False, False]


def test_without_norms_it_is_about_the_deepest():
    def depths(standard_at_64):
        for kind in ("plan", "standard"):
            for depth in (2, 4, 16, 64):
                for exponent in (-9, -8, -7):
                    for seed in range(3):
                        loss = 2 - 0.05 * math.log2(depth) + 0.1 * (exponent + 8) ** 2 + 0.001 * seed
                        if kind == "standard" and depth == 64 and exponent > -9:
                            loss = standard_at_64
                        yield row(
                            128, depth, exponent, loss, kind=kind, seed=seed, workload="gpt-enwik8-bare"
                        )

    assert [claim.holds for claim in claims(list(depths(None)), FULL)] == [True, True]
    assert [claim.holds for claim in claims(list(depths(1.7)), FULL)] == [True, False]


def test_a_summary_holds_what_the_figures_need(tmp_path):
    rows = [*ideal(1.0), row(128, 4, -2, None)]
    (tmp_path / "few.csv").write_text(summary(rows))
    again = read_rows(tmp_path / "few.csv")
    assert len(again) == len(rows)
    assert {each["status"] for each in again} == {"finished", "diverged"}
    text = report(tmp_path / "few.csv")
    assert "3 of 3 claims hold." in text
    assert (tmp_path / "few-adamw.svg").read_text().startswith("<svg")


def test_the_study_runs_and_goes_on_and_is_drawn(tmp_path):
    part = Part("tiny", "gpt-pre", "adamw", (Size(32, 1), Size(64, 1)), -7)
    tiny = dataclasses.replace(
        SMALL, parts=(part,), base=Size(32, 1), steps=2, warmup=0, held_out=1, seeds=(0,)
    )
    told = []
    made = make(tmp_path, setting=tiny, engine="serial", means=Resources(), tell=told.append)
    assert made.ok
    rows = read_rows(tmp_path)
    assert {(each["width"], each["parameterization"]) for each in rows} >= {(64, "plan"), (64, "standard")}
    again = make(tmp_path, setting=tiny, engine="serial", means=Resources(), tell=told.append)
    assert (again.before, again.finished) == (again.total, 0)
    write_summary(tmp_path, tmp_path / "few.csv")
    assert len(read_rows(tmp_path / "few.csv")) == len(rows)
    assert "gpt-pre: adamw, plan" in report(tmp_path)


def test_an_unknown_part_and_a_file_that_is_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no part 'adam': it has adamw, muon-kimi"):
        make(tmp_path, parts=["adam"])
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is no summary of the study"):
        report(tmp_path / "other.csv")
    with pytest.raises(ValueError, match="is not there"):
        report(tmp_path / "none.csv")
