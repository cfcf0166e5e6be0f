"""Records of the Goldilocks study as arrays: zones, and maps of accuracy."""

import math

import numpy as np
import pytest

from theodolite_studies.goldilocks.curves import accuracies, curve, zone

from .made_up import falling, maps, zone_record


@pytest.mark.parametrize(
    "excess, low, high",
    [
        ([0, 1, 2, 1, 0], -1.0, 1.0),
        ([0, 0, 4, 3, 1], -1 + 0.5, 1.5),
        ([3, 3, 4, 0, 3], -math.inf, 0.5),  # what lies apart does not belong to it
        ([2, 2, 2, 2, 2], -math.inf, math.inf),
    ],
)
def test_a_zone_reaches_down_to_half_of_its_peak(excess, low, high):
    records = [zone_record("lenet300-fashion", "A", "alpha", range(-2, 3), np.array(excess, float), 0)]
    found = zone(curve(records, row="alpha"))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_without_positive_curvature_there_is_no_zone():
    records = [zone_record("lenet300-fashion", "D", "alpha", range(3), np.array([-1.0, 0.0, -2.0]), 0)]
    assert zone(curve(records, row="alpha")) is None


def test_the_zone_is_that_of_the_seeds_mean():
    records = [
        zone_record("lenet300-fashion", "A", "alpha", range(3), np.array(excess, float), seed)
        for seed, excess in enumerate([[0.0, 4.0, 4.0], [0.0, 4.0, -4.0]])
    ]
    found = zone(curve(records, row="alpha"))
    assert (found.low, found.high) == (pytest.approx(0.5, abs=1e-3), pytest.approx(1.5, abs=1e-3))


def test_a_run_that_diverged_is_at_chance():
    found = accuracies(maps("temperature", "A", falling), part="temperature", column="A")
    assert found.train.shape == (1, 8, 2)
    assert found.train[0, :, 1].tolist() == [0.1] * 8
    assert found.diverged[0].tolist() == [[False, True]] * 8
    assert found.best()[0, 3] == 0.9
