"""Sharpness of losses whose largest eigenvalue is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from theodolite.probes.curvature.sharpness import sharpness

from .explicit import explicit_of
from .matrices import Matrix, semicircle, with_spectrum
from .networks import case


def quadratic():
    x = torch.randn(300, 80).double()
    return nn.Linear(80, 1, bias=False).double(), nn.functional.mse_loss, (x, torch.ones(300, 1).double())


def test_of_a_quadratic_is_that_of_its_inputs():
    model, loss, batch = quadratic()
    found = sharpness(model, loss, batch, rtol=1e-6)
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(batch[0], 2) ** 2 * 2 / 300), rel=1e-6)
    assert found.converged


@pytest.mark.parametrize(("factor", "diverges"), [(0.98, False), (1.02, True)])
def test_gradient_descent_diverges_just_above_the_edge(factor, diverges):
    model, loss, (x, y) = quadratic()
    rate = factor * sharpness(model, loss, (x, y), rtol=1e-6).edge
    first = loss(model(x), y).item()
    for _ in range(1000):
        (slope,) = torch.autograd.grad(loss(model(x), y), model.weight)
        with torch.no_grad():
            model.weight -= rate * slope
    assert (loss(model(x), y).item() > first) == diverges


def test_default_tolerance_is_kept_and_bounds_hold():
    # At the edge of a bulk, where the next eigenvalue is 1 % away and may hide, within a factor of two.
    for seed in range(10):
        matrix = semicircle(300, seed=seed)
        found = sharpness(Matrix(matrix), seed=seed)
        truth = torch.linalg.eigvalsh(matrix)
        assert found.converged
        assert found.value == pytest.approx(float(truth[-1]), rel=2e-3)
        assert float((truth - found.value).abs().min()) <= found.residual


@pytest.mark.parametrize("name", ["layer norm", "tied"])
def test_of_networks_as_of_their_explicit_hessians(name):
    made = case(name)
    found = sharpness(made.model, made.loss, made.batch)
    truth = float(torch.linalg.eigvalsh(explicit_of(name).hessian)[-1])
    assert found.value == pytest.approx(truth, rel=1e-3)
    assert found.edge == pytest.approx(2 / truth, rel=1e-3)


def test_it_is_the_largest_not_the_largest_in_magnitude():
    found = sharpness(with_spectrum(torch.cat([torch.linspace(-9, 1, 99), torch.tensor([2.0])])))
    assert found.value == pytest.approx(2.0, rel=1e-3)


def test_without_a_positive_eigenvalue_every_step_is_safe():
    assert sharpness(with_spectrum(torch.linspace(-2, -1, 50))).edge == math.inf


def test_too_few_products_is_said():
    found = sharpness(Matrix(semicircle(500)), most_products=5)
    assert not found.converged
    assert found.products == 5
    assert "not converged" in str(found)


@pytest.mark.parametrize("seed", range(4))
def test_an_end_that_the_start_hardly_sees_is_not_passed_over(seed):
    """A hundredth of the start is along the largest eigenvalue: before it shows, the next one settles."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(200, generator=generator).double()
    others = torch.randn(200, 2, dtype=torch.float64, generator=generator)
    across, _ = torch.linalg.qr(torch.cat([start[:, None], others], 1))
    seen, hidden = across[:, 1] + across[:, 0], across[:, 2] + 0.01 * across[:, 0]
    seen -= (seen @ hidden) / hidden.square().sum() * hidden
    bulk = torch.diag(torch.linspace(-0.1, 0.1, 200).double())
    matrix = bulk + sum(
        value * torch.outer(one, one) / one.square().sum() for value, one in ((5.0, seen), (8.0, hidden))
    )
    exact = torch.linalg.eigvalsh(matrix)
    assert exact[-2] < 0.7 * exact[-1]
    assert sharpness(Matrix(matrix), seed=seed).value == pytest.approx(float(exact[-1]), rel=1e-2)
