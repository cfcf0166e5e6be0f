"""Polynomials of low degree by least squares, their lowest points, and how noise moves these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.polynomial.polynomial import polyvander

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
        return coefficients @ polyvander(x - self.centre, coefficients.shape[-1] - 1).T

    def refit(self, measured: Array) -> Array:
        """Coefficients for other values at the same places: (draws, n) -> (draws, degree + 1)."""
        return measured @ self.solve.T

    def lowest(self, coefficients: Array) -> Array:
        """Where parabolas with these coefficients (…, 3) are lowest; nan where there is no lowest point."""
        slope, bend = coefficients[..., 1], coefficients[..., 2]
        opens = bend > 0
        return np.where(opens, self.centre - slope / np.where(opens, 2 * bend, 1.0), np.nan)


def polynomial(x: Array, y: Array, *, degree: int) -> Polynomial:
    """Least squares.

    >>> curve = polynomial(np.array([0.0, 1.0, 2.0, 3.0]), np.array([4.0, 1.0, 0.0, 1.0]), degree=2)
    >>> float(curve.lowest(curve.coefficients).round(6))
    2.0
    """
    centre = float(x.mean())
    design = polyvander(x - centre, degree)
    solve: Array = np.linalg.pinv(design).astype(np.float64)
    coefficients = solve @ y
    return Polynomial(centre, coefficients, design @ coefficients, y, solve)


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
