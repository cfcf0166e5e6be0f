"""Chinchilla's law: on the public points, and on runs whose law is known."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize

from theodolite import fits
from theodolite.fits.laws import CONSTANT_TERM, SIZES, sum_of_powers
from theodolite.fits.minimizing import minimize

from .worlds import NAMES, POINTS, TRUTH, grid, noisy, surface

public = pytest.mark.skipif(
    not POINTS.exists(), reason="no chinchilla_points.csv; see $THEODOLITE_CHINCHILLA"
)
REFERENCE = {  # value and standard error on the 240 points
    "A": (477.8, 123),
    "B": (2143, 1654),
    "E": (1.8172, 0.026),
    "alpha": (0.3473, 0.015),
    "beta": (0.3672, 0.021),
}


@pytest.fixture(scope="module")
def on_public_points():
    return fits.fit("chinchilla", POINTS, columns=NAMES, drop_worst=5)


@public
@pytest.mark.parametrize("name", REFERENCE)
def test_the_public_points_give_the_reference_values_to_all_their_digits(on_public_points, name):
    value, error = REFERENCE[name]
    found = on_public_points[name]
    assert found.value == pytest.approx(value, rel=2e-4)  # far inside the standard error
    assert abs(found.value - value) < error
    assert found.error == pytest.approx(error, rel=0.25)
    assert found.low < value < found.high


@public
def test_every_start_reaches_the_optimum_on_the_public_points(on_public_points):
    assert on_public_points.num_reached == on_public_points.num_starts
    assert on_public_points.warnings == ()


@public
def test_any_pair_of_exponents_reaches_the_optimum_on_the_public_points(on_public_points):
    data = on_public_points.data
    law = sum_of_powers({**SIZES, **CONSTANT_TERM}, data)
    anywhere = np.random.default_rng(0).uniform(0.05, 2, (300, 2))
    found = minimize(replace(law, starts=anywhere), np.log(data["loss"]))
    assert found.num_reached == 300
    assert found.theta[-2:] == pytest.approx([0.3473, 0.3672], abs=1e-4)


@public
def test_the_worst_five_are_those_with_the_fewest_tokens_for_their_size(on_public_points):
    with POINTS.open() as file:
        rows = list(csv.DictReader(file))
    per_parameter = [float(row["Training FLOP"]) / float(row["Model Size"]) ** 2 for row in rows]
    fewest = np.argsort(per_parameter)[:5]
    kept = np.delete([float(row["loss"]) for row in rows], fewest)
    assert sorted(kept) == sorted(on_public_points.data["loss"])


@public
def test_the_budget_of_chinchilla_is_split_as_chinchilla_was(on_public_points):
    split = on_public_points.optimal(compute=5.76e23)
    assert split["parameters"].low < 70e9 < split["parameters"].high
    assert split["tokens"].low < 1.4e12 < split["tokens"].high


@pytest.fixture(scope="module")
def exact():
    n, d = grid()
    return fits.chinchilla(parameters=n, tokens=d, loss=surface(n, d), draws=20)


def test_a_law_without_noise_is_found_exactly(exact):
    fit = exact
    for name, value in TRUTH.items():
        assert fit[name].value == pytest.approx(value, rel=1e-4)
    assert fit.predict(parameters=1e12, tokens=1e13).value == pytest.approx(surface(1e12, 1e13), rel=1e-6)
    assert fit.held_out.worst == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("given", [("parameters", "compute"), ("tokens", "compute")])
def test_tokens_come_from_compute_and_sizes_from_tokens(given):
    n, d = grid()
    known = {"parameters": n, "tokens": d, "compute": 6 * n * d}
    fit = fits.chinchilla(loss=surface(n, d), draws=20, **{name: known[name] for name in given})
    for name, column in known.items():
        np.testing.assert_allclose(fit.data[name], column, rtol=1e-12)


def test_intervals_hold_the_truth_of_noisy_runs():
    n, d = grid()
    inside, asked = 0, 0
    for seed in range(3):
        loss = noisy(surface(n, d), 0.004, seed)
        fit = fits.chinchilla(parameters=n, tokens=d, loss=loss, draws=60, seed=seed)
        pairs = [(fit[name], value) for name, value in TRUTH.items()]
        pairs.append((fit.predict(parameters=1e11, tokens=1e13), surface(1e11, 1e13)))
        pairs.append((fit.predict(parameters=1e8, tokens=1e10), surface(1e8, 1e10)))
        inside += sum(one.low <= value <= one.high for one, value in pairs)
        asked += len(pairs)
        assert all(one.high - one.low < 0.3 * value for one, value in pairs[2:])  # not by being endless
    assert inside >= 0.8 * asked


def test_the_optimum_is_where_a_search_over_sizes_finds_it(exact):
    fit = exact
    split = fit.optimal(compute=1e23)
    best = optimize.minimize_scalar(
        lambda log_n: surface(np.exp(log_n), 1e23 / 6 / np.exp(log_n)), bounds=(20, 30), method="bounded"
    )
    assert split["parameters"].value == pytest.approx(np.exp(best.x), rel=1e-3)
    assert split["loss"].value == pytest.approx(best.fun, rel=1e-6)
    assert 6 * split["parameters"].value * split["tokens"].value == pytest.approx(1e23)
    assert fit["p"].value == pytest.approx(0.37 / 0.72, rel=1e-4)


def test_a_seed_gives_the_same_intervals_again_and_another_seed_others():
    n, d = grid()
    loss = noisy(surface(n, d), 0.004, 0)
    first, again, other = (
        fits.chinchilla(parameters=n, tokens=d, loss=loss, draws=20, seed=seed).to_dict()["constants"]
        for seed in (3, 3, 4)
    )
    assert first == again
    assert first["alpha"]["low"] != other["alpha"]["low"]
    assert first["alpha"]["value"] == other["alpha"]["value"]


def test_one_outlier_moves_the_fit_far_less_than_it_moves_least_squares():
    n, d = grid()
    loss = noisy(surface(n, d), 0.002, 0)
    loss[7] *= 1.3
    fit = fits.chinchilla(parameters=n, tokens=d, loss=loss, draws=20)
    assert fit["E"].value == pytest.approx(1.8, rel=0.02)
    assert fit.residuals[7] == pytest.approx(-np.log(1.3), abs=0.02)


def test_the_held_out_runs_are_the_largest_tenth_and_were_not_seen():
    n, d = grid()
    loss = surface(n, d)
    large = 6 * n * d >= np.sort(6 * n * d)[-4]
    fit = fits.chinchilla(parameters=n, tokens=d, loss=np.where(large, 1.1 * loss, loss), draws=20)
    assert fit.held_out.num_points == large.sum()
    assert fit.held_out.above == pytest.approx((6 * n * d)[large].min())
    assert fit.held_out.bias == pytest.approx(1 / 1.1 - 1, rel=1e-3)


def test_progress_is_told_and_ends_at_one():
    n, d = grid()
    told = []
    fits.chinchilla(
        parameters=n, tokens=d, loss=surface(n, d), draws=20, progress=lambda line, share: told.append(share)
    )
    assert told == sorted(told)
    assert told[-1] == 1


def test_where_neither_size_matters_there_is_no_best_split_and_no_crash():
    parameters, tokens = np.repeat([1e3, 2e3, 4e3], 3), np.tile([1e4, 2e4, 4e4], 3)
    fit = fits.chinchilla(parameters=parameters, tokens=tokens, loss=np.full(9, 2.0), draws=20)
    assert fit.predict(parameters=1e6, tokens=1e7).value == pytest.approx(2.0)
    best = fit.optimal(compute=1e12)
    assert np.isnan(best["parameters"].value)
    assert np.isnan(fit.constants["p"].value)
