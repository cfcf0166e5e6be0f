"""Which case a row of the table shows."""

import math
from itertools import permutations

import numpy as np
import pytest

from theodolite_studies.framework.claims import (
    Claim,
    Decided,
    Observation,
    all_within,
    at_least,
    at_most,
    count_at_most,
    decide,
    each,
    lower,
    per,
    report_claims,
    tally,
)

NAN = Observation("nan", np.array([math.nan, 0.1, 0.2]))
GOOD = Observation("good", np.array([0.10, 0.11, 0.12]))
WIDE = Observation("wide", np.array([0.0, 1.0, 8.0]))
"""The largest mean of all, and nothing follows from it."""
BAD = Observation("bad", np.array([2.00, 2.01, 2.02]))
WORSE = Observation("worse", np.array([2.40, 2.41, 2.42]))
NEVER = Observation("never", np.array([math.inf, 2.0, 2.0]))


@pytest.mark.parametrize(
    ("cases", "verdict", "shown"),
    [
        ([GOOD, NAN], "unclear", "? ± ? (nan, 1 of 2 hold)"),
        ([GOOD, NAN, WIDE], "unclear", "? ± ? (nan, 1 of 3 hold)"),
        ([GOOD, WIDE], "unclear", "3.00 ± 2.52 (wide, 1 of 2 hold)"),
        ([GOOD, NAN, BAD, WIDE], "fails", "2.01 ± 6e-03 (bad, 1 of 4 hold)"),
        ([NAN, BAD, WORSE], "fails", "2.41 ± 6e-03 (worse, 0 of 3 hold)"),
        ([NAN, WORSE, NEVER], "fails", "∞ ± ? (never, 0 of 3 hold)"),
    ],
)
@pytest.mark.parametrize("below", [True, False])
def test_the_case_that_decided_is_shown_in_whatever_order(
    cases: list[Observation], verdict: str, shown: str, below: bool
) -> None:
    if not below:  # the same, upside down
        cases = [Observation(one.where, -one.values) for one in cases]
        shown = shown if shown[0] == "?" else f"-{shown}"
    for order in permutations(cases):
        limited = at_most(1.0, lambda found: found) if below else at_least(-1.0, lambda found: found)
        assert limited(order)[:2] == (shown, verdict)


def test_the_case_nearest_to_failing_is_shown_and_one_failure_fails_the_claim() -> None:
    good, bad = Observation("good", np.array([1.0, 1.1])), Observation("bad", np.array([3.0, 3.1]))
    found = Decided("c", "p", "t", *at_most(2.0, lambda data: [good, bad])(None))
    assert (found.verdict, found.here) == ("fails", "3.05 ± 0.05 (bad, 1 of 2 hold)")
    assert found.others == "bad 3.05 ± 0.05 fails"
    assert at_least(2.0, lambda data: [good])(None)[1:] == ("fails", "")
    assert at_least(2.0, lambda data: [bad])(None)[1:] == ("holds", "")
    assert report_claims([found]).splitlines()[-2:] == [
        "Where a claim does not hold:",
        "c: bad 3.05 ± 0.05 fails",
    ]
    assert tally([found, found]) == "0 of 2 claims hold, 2 fail, none is unclear."


def test_differences_are_judged_by_the_paired_test() -> None:
    down = Observation("down", np.array([-0.10, -0.11, -0.12]))
    wide = Observation("wide", np.array([-0.10, 0.11, 0.12]))
    assert lower(lambda data: data)([down])[:2] == ("-0.110, p 0.0027 (down)", "holds")
    here, verdict, others = lower(lambda data: data)([down, wide])
    assert (here, verdict) == ("+0.043, p 0.61 (wide, 1 of 2 hold)", "unclear")
    assert others.startswith("wide +0.0433 (-0.2653 to +0.3519)")


def test_a_doubt_leaves_a_claim_unclear_whatever_the_values() -> None:
    doubted = Observation("here: at an edge", np.array([0.0, 0.0]), "at an edge")
    for decided in (
        at_most(1.0, lambda data: data),
        lower(lambda data: data),
        count_at_most(1, "octave", list),
    ):
        assert decided([doubted])[1] == "unclear"


def test_a_count_has_no_spread() -> None:
    found = [Observation("one", np.array([1.0])), Observation("other", np.array([2.0]))]
    assert count_at_most(1, "octave", list)(found) == (
        "2 octaves (other, 1 of 2 hold)",
        "fails",
        "other 2 fails",
    )
    assert count_at_most(1, "octave", list)(found[:1]) == ("1 octave (one)", "holds", "")


def test_what_there_is_no_data_on_is_not_decided() -> None:
    claims = [
        Claim("a of {data[0][net]}", "p", "≤ {data[0][loss]}", at_most(9.0, per("net", "loss"))),
        Claim("b", "p", "t", at_most(9.0, per("net", "loss", net="cnn"))),
        Claim("c", "p", "t", all_within(1.0, lambda records: [])),
    ]
    records = [{"net": "mlp", "seed": seed, "loss": 2.0 + 0.1 * seed} for seed in range(3)]
    (found,) = decide(claims, records)
    assert (found.statement, found.threshold, found.here) == ("a of mlp", "≤ 2.0", "2.10 ± 0.06 (mlp)")


def test_records_are_observed_by_their_keys() -> None:
    records = [
        {"net": net, "lr": lr, "seed": seed, "loss": lr * seed}
        for net in ("mlp", "gpt")
        for lr in (0.1, 0.5)
        for seed in range(2)
    ]
    found = per(("net", "lr"), "loss", "{} at {:g}", lr=lambda lr: lr > 0.2)(records)
    assert [(one.where, one.values.tolist()) for one in found] == [
        ("mlp at 0.5", [0.0, 0.5]),
        ("gpt at 0.5", [0.0, 0.5]),
    ]
    (counted,) = each("lr", lambda own: np.array([len(own)]), lr=0.1)(records)
    assert (counted.where, counted.values.tolist()) == ("0.1", [4])
