"""The objective is Huber's, and its minimum is found from every start."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize, special

from theodolite.fits.laws import depth_recursion, sum_of_powers
from theodolite.fits.minimizing import (
    RTOL_OF_DRAWS,
    bootstrap,
    descend,
    minimize,
    objective,
    with_best_factors,
)

from .worlds import grid, noisy, surface

TERMS = {"parameters": ("A", "alpha"), "tokens": ("B", "beta"), "": ("E", "")}


def laws():
    n, d = grid(4)
    loss = noisy(surface(n, d), 0.01, 0)
    straight, bent = noisy(30 * d**-0.1, 0.001, 0), noisy(2 + 2000 * d**-0.35, 0.001, 0)
    sizes = {"parameters": n, "tokens": d}
    depth = np.array([0.0, 1, 2, 3, 5, 8, 13, 21])
    falling = noisy(2 + 1 / (1 + 0.5 * depth), 0.01, 0)
    return {
        "chinchilla": (sum_of_powers(TERMS, sizes | {"loss": loss}), loss),
        "power": (sum_of_powers({"tokens": TERMS["tokens"], "": TERMS[""]}, sizes | {"loss": bent}), bent),
        "power without offset": (
            sum_of_powers({"tokens": TERMS["tokens"]}, sizes | {"loss": straight}),
            straight,
        ),
        "depth": (depth_recursion(depth, falling), falling),
    }


@pytest.mark.parametrize("name", laws())
def test_gradients_are_those_of_finite_differences(name):
    law, loss = laws()[name]
    weights = np.random.default_rng(1).integers(0, 4, len(loss)).astype(float)
    for theta in with_best_factors(law, np.log(loss), law.starts)[::5] * 1.1:
        _, (gradient,) = objective(law, np.log(loss), weights[None], theta[None])
        measured = optimize.approx_fprime(
            theta, lambda t: objective(law, np.log(loss), weights[None], t[None])[0][0], epsilon=1e-8
        )
        np.testing.assert_allclose(gradient, measured, rtol=1e-4, atol=1e-4 * np.abs(gradient).max())


def test_the_objective_is_hubers_loss_of_the_log_residuals_summed_in_units_of_delta():
    n, d = grid(4)
    loss = noisy(surface(n, d), 0.001, 0)  # residuals on both sides of δ
    law = sum_of_powers(TERMS, {"parameters": n, "tokens": d, "loss": loss})
    theta = np.array([0.5, 0.27, 1.79, 0.34, 0.36])
    a = np.log(0.5) + 0.34 * np.log(n).mean()
    b = np.log(0.27) + 0.36 * np.log(d).mean()
    said = np.logaddexp(np.logaddexp(a - 0.34 * np.log(n), b - 0.36 * np.log(d)), np.log(1.79))
    expected = special.huber(1e-3, said - np.log(loss)).sum() / 1e-3
    (value,), _ = objective(law, np.log(loss), np.ones((1, len(loss))), theta[None])
    assert value == pytest.approx(expected, rel=1e-9)
    constants = law.constants(theta)
    assert constants["A"] == pytest.approx(np.exp(a))
    assert constants["B"] == pytest.approx(np.exp(b))


@pytest.mark.parametrize("name", laws())
def test_the_search_ends_where_lbfgs_of_scipy_does(name):
    law, loss = laws()[name]
    found = minimize(law, np.log(loss))
    ones = np.ones((1, len(loss)))

    def one(theta):
        (value,), (gradient,) = objective(law, np.log(loss), ones, theta[None])
        return value, gradient

    ends = [
        optimize.minimize(
            one,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(law.low, law.high, strict=True)),
            options={"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-10},
        )
        for start in with_best_factors(law, np.log(loss), law.starts)[::4]
    ]
    best = min(ends, key=lambda end: end.fun)
    assert found.value == pytest.approx(best.fun, rel=1e-6)
    np.testing.assert_allclose(found.theta, best.x, rtol=1e-3, atol=1e-4)
    assert found.num_reached >= 0.8 * found.num_starts


@pytest.mark.parametrize("name", laws())
def test_factors_at_a_given_shape_are_those_of_a_bounded_search_from_far_away(name):
    law, loss = laws()[name]
    num, ones = len(law.terms), np.ones((1, len(loss)))
    for theta in with_best_factors(law, np.log(loss), law.starts)[::3]:
        shape = theta[num:]

        def value(factors, shape=shape):
            (value,), (gradient,) = objective(law, np.log(loss), ones, np.concatenate([factors, shape])[None])
            return value, gradient[:num]

        ends = [
            optimize.minimize(
                value,
                np.full(num, share * loss.mean()),
                jac=True,
                method="L-BFGS-B",
                bounds=list(zip(law.low[:num], law.high[:num], strict=True)),
                options={"maxiter": 3000, "ftol": 1e-14, "gtol": 1e-10},
            ).fun
            for share in (0.1, 1.0)
        ]
        assert value(theta[:num])[0] <= min(ends) * 1.01  # they are where the search starts


@pytest.mark.parametrize("seed", range(4))
def test_every_pair_of_exponents_leads_to_the_same_optimum(seed):
    n, d = grid(5)
    loss = noisy(surface(n, d), 0.003, seed)
    law = sum_of_powers(TERMS, {"parameters": n, "tokens": d, "loss": loss})
    anywhere = np.random.default_rng(seed).uniform(0.05, 2, (200, 2))
    found = minimize(replace(law, starts=anywhere), np.log(loss))
    assert found.num_reached == 200
    assert found.value == pytest.approx(minimize(law, np.log(loss)).value, rel=1e-9)
    *_, alpha, beta = found.theta
    assert (alpha, beta) == pytest.approx((0.35, 0.37), abs=0.02)


def test_rows_searched_together_end_where_each_ends_alone():
    law, loss = laws()["chinchilla"]
    weights = np.random.default_rng(0).integers(0, 3, (12, len(loss))).astype(float)
    starts = np.repeat(with_best_factors(law, np.log(loss), law.starts)[12][None], 12, axis=0)
    together, values = descend(law, np.log(loss), weights, starts, RTOL_OF_DRAWS)
    for row in range(12):
        alone, value = descend(law, np.log(loss), weights[row][None], starts[:1], RTOL_OF_DRAWS)
        np.testing.assert_allclose(together[row], alone[0], rtol=1e-6)
        assert values[row] == pytest.approx(value[0], rel=1e-12)


def test_a_draw_ends_where_a_search_of_its_own_from_everywhere_does():
    n, d = grid(3)
    loss = noisy(surface(n, d), 0.03, 3)  # so few points that some draws have several minima
    law, log_loss = sum_of_powers(TERMS, {"parameters": n, "tokens": d, "loss": loss}), np.log(loss)
    drawn = bootstrap(law, log_loss, minimize(law, log_loss).theta, np.arange(9), 60, 5, None)
    generator = np.random.default_rng(5)
    starts = with_best_factors(law, log_loss, np.random.default_rng(0).uniform(0.05, 2, (40, 2)))
    missed = 0
    for theta in drawn:
        while len(set(points := generator.integers(9, size=9))) < 5:
            pass
        weights = np.bincount(points, minlength=9)[None].astype(float)
        ends = descend(law, log_loss, np.repeat(weights, 40, axis=0), starts, RTOL_OF_DRAWS)[1]
        missed += objective(law, log_loss, weights, theta[None])[0][0] > ends.min() * (1 + 1e-3) + 1e-6
    assert missed <= 4  # 9 if no draw were searched from the whole grid


def test_a_factor_that_the_data_push_below_zero_stays_on_its_bound():
    x = np.logspace(6, 10, 12)
    loss = 30 * x**-0.1 - 0.5  # an offset below zero
    law = sum_of_powers({"tokens": TERMS["tokens"], "": TERMS[""]}, {"tokens": x, "loss": loss})
    found = minimize(law, np.log(loss))
    assert found.theta[1] == law.low[1]
    assert 0 < found.theta[1] < 1e-5 * loss.min()


@pytest.mark.parametrize("seed", range(3))
def test_few_points_around_a_curved_valley_have_their_optimum_reached_from_every_start(seed):
    """There the second derivatives of the law matter: few points are inside δ."""
    depth = np.tile([0.0, 1, 2, 3, 4, 5, 6, 7], 3)
    loss = noisy(1.0 + 0.9 * (1 + 0.4 * depth) ** -0.55, 0.006, seed)
    law = depth_recursion(depth, loss)
    found = minimize(law, np.log(loss))
    assert found.num_reached == found.num_starts

    def one(theta):
        (value,), (gradient,) = objective(law, np.log(loss), np.ones((1, 24)), theta[None])
        return value, gradient

    ends = [
        optimize.minimize(
            one, found.theta * (1 + 0.05 * shift), jac=True, method="BFGS", options={"gtol": 1e-9}
        )
        for shift in np.random.default_rng(seed).standard_normal((4, 4))
    ]
    assert found.value <= min(end.fun for end in ends) * (1 + 1e-5)
