"""BFGS for many small problems at once: every start and every draw of a bootstrap is one row.

With a handful of unknowns the work is in the calls, not in the numbers: a thousand searches that go in step
take a hundredth of the calls of a thousand searches one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from theodolite.fits.result import Array, Flags, Indices

Objective = Callable[[Array, Indices], tuple[Array, Array]]
"""θ (rows, P) and which rows these are -> values (rows,) and gradients (rows, P)."""

MOST_STEPS = 500
MOST_TRIALS = 30
"""Lengths tried along one direction."""
DECREASE, CURVATURE = 1e-4, 0.9
"""Weak Wolfe conditions: fall by this share of what the slope promises, and end with this share of it."""
ROUNDING = 1e-15
"""A fall below this share of the objective cannot be told from rounding."""
PATIENCE = 3
"""Steps of no progress after which a row has arrived."""


def descend(
    objective: Objective, starts: Array, low: Array, high: Array, tolerance: float
) -> tuple[Array, Array]:
    """Minimise every row from its own start, inside `low ≤ θ ≤ high`: (θ, values).

    A row has arrived when its objective falls by less than `tolerance` of itself in three steps running, or
    when nothing is left of its gradient.

    >>> theta, value = descend(lambda x, rows: ((x**2).sum(1), 2 * x), np.array([[3.0, 4.0]]),
    ...                        np.array([-9.0, 1.0]), np.array([9.0, 9.0]), 1e-12)
    >>> abs(theta).round(6).tolist(), value.round(6).tolist()
    ([[0.0, 1.0]], [1.0])
    """
    theta = np.clip(starts, low, high)
    num, size = theta.shape
    value, gradient = objective(theta, np.arange(num))
    inverse = np.broadcast_to(np.eye(size), (num, size, size)).copy()
    scaled = np.zeros(num, dtype=bool)
    idle = np.zeros(num, dtype=np.intp)
    rows = np.arange(num)
    for _ in range(MOST_STEPS):
        free = ~_held(theta[rows], gradient[rows], low, high)
        left = np.abs(np.where(free, gradient[rows], 0.0)).max(1)
        rows, free = rows[keep := (left > 1e-9) & (idle[rows] < PATIENCE)], free[keep]
        if not len(rows):
            break
        along = _direction(inverse[rows], gradient[rows], free)
        first = np.where(scaled[rows], 1.0, np.minimum(1.0, 1 / np.abs(gradient[rows]).sum(1)))
        new, new_value, new_gradient = _search(
            objective, rows, theta[rows], value[rows], gradient[rows], along, first, low, high
        )
        moved, change = new - theta[rows], new_gradient - gradient[rows]
        _update(inverse, scaled, rows, np.where(free, moved, 0.0), np.where(free, change, 0.0))
        progress = value[rows] - new_value > tolerance * np.maximum(np.abs(value[rows]), 1e-12)
        idle[rows] = np.where(progress, 0, idle[rows] + 1)
        idle[rows[(moved == 0).all(1)]] = PATIENCE  # the next search would be the same
        theta[rows], value[rows], gradient[rows] = new, new_value, new_gradient
    return theta, value


def _held(theta: Array, gradient: Array, low: Array, high: Array) -> Flags:
    """What lies on a bound and would leave it outwards."""
    return ((theta <= low) & (gradient > 0)) | ((theta >= high) & (gradient < 0))


def _direction(inverse: Array, gradient: Array, free: Flags) -> Array:
    """Where the quadratic model has its minimum; straight down where that would lead up."""
    down = -np.where(free, gradient, 0.0)
    along = np.where(free, (inverse * down[:, None, :]).sum(2), 0.0)
    leads_down = (along * gradient).sum(1) < 0
    return np.where(leads_down[:, None], along, down)


def _search(
    objective: Objective,
    rows: Indices,
    theta: Array,
    value: Array,
    gradient: Array,
    along: Array,
    step: Array,
    low: Array,
    high: Array,
) -> tuple[Array, Array, Array]:
    """A length that meets the weak Wolfe conditions, by doubling and halving; stays where there is none."""
    new, new_value, new_gradient = theta.copy(), value.copy(), gradient.copy()
    shortest, longest = np.zeros(len(rows)), np.full(len(rows), np.inf)
    going = np.arange(len(rows))
    for _ in range(MOST_TRIALS):
        tried = np.clip(theta[going] + step[going, None] * along[going], low, high)
        found, slope = objective(tried, rows[going])
        moved = tried - theta[going]
        promised = (gradient[going] * moved).sum(1)
        falls = found <= value[going] + DECREASE * promised
        bends = (slope * moved).sum(1) >= CURVATURE * promised
        better = going[falls]  # the best so far, should the trials run out
        new[better], new_value[better], new_gradient[better] = tried[falls], found[falls], slope[falls]
        longest[going] = np.where(falls, longest[going], step[going])
        shortest[going] = np.where(falls & ~bends, step[going], shortest[going])
        told = np.abs(promised) > ROUNDING * np.abs(value[going])
        going = going[~(falls & bends) & told]
        if not len(going):
            break
        between = (shortest[going] + longest[going]) / 2
        step[going] = np.where(np.isfinite(longest[going]), between, 2 * step[going])
    return new, new_value, new_gradient


def _update(inverse: Array, scaled: Flags, rows: Indices, moved: Array, change: Array) -> None:
    """`H ← (I − ρsyᵀ)H(I − ρysᵀ) + ρssᵀ`, ρ = 1/yᵀs, where the curvature yᵀs is positive."""
    curvature = (moved * change).sum(1)
    lengths = np.sqrt((moved**2).sum(1) * (change**2).sum(1))
    curved = curvature > 1e-10 * lengths
    rows, s, y, curvature = rows[curved], moved[curved], change[curved], curvature[curved]
    fresh = rows[~scaled[rows]]
    inverse[fresh] *= (curvature / (y**2).sum(1))[~scaled[rows]][:, None, None]
    scaled[fresh] = True
    rho = (1 / curvature)[:, None, None]
    h = inverse[rows]
    hy = (h * y[:, None, :]).sum(2)
    outer = hy[:, :, None] * s[:, None, :]
    yhy = (y * hy).sum(1)[:, None, None]
    inverse[rows] = (
        h - rho * (outer + outer.swapaxes(1, 2)) + rho * (1 + rho * yhy) * s[:, :, None] * s[:, None, :]
    )
