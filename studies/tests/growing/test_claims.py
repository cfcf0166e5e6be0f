"""Claims of the growing study on records whose verdict is known."""

import pytest
from scipy import stats

from theodolite_studies.growing.claims import claims

from .tiny import growing_records, grown_records, ranking_records


def verdicts(records):
    return {claim.statement: claim.verdict for claim in claims(records)}


def test_exponents_that_agree_hold_and_others_fail():
    def told(alpha):
        records = [{**one, "part": "envelope"} for one in grown_records(alpha=alpha)]
        return verdicts(records)

    name = "s gives the exponent in parameters of networks from scratch"
    assert (told(1 / 3)[name], told(2.0)[name]) == ("holds", "fails")
    assert told(1 / 3)["a network grown block by block ends better than one block"] == "holds"


def test_ways_are_compared_seed_by_seed():
    better, worse = verdicts(growing_records(1.0)), verdicts(growing_records(1.14))
    name = "the strongest places end better than random ones"
    assert (better[name], worse[name]) == ("holds", "fails")
    assert better["a block that jumps there ends better than one that starts at zero"] == "unclear"
    assert better["the jump alone lowers the loss"] == better["stacking forgets what was learned"] == "holds"


def test_paired_tests_of_the_ways_stand_together_or_not():
    """Nine tests: one at p 0.02 says nothing, one at p 0.0002 does."""
    records = [one for one in growing_records(1.0) if one["way"] not in ("weakest", "even")]
    template = next(one for one in records if one["way"] == "signal")
    ends = [one["loss"] for one in records if one["way"] == "signal"]
    for way, gaps in (("weakest", (0.10, 0.14, 0.19)), ("even", (0.100, 0.102, 0.101))):
        records += [
            {**template, "seed": seed, "way": way, "loss": ends[seed] + gap} for seed, gap in enumerate(gaps)
        ]
    found = {one.statement: one for one in claims(records)}
    weakest, even = (found[f"and better than {each}"] for each in ("the weakest", "evenly spaced ones"))
    assert stats.ttest_1samp((0.10, 0.14, 0.19), 0).pvalue == pytest.approx(0.0324, abs=1e-3)
    assert (weakest.verdict, even.verdict) == ("unclear", "holds")
    assert "does not stand among 9 tests" in weakest.here


def test_a_signal_that_ranks_holds_and_one_that_ranks_backwards_fails():
    name = "the gain ranks the points as 100 steps do, everything trained"
    up, down = verdicts(ranking_records(1)), verdicts(ranking_records(-1))
    assert (up[name], down[name]) == ("holds", "fails")
    ahead = "the strongest point gains more than the points do in the mean, the new block alone trained"
    assert (up[ahead], down[ahead]) == ("holds", "fails")
    alike = "two orders of the data rank them alike, everything trained"
    assert (down[alike], verdicts(ranking_records(1, second=-1))[alike]) == ("holds", "fails")


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "holds"), (100, "unclear"), (200, "fails")])
def test_certificates_are_judged_by_an_exact_interval(wrong, verdict):
    record = {
        "part": "coverage",
        "splits": "disjoint",
        "regime": "little",
        "method": "bernstein",
        "repetitions": 2000,
        "issued": 1000,
        "wrong": wrong,
        "above": 300,
        "lower": 0.0,
        "truth": 0.1,
    }
    found = verdicts([record, {**record, "regime": "much", "wrong": 0, "above": 0}])
    assert list(found.values()) == [verdict, "fails"]
