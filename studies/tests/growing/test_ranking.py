"""Rank correlations, and what a block gains."""

import math

import numpy as np
import pytest
from scipy import stats

from theodolite_studies.growing.ranking import correlation, ranked, realised, spearman

from .tiny import TINY


def test_correlation_is_spearmans():
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=(2, 12)).round(1)
    expected = stats.spearmanr(one, other).statistic
    assert spearman(one, other) == pytest.approx(expected)
    found = correlation({0: (one, other), 1: (one, one)})
    assert found.value == pytest.approx((expected + 1) / 2)
    low, high = found.over_points
    assert low < found.value < high
    assert math.isnan(spearman(one, np.zeros(12)))


def test_an_interval_over_seeds_is_students_and_two_seeds_have_none():
    up = np.arange(13.0)
    readings = [np.random.default_rng(seed).permutation(up) + up for seed in range(4)]
    pairs = {seed: (up, each) for seed, each in enumerate(readings)}
    values = [stats.spearmanr(up, each).statistic for each in readings]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert correlation(pairs).over_seeds == pytest.approx(np.clip(expected, -1, 1))
    # As smooth as they are, and whatever the points say.
    alike = correlation({0: (up, up), 1: (up, up)})
    assert np.isnan(alike.over_seeds).all()
    assert "no interval" in str(alike)


def test_an_interval_over_points_keeps_to_the_seeds_that_are_there():
    """With as many draws as one likes: no draw of seeds leaves one of them out."""
    up = np.arange(9.0)
    found = correlation({0: (up, up), 1: (up, -up), 2: (up, up)})
    assert found.over_points == pytest.approx((1 / 3, 1 / 3))


def test_a_control_that_trains_on_is_what_gains_are_measured_against():
    records = list(ranked(TINY, 0, "cpu"))
    assert {(one["variant"], one["point"]) for one in records} == {
        (v, p) for v in ("new", "all") for p in (0, 1)
    }
    new, everything = ([one for one in records if one["variant"] == v] for v in ("new", "all"))
    assert len({one["control"]["1"] for one in new} | {one["control"]["2"] for one in new}) == 1
    assert everything[0]["control"]["1"] != everything[0]["control"]["2"]
    # With one block of three trained for one step little changes, whatever the others do.
    assert all(abs(one["gained"]["1"]) < 0.5 for one in records)
    assert {
        seed: len(each)
        for seed, each in realised([{**one, "seed": 0} for one in records], "all", 2, "gained").items()
    } == {0: 2}
