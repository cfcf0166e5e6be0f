"""Polynomials of matrices against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch

from theodolite.optimizers.orthogonal import newton_schulz, polar


def _polynomial(sigma: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    return sigma


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9), (1, 5), (3, 9, 4), (2, 3, 4, 9)])
def test_newton_schulz_is_its_polynomial_of_the_singular_values(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    norm = sigma.square().sum(-1, keepdim=True).sqrt()
    expected = (u * _polynomial(sigma / (norm + 0.1), 4)[..., None, :]) @ vh
    torch.testing.assert_close(newton_schulz(x, steps=4, eps=0.1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 6), (30, 8), (8, 30), (3, 20, 10)])
def test_the_polar_factor_is_that_of_the_singular_value_decomposition(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    sigma = sigma.clamp_min(0.01 * sigma.max())
    torch.testing.assert_close(polar((u * sigma[..., None, :]) @ vh), u @ vh, rtol=0, atol=1e-6)


def test_nothing_becomes_nothing() -> None:
    zero = torch.zeros(2, 3, 4)
    assert newton_schulz(zero, steps=5, eps=1e-7).eq(0).all()
    assert polar(zero).eq(0).all()


def test_the_argument_is_left_alone() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    before = x.clone()
    newton_schulz(x, steps=5, eps=1e-7)
    polar(x)
    assert torch.equal(x, before)
