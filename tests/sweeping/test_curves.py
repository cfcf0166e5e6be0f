import math

import numpy as np
import pytest

from theodolite.core.size import Size
from theodolite.sweeping.curves import Criterion, Scale, SweepCurve, loss_at, resampled, resamples, vertices
from theodolite.sweeping.families import analyse, optimum_text

from .synthetic import rows_of

BASE = Size(64, 4)
OCTAVES = Scale("lr", log=True)


def optimum_of(loss, **given):
    (family,) = analyse(rows_of(loss, sizes=[BASE], **given), base=BASE)
    return family.optimum(BASE)


@pytest.mark.parametrize("step", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("vertex", [-8.0, -7.6, -7.45])
def test_the_vertex_of_a_parabola_is_found_whatever_the_distance_of_the_points(vertex, step):
    found = optimum_of(
        lambda size, e, seed: 2 + 0.3 * (e - vertex) ** 2, exponents=np.arange(-12, -4 + step / 2, step)
    )
    assert math.log2(found.value) == pytest.approx(vertex, abs=1e-9)
    assert found.fitted == pytest.approx(2.0)
    assert found.edge == ""


def test_octaves_apart_the_parabola_goes_through_three_points_and_through_no_fourth():
    losses = {-9: 3.0, -8: 1.2, -7: 1.0, -6: 1.5, -5: 40.0}
    found = optimum_of(lambda size, e, seed: losses[e], exponents=losses)
    # The vertex of the parabola through (−1, y₀), (0, y₁), (1, y₂) is (y₀ − y₂) / 2(y₀ − 2y₁ + y₂).
    assert math.log2(found.value) == pytest.approx(-7 + (1.2 - 1.5) / (2 * (1.2 - 2 + 1.5)))


def test_closer_points_are_fitted_by_least_squares():
    exponents = np.arange(-9, -5.9, 0.5)
    noise = dict(zip(exponents, [0.0, 0.01, -0.02, 0.015, 0.01, -0.01, 0.02], strict=True))
    found = optimum_of(lambda size, e, seed: 2 + 0.2 * (e + 7.5) ** 2 + noise[e], exponents=exponents)
    # An independent fit, through the five points within an octave of the best.
    best = min(exponents, key=lambda e: 2 + 0.2 * (e + 7.5) ** 2 + noise[e])
    near = [e for e in exponents if abs(e - best) <= 1]
    a, b, _ = np.polyfit(near, [2 + 0.2 * (e + 7.5) ** 2 + noise[e] for e in near], 2)
    assert math.log2(found.value) == pytest.approx(-b / (2 * a))


def test_no_vertex_lies_beyond_the_neighbours_of_the_best_point():
    places = np.arange(-10.0, -6.0, 0.25)
    rough = np.random.default_rng(0).normal(size=(500, len(places)))
    found, _ = vertices(places, rough, OCTAVES)
    assert (np.abs(found - places[rough.argmin(1)]) <= 0.25 + 1e-12).all()


@pytest.mark.parametrize(
    "vertex, edge, best, text", [(-20, "low", -12, "≤ 2^-12"), (0, "high", -5, "≥ 2^-5")]
)
def test_an_optimum_at_the_end_of_the_grid_is_a_bound(vertex, edge, best, text):
    found = optimum_of(lambda size, e, seed: 2 + 0.1 * (e - vertex) ** 2 + 0.01 * seed * e)
    assert (found.edge, found.value, found.found) == (edge, 2.0**best, False)
    assert not found.interval.known
    assert optimum_text(found, OCTAVES) == text


def test_what_lies_beyond_a_divergence_is_no_bound():
    # The last finite point is the best, and the next one diverges: the optimum is bracketed.
    found = optimum_of(lambda size, e, seed: math.inf if e > -8 else -e / 10)
    assert (found.edge, found.value, found.found) == ("", 2.0**-8, True)


def test_one_seed_that_diverges_makes_the_point_infinite():
    found = optimum_of(lambda size, e, seed: math.inf if (e, seed) == (-7, 1) else 2 + (e + 7) ** 2)
    assert found.best in (2.0**-8, 2.0**-6)
    assert found.loss == 3.0


def test_where_all_diverge_there_is_no_optimum():
    found = optimum_of(lambda size, e, seed: math.inf)
    assert math.isnan(found.value)
    assert optimum_text(found, OCTAVES) == "all diverged"


def test_failed_runs_do_not_count():
    rows = rows_of(lambda size, e, seed: 2 + (e + 8) ** 2, sizes=[BASE])
    rows[0] |= {"status": "failed", "held_out": None}
    (family,) = analyse(rows, base=BASE)
    assert family.curves[0].num_seeds[0] == 2
    assert family.curves[0].means[0] == 2 + 16


@pytest.mark.parametrize("sign", [1, -1])
def test_a_metric_is_analysed_as_a_loss_is(sign):
    def value(size, e, seed):
        return sign * 100 + (e + 7 + 0.1 * seed) ** 2 + size.width / 64 if e < -5 else math.inf

    sizes = [BASE, Size(128, 4)]
    rows = rows_of(lambda size, e, seed: 3 + e / 10, sizes=sizes)
    for row in rows:
        row["residual"] = value(Size(row["width"], row["depth"]), math.log2(row["lr"]), row["seed"])
    (by_metric,) = analyse(rows, base=BASE, criterion=Criterion("residual"))
    (by_loss,) = analyse(rows_of(value, sizes=sizes), base=BASE)
    for one, other in zip(by_metric.optima, by_loss.optima, strict=True):
        assert repr(one) == repr(other)
    assert repr(by_metric.transfers) == repr(by_loss.transfers)
    assert repr(by_metric.changes) == repr(by_loss.changes)
    assert "residual against log2 of lr" in str(by_metric)


def test_what_has_no_value_of_a_metric_is_left_out():
    rows = rows_of(lambda size, e, seed: math.inf if e > -6 else 2.0, sizes=[BASE], seeds=[0])
    for row in rows[1:]:
        row["iterations"] = 17.0 if row["status"] == "finished" else None
    (family,) = analyse(rows, base=BASE, criterion=Criterion("iterations"))
    (curve,) = family.curves
    assert curve.values == tuple(2.0**e for e in range(-11, -4))
    assert curve.means.tolist() == [17.0] * 6 + [math.inf]


def coverage(num_seeds, noise, *, times=300):
    """How often the interval holds the true optimum."""
    rng, held = np.random.default_rng(1), 0
    exponents, seeds, weights = np.arange(-11.0, -5.0), range(num_seeds), resamples(num_seeds)
    for _ in range(times):
        losses = 2 + 0.2 * (exponents + 8.2) ** 2 + noise * rng.normal(size=(num_seeds, len(exponents)))
        curve = SweepCurve(BASE, tuple(2.0**exponents), tuple(seeds), losses)
        found = resampled(curve, OCTAVES, seeds, weights).optimum
        held += math.log2(found.interval.low) <= -8.2 <= math.log2(found.interval.high)
    return held / times


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_intervals_hold_the_truth_as_often_as_they_say(num_seeds):
    # Four standard errors of a share of 0.95 in 300 are 0.05. Plain quantiles give 0.7 to 0.85.
    assert 0.90 <= coverage(num_seeds, noise=0.02) <= 0.995


def test_what_a_seed_does_to_all_points_alike_does_not_widen_the_interval():
    found = optimum_of(lambda size, e, seed: 2 + 0.2 * (e + 8.2) ** 2 + 10.0 * seed)
    assert found.interval.known
    assert math.log2(found.interval.high / found.interval.low) < 1e-6


def test_one_seed_has_no_interval_and_the_table_says_so():
    (family,) = analyse(rows_of(lambda size, e, seed: (e + 8) ** 2, sizes=[BASE], seeds=[0]), base=BASE)
    assert not family.optimum(BASE).interval.known
    assert "With one seed there are no intervals" in str(family)


def test_points_may_have_different_seeds():
    rows = rows_of(lambda size, e, seed: 2 + 0.2 * (e + 8) ** 2 + 0.01 * seed, sizes=[BASE])
    rows = [row for row in rows if row["seed"] == 0 or 2**-10 < row["lr"] < 2**-6]
    (family,) = analyse(rows, base=BASE)
    found = family.optimum(BASE)
    assert found.num_seeds == 3
    assert math.log2(found.value) == pytest.approx(-8)
    # Points whose only seed was not drawn keep their own loss, so no draw has its optimum there.
    assert math.log2(found.interval.high / found.interval.low) < 1e-6


def test_between_points_a_parabola_is_read_off_exactly():
    places = np.arange(-12.0, -4.0)
    means = 1 + 0.5 * (places + 7.3) ** 2
    for place in (-12.0, -11.8, -9.5, -7.3, -5.1, -5.0):
        found = loss_at(places, means, place, OCTAVES)
        assert found == pytest.approx(1 + 0.5 * (place + 7.3) ** 2)


def test_between_a_point_and_one_that_diverged_the_loss_is_infinite():
    means = np.array([1.0, 2.0, np.inf])
    found = loss_at(np.array([-3.0, -2.0, -1.0]), means, -1.6, OCTAVES)
    assert math.isinf(found)


def test_a_quantity_that_can_be_zero_is_swept_as_it_is():
    rows = [
        {**row, "weight_decay": decay, "held_out": 2 + (decay - 0.13) ** 2 + row["seed"]}
        for row in rows_of(lambda size, e, seed: 0.0, sizes=[BASE], exponents=[-8])
        for decay in (0.0, 0.1, 0.2, 0.3)
    ]
    (family,) = analyse(rows, base=BASE, over="weight_decay", axes=["lr"])
    assert family.optimum(BASE).value == pytest.approx(0.13)
    assert not family.scale.log
