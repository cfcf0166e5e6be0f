"""Sharpness of losses whose largest eigenvalue is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from theodolite.probes.second_order.operator import hessian
from theodolite.probes.second_order.sharpness import sharpness

from .explicit import explicit_of
from .matrices import Matrix, semicircle, with_spectrum
from .networks import case


def quadratic():
    x = torch.randn(300, 80).double()
    return nn.Linear(80, 1, bias=False).double(), nn.functional.mse_loss, (x, torch.ones(300, 1).double())


def test_of_a_quadratic_is_that_of_its_inputs():
    model, loss, batch = quadratic()
    found = sharpness(model, loss, batch, tolerance=1e-6)
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(batch[0], 2) ** 2 * 2 / 300), rel=1e-6)
    assert found.converged


@pytest.mark.parametrize(("factor", "diverges"), [(0.98, False), (1.02, True)])
def test_gradient_descent_diverges_just_above_the_edge(factor, diverges):
    model, loss, (x, y) = quadratic()
    rate = factor * sharpness(model, loss, (x, y), tolerance=1e-6).edge
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


def test_an_end_that_the_start_hardly_sees_is_not_passed_over():
    """Ten large eigenvalues far apart, as of a network on few rows: after six products one looks settled."""
    batch = torch.randn(16, 12, dtype=torch.float64), torch.randint(10, (16,))
    for seed in range(8):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10)).double()
        operator = hessian(model, nn.functional.cross_entropy, batch)
        exact = torch.linalg.eigvalsh(operator @ torch.eye(operator.size, dtype=torch.float64))[-1]
        assert sharpness(operator, seed=seed).value == pytest.approx(float(exact), rel=1e-2)
