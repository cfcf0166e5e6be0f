"""Conjugate gradients for `(A + λI) d = −g` within a ball, with nothing but products by A."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from theodolite.core.errors import UseError

End = Literal["converged", "at the radius", "negative curvature", "most products"]
"""How a solve ended."""


@dataclass(frozen=True)
class Solution:
    """What conjugate gradients found."""

    step: Tensor
    """d, (P,)."""
    residual: float
    """‖(A + λI)d + g‖/‖g‖."""
    products: int
    """Products by A that were made."""
    end: End


def solve(
    product: Callable[[Tensor], Tensor],
    gradient: Tensor,
    *,
    shift: float,
    tolerance: float,
    most_products: int,
) -> Solution:
    """The step d that lowers `g·d + ½ dᵀ(A + λI)d`, of length γ = ‖g‖/λ at most.

    Plain conjugate gradients from d = 0, without a preconditioner. They end when the residual r is within
    `tolerance·‖g‖` and within `λ‖d‖`. The gradient that the quadratic promises after the step is
    `g + A d = −λd − r`: with the second, the part of it that is due to r is no larger than the one that an
    exact solve leaves.

    If A is positive semi-definite, no step is longer than γ. If it is not, then as in Steihaug's method:
    where the curvature along the next direction is not positive, or the iterate would leave the ball, d goes
    along that direction to the sphere of radius γ and ends there.

    Args:
        product: `v ↦ A v`, of vectors (P,).
        gradient: g, not zero.
        shift: λ, above 0.
        tolerance: of the residual, relative to ‖g‖.
        most_products: after as many, d is what there is then: it lowers the quadratic all the same.

    >>> matrix = torch.diag(torch.tensor([1.0, 3.0]))
    >>> found = solve(matrix.mv, torch.tensor([2.0, 4.0]), shift=1.0, tolerance=1e-6, most_products=9)
    >>> found.step.round(decimals=5), found.end, found.products
    (tensor([-1., -1.]), 'converged', 2)
    >>> away = solve((-matrix).mv, torch.tensor([3.0, 4.0]), shift=1.0, tolerance=1e-6, most_products=9)
    >>> away.step.norm(), away.end
    (tensor(5.), 'negative curvature')
    """
    step, residual = torch.zeros_like(gradient), -gradient
    start = norm = float(gradient.norm())
    radius, rounding = start / shift, 8 * torch.finfo(gradient.dtype).eps
    direction = residual.clone()
    for products in range(1, most_products + 1):
        applied = product(direction) + shift * direction
        curvature = float(torch.dot(direction, applied))
        if not math.isfinite(curvature):
            raise UseError(
                "a product with the curvature is not finite, so no step was made. Look at the batch and at "
                "the weights for very large numbers"
            )
        if curvature <= 0:
            return _ended(
                _to_sphere(step, direction, radius), residual, start, products, "negative curvature"
            )
        length = norm**2 / curvature
        moved = step + length * direction
        reached = float(moved.norm())
        # A little more than the radius may be rounding.
        if reached > radius * (1 + 1e-5):
            return _ended(_to_sphere(step, direction, radius), residual, start, products, "at the radius")
        step, residual = moved, residual - length * applied
        before, norm = norm, float(residual.norm())
        if norm <= max(min(tolerance * start, shift * reached), rounding * start):
            return _ended(step, residual, start, products, "converged")
        direction = residual + (norm / before) ** 2 * direction
    return _ended(step, residual, start, most_products, "most products")


def _ended(step: Tensor, residual: Tensor, start: float, products: int, end: End) -> Solution:
    return Solution(step, float(residual.norm()) / start, products, end)


def _to_sphere(step: Tensor, direction: Tensor, radius: float) -> Tensor:
    """`step + τ·direction` of length `radius`, with τ > 0."""
    along = float(torch.dot(step, direction))
    square = float(torch.dot(direction, direction))
    room = max(0.0, radius**2 - float(torch.dot(step, step)))
    tau = (math.sqrt(along**2 + square * room) - along) / square
    return step + tau * direction
