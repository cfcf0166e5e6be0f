"""Paired comparisons, against scipy's tests and by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from theodolite.core.errors import UseError
from theodolite_studies.framework.paired import Paired, paired, smallest_effect, standing


@pytest.mark.parametrize("count", [2, 3, 8])
def test_interval_and_p_are_those_of_a_paired_t_test(count):
    generator = np.random.default_rng(count)
    first, second = generator.normal(1.5, 0.1, size=(2, count))
    found = paired(dict(enumerate(first)), dict(enumerate(second)))
    truth = stats.ttest_rel(first, second)
    interval = truth.confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(first) - np.mean(second))
    assert found.interval == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(truth.pvalue)


def test_seeds_are_matched_by_their_number_not_by_their_place():
    found = paired({3: 1.0, 1: 2.0, 9: 7.0}, {1: 1.5, 3: 0.25})
    assert found.differences.tolist() == [0.5, 0.75]
    with pytest.raises(UseError, match=r"no seed is in both: \[0\] and \[1\]"):
        paired({0: 1.0}, {1: 1.0})


@pytest.mark.parametrize(
    "differences, below, above",
    [
        ([-0.010, -0.011, -0.012], "holds", "fails"),
        ([0.010, 0.011, 0.012], "fails", "holds"),
        ([0.010, -0.011, 0.012], "unclear", "unclear"),
        ([math.inf, 0.01, 0.1], "fails", "holds"),
        ([-math.inf, -0.01, -0.1], "holds", "fails"),
        ([math.inf, 0.0, 0.1], "unclear", "unclear"),
        ([math.inf, *[-0.02] * 7], "unclear", "unclear"),
        ([math.inf, -math.inf, 0.1], "unclear", "unclear"),
        ([math.nan, -0.010, -0.011], "unclear", "unclear"),
        ([math.inf], "unclear", "unclear"),
        ([], "unclear", "unclear"),
        ([-0.010], "unclear", "unclear"),
        ([0.0, 0.0, 0.0], "unclear", "unclear"),
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(differences, below, above):
    found = Paired(np.array(differences))
    assert (found.verdict(below=True), found.verdict(below=False)) == (below, above)


def test_one_that_diverged_is_infinitely_worse_and_of_two_nothing_is_known():
    found = paired({0: math.inf, 1: math.inf, 2: 1.0}, {0: math.inf, 1: 2.0, 2: 1.5})
    np.testing.assert_equal(found.differences, [math.nan, math.inf, -0.5])
    assert str(found) == "2 not finite, 1 higher, 1 lower, 3 seeds"
    assert math.isnan(found.mean)
    assert math.isnan(found.p)


def test_the_text_has_mean_interval_p_and_seeds():
    assert str(Paired(np.array([-0.004, -0.006, -0.005, -0.005]))) == (
        "-0.0050 (-0.0063 to -0.0037), p 0.0012, 4 seeds"
    )
    assert "p < 0.0001" in str(Paired(np.linspace(0.1, 0.1001, 8)))


def test_holm_is_stricter_than_each_test_alone_and_looser_than_dividing_by_all():
    """Of 0.01, 0.013, 0.014, 0.19, 0.35, 0.5, 0.63, 0.67, 0.75, 0.81: Holm's limits are 0.05/10, 0.05/9, …"""
    assert standing([0.004, 0.0054, 0.0062, 0.19]) == (True, True, True, False)
    assert standing([0.02, 0.02, 0.02]) == (False, False, False)
    assert standing([0.016, 0.024, 0.049]) == (True, True, True)
    assert standing([0.2, 0.001]) == (False, True)
    assert standing([math.nan, 0.01]) == (False, True)
    assert standing([]) == ()


@pytest.mark.parametrize("sides", [1, 2])
def test_a_visible_effect_is_found_in_four_of_five_studies(sides):
    generator = np.random.default_rng(0)
    spread = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    samples = smallest_effect(spread, sides=sides) + spread.std(ddof=1) * generator.normal(size=(20_000, 5))
    found = stats.ttest_1samp(samples, 0.0, axis=1, alternative="greater" if sides == 1 else "two-sided")
    assert (found.pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.01)
    assert math.isnan(smallest_effect(np.array([0.1]), sides=sides))
    assert math.isnan(smallest_effect(np.array([0.1, math.inf]), sides=sides))
