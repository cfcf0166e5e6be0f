"""Power laws in one variable, and the law of depth."""

import numpy as np
import pytest

from theodolite import fits

from .worlds import noisy


def test_with_and_without_offset_each_finds_its_own():
    x = np.logspace(6, 10, 9)
    offset = fits.power(x=x, loss=2 + 300 * x**-0.3, draws=20)
    assert offset["E"].value == pytest.approx(2, rel=1e-4)
    assert offset["A"].value == pytest.approx(300, rel=1e-3)
    assert offset["alpha"].value == pytest.approx(0.3, rel=1e-4)
    plain = fits.power(x=x, loss=30 * x**-0.1, offset=False, draws=20)
    assert set(plain.constants) == {"A", "alpha"}
    assert plain["alpha"].value == pytest.approx(0.1, rel=1e-6)
    assert plain.predict(x=1e12).value == pytest.approx(30 * 1e12**-0.1, rel=1e-6)


def test_without_offset_the_fit_is_a_line_in_the_logarithms():
    x = np.logspace(6, 10, 30)
    loss = noisy(30 * x**-0.1, 0.0003, 0)  # inside δ, where Huber's loss is least squares
    slope, intercept = np.polyfit(np.log(x), np.log(loss), 1)
    fit = fits.power(x=x, loss=loss, offset=False, draws=20)
    assert fit["alpha"].value == pytest.approx(-slope, rel=1e-3)
    assert fit["A"].value == pytest.approx(np.exp(intercept), rel=1e-2)


def test_a_bootstrap_error_is_that_of_least_squares_where_this_is_known():
    x = np.logspace(6, 10, 60)
    fit = fits.power(x=x, loss=noisy(30 * x**-0.1, 0.0003, 2), offset=False, draws=300)
    log_x = np.log(x) - np.log(x).mean()
    known = 0.0003 / np.sqrt((log_x**2).sum())
    assert fit["alpha"].error == pytest.approx(known, rel=0.3)
    assert fit["alpha"].high - fit["alpha"].low == pytest.approx(2 * 1.96 * known, rel=0.3)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    x = np.logspace(6, 10, 24)
    worlds, inside = 24, {"E": 0, "alpha": 0, "ahead": 0}
    for seed in range(worlds):
        fit = fits.power(x=x, loss=noisy(2 + 300 * x**-0.3, 0.003, seed), draws=50, seed=seed)
        inside["E"] += fit["E"].low <= 2 <= fit["E"].high
        inside["alpha"] += fit["alpha"].low <= 0.3 <= fit["alpha"].high
        ahead = fit.predict(x=1e12)
        inside["ahead"] += ahead.low <= 2 + 300 * 1e12**-0.3 <= ahead.high
    # 95 % of 24 is 23; a percentile interval from 24 points is somewhat short.
    assert all(count >= 20 for count in inside.values()), inside


def test_the_depth_law_is_what_the_recursion_runs_into():
    a, s, delta, losses = 0.02, 2.5, 0.9, {}
    for k in range(401):
        losses[k] = 1.7 + delta
        delta -= a * delta**s
    depth = np.array([0, 2, 5, 10, 20, 40, 80, 120, 200, 300, 400])
    fit = fits.depth_expansion(depth=depth, loss=[losses[k] for k in depth], growth=1, draws=20)
    assert fit["s"].value == pytest.approx(s, rel=0.02)
    assert fit["a"].value == pytest.approx(a, rel=0.05)
    assert fit["E"].value == pytest.approx(1.7, rel=0.002)
    assert fit.predict(depth=60).value == pytest.approx(losses[60], rel=1e-3)
    assert fit["gamma"].value == pytest.approx(1 / (3 * (s - 1)), rel=0.03)


def test_the_exponent_in_parameters_is_that_of_a_family_whose_depth_grows_with_width():
    s, r = 1.8, 2.0
    fit = fits.depth_expansion(
        depth=(depth := np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])),
        loss=1 + (1 + 0.8 * 0.5 * depth) ** (-1 / 0.8),
        growth=r,
        draws=20,
    )
    width = np.array([1e3, 1e4])  # far out, where the power law is all there is
    excess = (0.8 * 0.5 * width**r) ** (-1 / (s - 1))
    parameters = width**2 * width**r
    slope = np.diff(np.log(excess)) / np.diff(np.log(parameters))
    assert fit["gamma"].value == pytest.approx(-slope[0], rel=1e-3)
