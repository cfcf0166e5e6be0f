"""The derivatives are those of the objective, and the objective is Huber's."""

import numpy as np
import pytest
from scipy import optimize, special

from theodolite.fits.laws import depth_recursion, sum_of_powers
from theodolite.fits.minimizing import descend, minimize, objective

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
    for theta in law.starts[:: max(1, len(law.starts) // 7)]:
        _, (gradient,) = objective(law, np.log(loss), weights[None], theta[None])
        measured = optimize.approx_fprime(
            theta, lambda t: objective(law, np.log(loss), weights[None], t[None])[0][0], epsilon=1e-7
        )
        np.testing.assert_allclose(gradient, measured, rtol=1e-4, atol=1e-4 * np.abs(gradient).max())


def test_the_objective_is_hubers_loss_of_the_log_residuals_summed_in_units_of_delta():
    n, d = grid(4)
    loss = noisy(surface(n, d), 0.001, 0)  # residuals on both sides of δ
    law = sum_of_powers(TERMS, {"parameters": n, "tokens": d, "loss": loss})
    theta = np.array([-0.7, -1.3, 0.58, 0.34, 0.36])
    a = theta[0] + theta[3] * np.log(n).mean()
    b = theta[1] + theta[4] * np.log(d).mean()
    said = np.logaddexp(np.logaddexp(a - theta[3] * np.log(n), b - theta[4] * np.log(d)), theta[2])
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
        for start in law.starts[:: max(1, len(law.starts) // 6)]
    ]
    best = min(ends, key=lambda end: end.fun)
    assert found.value == pytest.approx(best.fun, rel=1e-6)
    np.testing.assert_allclose(found.theta, best.x, rtol=1e-3, atol=1e-4)
    assert found.num_reached >= 0.8 * found.num_starts


def test_rows_in_step_end_where_each_ends_alone_and_within_bounds():
    generator = np.random.default_rng(0)
    matrices = generator.standard_normal((30, 4, 4))
    matrices = matrices @ matrices.swapaxes(1, 2) + 0.1 * np.eye(4)
    goals = 2 * generator.standard_normal((30, 4))
    low, high = np.full(4, -1.0), np.full(4, 1.5)

    def bowls(theta, rows):
        off = theta - goals[rows]
        slope = np.einsum("rij,rj->ri", matrices[rows], off)
        return (slope * off).sum(1) / 2, slope

    theta, _ = descend(bowls, generator.uniform(-1, 1, (30, 4)), low, high, 1e-13)
    for row in range(30):
        root = np.linalg.cholesky(matrices[row]).T
        known = optimize.lsq_linear(root, root @ goals[row], bounds=(low, high), tol=1e-14).x
        np.testing.assert_allclose(theta[row], known, atol=1e-4)
