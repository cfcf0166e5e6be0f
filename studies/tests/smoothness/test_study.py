"""The study of gradient-normalized smoothness: what a cell holds, and what decides each claim."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

from theodolite_studies.smoothness import study as smoothness


@pytest.fixture(scope="module")
def small():
    return [
        {**cell, **record}
        for cell in smoothness.cells(smoothness.STUDY.small)
        for record in smoothness.run(cell)
    ]


def test_cells_end_at_the_minimum_that_scipy_finds_from_elsewhere(small):
    problem = smoothness.made("logistic", 0)
    rows = np.hstack([problem.inputs.numpy(), np.ones((len(problem.inputs), 1))])
    signs = 2 * problem.targets.numpy()[:, 0] - 1

    def loss(w):
        return np.logaddexp(0, -signs * (rows @ w)).mean()

    best = scipy.optimize.minimize(loss, np.ones(rows.shape[1]), options={"gtol": 1e-7}).fun
    assert {one["method"] for one in small} == {"hessian", "gauss_newton", "fisher", "descent"}
    for one in small:
        assert one["losses"][0] == pytest.approx(np.log(2), rel=1e-4)
        assert one["losses"][-1] == pytest.approx(best, rel=2e-5)  # five digits are kept
        assert one["gaps"][0] == 1
        assert one["gaps"][-1] < 1e-10
        assert all(earlier > later for earlier, later in zip(one["gaps"], one["gaps"][1:], strict=False))
        first = one["to 0.01"]
        gaps = dict(zip(one["steps"], one["gaps"], strict=True))
        assert gaps.get(first, 0) <= 0.01 < gaps.get(first - 1, 1)


def test_what_is_counted_adds_up(small):
    for one in small:
        if one["method"] != "descent":
            assert len(one["gammas"]) == one["accepted"] == len(one["gaps"]) - 1
            assert one["works"][-1] == one["accepted"] + one["tries"] + 2 * one["products"]
            refused = one["tries"] - one["accepted"]
            # γ has been doubled after every step but the last, and halved at every try that was refused.
            assert one["gammas"][-1] == pytest.approx(2.0 ** (one["accepted"] - 1 - refused), rel=1e-4)


def test_of_a_linear_model_the_gauss_newton_is_the_hessian(small):
    by = {one["method"]: one for one in small}
    assert by["hessian"]["gammas"] == by["gauss_newton"]["gammas"]
    assert by["hessian"]["gammas"] != by["fisher"]["gammas"]
