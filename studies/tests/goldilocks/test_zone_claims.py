"""What the Goldilocks study makes of its records: zones, verdicts, claims."""

import math

import numpy as np
import pytest

from theodolite_studies.goldilocks.study import STUDY
from theodolite_studies.goldilocks.zone_claims import projected_excess

from .made_up import SETTING, as_the_paper_says, claimed


def test_where_all_is_as_the_paper_says_every_claim_holds():
    found = list(STUDY.decide(as_the_paper_says(), SETTING))
    assert [claim.statement for claim in found if claim.verdict != "holds"] == []
    assert len(found) == 21


def changed(records, row, columns, change, name="excess"):
    """The records with one array of some curves changed."""
    return [
        {**record, name: list(change(np.array(record[name]), record["seed"]))}
        if record.get("row") == row and record["column"] in columns
        else record
        for record in records
    ]


def at_place(place, value):
    def change(values, seed):
        values[place] = value
        return values

    return change


@pytest.mark.parametrize(
    "claim, row, columns, change, name",
    [
        (
            "A–E: a zone along T: the excess falls off to both sides of a peak",
            "temperature",
            "B",
            at_place(-1, 2.0),
            "excess",
        ),
        (
            "A–E: a zone along α: the excess falls off to both sides of a peak",
            "alpha",
            "E",
            at_place(0, 0.6),
            "excess",
        ),
        ("A: flat under joint scaling, T = α^L", "joint", "A", at_place(2, 3.5), "excess"),
        (
            "B–E: flat under joint scaling for large α (T = α^L; D, E: T = α)",
            "joint",
            "D",
            at_place(-1, 1.5),
            "excess",
        ),
        ("B: joint scaling fails for small α", "joint", "B", at_place(0, 1.9), "excess"),
        ("E: joint scaling fails for small α", "joint", "E", at_place(0, 0.9), "excess"),
        ("C: T = α^(L−ℒ) is flat for small α", "identity", "C", at_place(0, 2.5), "excess"),
        ("C: T = α^L is not", "joint", "C", at_place(slice(0, 3), 1.0), "excess"),
        ("A: α does what T = α^-L does", "alpha", "A", at_place(2, 2.0), "excess"),
        ("D, E: the peak along T is lower than A's", "temperature", "D", at_place(3, 3.5), "excess"),
        ("D, E: much lower", "temperature", "E", at_place(3, 2.0), "excess"),
        ("D, E: the excess is negative somewhere", "alpha", "D", lambda v, s: abs(v) + 0.1, "excess"),
        ("A–C: Tr(S) = 0, ReLU networks without norms", "temperature", "C", lambda v, s: v + 4, "trace of S"),
        ("D, E: Tr(S) < 0, LayerNorm", "temperature", "D", lambda v, s: 0 * v, "trace of S"),
        (
            "D, E: where the excess is negative, so is that of S",
            "temperature",
            "D",
            at_place(0, 0.2),
            "excess of S",
        ),
        (
            "A–E: along T the excess goes with the share of G",
            "temperature",
            "A",
            lambda v, s: v[::-1] + np.arange(7),
            "frobenius of G",
        ),
        (
            "A–E: the projected excess is √d·t/√(t² + d + 1), which saturates at √d",
            "joint",
            "B",
            lambda v, s: 2 * v,
            "t",
        ),
    ],
)
def test_a_claim_fails_where_its_threshold_is_crossed(claim, row, columns, change, name):
    records = changed(as_the_paper_says(), row, columns, change, name)
    if claim == "D, E: the excess is negative somewhere":
        records = changed(records, "temperature", columns, change)
    assert claimed(records, claim).verdict == "fails"


def test_flat_is_by_the_measure_of_the_homogeneous_peak():
    nearly = changed(as_the_paper_says(), "joint", "D", at_place(-1, 1.25))  # 0.25 of A's 3 is less than 0.1
    claim = "B–E: flat under joint scaling for large α (T = α^L; D, E: T = α)"
    assert claimed(nearly, claim).verdict == "holds"


def test_seeds_that_disagree_leave_a_claim_unclear():
    noisy = changed(as_the_paper_says(), "joint", "A", lambda v, seed: at_place(0, 3.0 + 0.6 * seed)(v, seed))
    assert claimed(noisy, "A: flat under joint scaling, T = α^L").verdict == "unclear"
    alone = [record for record in as_the_paper_says() if record["seed"] == 0]
    assert {claim.verdict for claim in STUDY.decide(alone, SETTING)} <= {"unclear", "fails"}


def test_what_is_not_there_is_not_judged():
    only = [record for record in as_the_paper_says() if record["column"] == "A"]
    found = [claim.statement for claim in STUDY.decide(only, SETTING)]
    assert "A: flat under joint scaling, T = α^L" in found
    assert not [claim for claim in found if claim.startswith(("B", "C", "D, E"))]


def test_excess_saturates():
    assert projected_excess(np.array([0.0, 1e6]), 50) == pytest.approx([0.0, math.sqrt(50)])
    assert projected_excess(np.array([5.0]), 50) == pytest.approx([math.sqrt(50) * 5 / math.sqrt(76)])
