"""What the transfer study makes of its runs."""

import math

from theodolite_studies.framework.records import Records, read_records
from theodolite_studies.framework.study import report
from theodolite_studies.transfer.study import FULL, STUDY, run_records

from .runs import row


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
    found = {claim.statement: claim for claim in STUDY.decide(list(ideal(1.0)))}
    assert found["adamw, width: the plan's optimum moves at most one octave"].verdict == "holds"
    moved = found["adamw, width: the standard one's moves more, beyond noise"]
    assert (moved.verdict, moved.here) == ("holds", "3.00 octaves, 2^-10.00 to 2^-7.00")
    assert found["adamw: wider and deeper is never worse under the plan"].verdict == "holds"
    swapped = [
        {**each, "parameterization": {"plan": "standard", "standard": "plan"}[each["parameterization"]]}
        for each in ideal(1.0)
    ]
    assert [claim.verdict for claim in STUDY.decide(swapped)] == ["fails"] * 3


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

    assert [claim.verdict for claim in STUDY.decide(list(depths(None)))] == ["holds", "holds"]
    assert [claim.verdict for claim in STUDY.decide(list(depths(1.7)))] == ["holds", "fails"]


def test_records_hold_what_the_figures_need(tmp_path):
    rows = [*ideal(1.0), row(128, 4, -2, None), {**row(128, 4, -3, None), "status": "failed"}]
    Records(tmp_path / "few.jsonl", STUDY.about(FULL)).append(run_records(FULL, rows))
    assert {each["status"] for each in read_records(tmp_path / "few.jsonl")[1]} == {"finished", "diverged"}
    assert "3 of 3 claims hold" in report(STUDY, tmp_path / "few.jsonl")
    assert (tmp_path / "few-adamw.svg").read_text().startswith("<svg")
