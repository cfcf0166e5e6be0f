"""The problems of the study of refinement, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite_studies.refinement.problems import logistic, mlp, quadratic, train


def test_a_quadratic_is_trained_as_its_closed_form_says() -> None:
    problem = quadratic(0, steps=5)
    factors = torch.tensor([[1.0, 0.5, 1.0, 0.25, 1.0], [1.0] * 5]).double()
    ends, norms = train(problem, factors, torch.tensor([0.3, 0.1]).double(), seed=7)
    draw = torch.Generator().manual_seed(7)
    noise = [torch.randn(32, generator=draw, dtype=torch.float64).numpy() for _ in range(5)]
    curved = np.logspace(-2, 0, 32)
    for row, lr in enumerate((0.3, 0.1)):
        at = np.full(32, 10.0)
        for step in range(5):
            slope = curved * at + noise[step]
            assert norms[row, step] == pytest.approx(np.linalg.norm(slope))
            at = at - lr * float(factors[row, step]) * slope
        assert ends[row] == pytest.approx(0.5 * (curved * at**2).sum())


def test_adam_is_that_of_torch() -> None:
    problem = mlp(0, steps=6, adam=True)
    ends, norms = train(problem, torch.ones(1, 6).double(), torch.tensor([0.01]).double(), seed=3)
    weights = [torch.nn.Parameter(weight) for weight in problem.start(1)]
    optimizer = torch.optim.Adam(weights, lr=0.01, betas=(0.9, 0.99))
    draw = torch.Generator().manual_seed(3)
    for step in range(6):
        optimizer.zero_grad()
        problem.loss(weights, draw).sum().backward()
        total = sum(float(w.grad.abs().sum()) for w in weights if w.grad is not None)
        assert norms[0, step] == pytest.approx(total, rel=1e-5)
        optimizer.step()
    with torch.no_grad():
        assert ends[0] == pytest.approx(float(problem.judge(weights)), rel=1e-4)


def test_the_minimum_of_a_logistic_regression_is_one() -> None:
    problem = logistic(1, steps=2)
    (start,) = problem.start(1)
    at = start.requires_grad_()
    solver = torch.optim.LBFGS([at], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss = problem.judge([at]).sum()
        loss.backward()
        return loss

    solver.step(closure)
    assert problem.judge([at]).item() == pytest.approx(0, abs=1e-8)


def test_a_run_that_diverges_is_infinitely_bad() -> None:
    ends, _ = train(quadratic(0, steps=900), torch.ones(1, 900).double(), torch.tensor([9.0]).double(), 0)
    assert ends[0] == math.inf
