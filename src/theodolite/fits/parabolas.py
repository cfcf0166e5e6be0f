"""Polynomials of low degree by least squares, their lowest points, and how noise moves these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from theodolite.fits.minimizing import Array


@dataclass(frozen=True)
class Polynomial:
    """A polynomial in `x − centre` through points, lowest power first."""

    centre: float
    coefficients: Array
    """(degree + 1,)."""
    fitted: Array
    measured: Array
    solve: Array
    """The matrix from measured values to coefficients: (degree + 1, n)."""

    def at(self, x: Array, coefficients: Array | None = None) -> Array:
        """Values at x (m,), for these or for other coefficients (…, degree + 1): (…, m)."""
        coefficients = self.coefficients if coefficients is None else coefficients
        return coefficients @ _powers(x - self.centre, coefficients.shape[-1])

    def refit(self, measured: Array) -> Array:
        """Coefficients for other values at the same places: (draws, n) -> (draws, degree + 1)."""
        return measured @ self.solve.T


def polynomial(x: Array, y: Array, *, degree: int) -> Polynomial:
    """Least squares.

    >>> curve = polynomial(np.array([0.0, 1.0, 2.0, 3.0]), np.array([4.0, 1.0, 0.0, 1.0]), degree=2)
    >>> float(optimum(curve.coefficients, curve.centre)[0].round(6))
    2.0
    """
    centre = float(x.mean())
    design = _powers(x - centre, degree + 1)
    solve: Array = np.linalg.pinv(design.T).astype(np.float64)
    coefficients = solve @ y
    return Polynomial(centre, coefficients, coefficients @ design, y, solve)


def optimum(coefficients: Array, centre: float) -> Array:
    """Where a parabola, or each of a stack of them, is lowest; nan where it has no lowest point."""
    coefficients = np.atleast_2d(coefficients)
    slope, bend = coefficients[:, 1], coefficients[:, 2]
    opens = bend > 0
    return np.where(opens, centre - slope / np.where(opens, 2 * bend, 1.0), np.nan)


def noise(curves: Sequence[Polynomial], draws: int, seed: int) -> list[Array]:
    """Log residuals of all the curves, drawn with replacement for each curve: (draws, n) each.

    Residuals are smaller than the noise, as the curve fits it in part; they are scaled up by
    `√(n/(n − degree − 1))`. A curve through all of its points has no residuals; if no curve has any, all is
    nan.
    """
    generator = np.random.default_rng(seed)
    pool = []
    for curve in curves:
        num, free = len(curve.measured), len(curve.measured) - len(curve.coefficients)
        if free > 0:
            pool.append(np.log(curve.measured / curve.fitted) * np.sqrt(num / free))
    residuals = np.concatenate(pool) if pool else np.full(1, np.nan)
    return [generator.choice(residuals, size=(draws, len(curve.measured))) for curve in curves]


def _powers(x: Array, num: int) -> Array:
    """1, x, x², …: (num, n)."""
    return np.stack([x**power for power in range(num)])
