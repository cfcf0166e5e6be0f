"""IsoFLOP: the best size of every budget, and the law through them."""

import numpy as np
import pytest

from theodolite import UseError, fits

from .worlds import TRUTH, noisy, surface

BUDGETS = [1e18, 1e19, 1e20, 1e21, 1e22]


def best_size(compute):
    alpha, beta = TRUTH["alpha"], TRUTH["beta"]
    balance = (alpha * TRUTH["A"] / (beta * TRUTH["B"])) ** (1 / (alpha + beta))
    return balance * (compute / 6) ** (beta / (alpha + beta))


def runs():
    # More of them above the best size than below it.
    compute, ratio = map(np.ravel, np.meshgrid(BUDGETS, np.geomspace(0.7, 2.2, 7)))
    parameters = ratio * best_size(compute)
    return {
        "compute": compute,
        "parameters": parameters,
        "loss": surface(parameters, compute / 6 / parameters),
    }


def test_the_law_of_the_best_sizes_is_found():
    fit = fits.isoflop(**runs(), draws=20)
    beta, total = TRUTH["beta"], TRUTH["alpha"] + TRUTH["beta"]
    assert fit["p"].value == pytest.approx(beta / total, abs=0.002)
    assert fit["q"].value == pytest.approx(1 - beta / total, abs=0.002)
    for row in fit.optima:
        assert row["parameters"] == pytest.approx(best_size(row["compute"]), rel=0.02)
        assert 6 * row["parameters"] * row["tokens"] == pytest.approx(row["compute"])
    split = fit.optimal(compute=1e24)
    assert 6 * split["parameters"].value * split["tokens"].value == pytest.approx(1e24)
    assert split["parameters"].value == pytest.approx(best_size(1e24), rel=0.03)
    assert abs(fit.held_out.worst) < 0.02


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    known, inside = runs(), 0
    for seed in range(40):
        loss = noisy(known["loss"], 0.0015, seed)
        fit = fits.isoflop(**known | {"loss": loss}, draws=200, seed=seed)
        inside += fit["p"].low <= TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"]) <= fit["p"].high
    assert 33 <= inside <= 40


def test_runs_share_a_budget_within_a_tenth_or_around_those_that_are_named():
    known = runs()
    shaken = known["compute"] * np.random.default_rng(0).uniform(0.97, 1.03, len(known["compute"]))
    fit = fits.isoflop(**known | {"compute": shaken}, draws=20)
    assert len(fit.optima) == len(BUDGETS)
    apart = known["compute"] * np.random.default_rng(0).uniform(0.85, 1.15, len(known["compute"]))
    fit = fits.isoflop(**known | {"compute": apart}, budgets=BUDGETS, draws=20)
    assert [row["compute"] for row in fit.optima] == BUDGETS


def test_a_budget_whose_best_lies_outside_is_left_out_and_said():
    known = runs()
    keep = ~((known["compute"] == 1e22) & (known["parameters"] < 1.2 * best_size(1e22)))
    fit = fits.isoflop(**{name: column[keep] for name, column in known.items()}, draws=20)
    assert len(fit.optima) == 4
    assert any("1 of 5 budgets were left out" in line for line in fit.warnings)


def test_three_sizes_at_each_budget_leave_no_interval_rather_than_a_sure_one():
    known = runs()
    known = {name: column.reshape(7, 5)[[0, 3, 6]].ravel() for name, column in known.items()}
    fit = fits.isoflop(**known, draws=20)
    assert fit["p"].value == pytest.approx(0.514, abs=0.01)
    assert np.isnan(fit["p"].low)
    assert fit.to_dict()["constants"]["p"]["low"] is None
    assert any("no interval for p" in line for line in fit.warnings)


def test_noise_that_turns_parabolas_over_is_said():
    known = runs()
    loss = noisy(known["loss"], 0.02, 3)
    assert any("no lowest point" in line for line in fits.isoflop(**known | {"loss": loss}).warnings)


def test_best_sizes_off_a_power_law_are_said():
    known = runs()
    # As if the middle budget had been another network's.
    moved = np.where(known["compute"] == 1e20, 2.0, 1.0)
    known["parameters"] = known["parameters"] * moved
    loss = noisy(known["loss"], 0.0001, 0)
    assert any("off a power law" in line for line in fits.isoflop(**known | {"loss": loss}).warnings)


def test_one_budget_is_refused_with_a_remedy():
    known = {name: column[runs()["compute"] == 1e20] for name, column in runs().items()}
    with pytest.raises(UseError, match="two are needed"):
        fits.isoflop(**known)
