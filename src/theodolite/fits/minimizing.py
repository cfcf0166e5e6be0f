"""Minimise Huber's loss of the log residuals from many starts, and for many draws of a bootstrap, by BFGS.

Every start and every draw is one row of an array, and all rows are searched together: with a handful of
unknowns most of the time is overhead of calls, of which that takes a hundredth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from theodolite.core.progress import Progress

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]
Objective = Callable[[Array, Indices], tuple[Array, Array]]
"""θ (rows, P) and which rows these are -> values (rows,) and gradients (rows, P)."""

DELTA = 1e-3
"""Beyond this log residual an error counts linearly. Real runs scatter more, so this is close to a median."""
REACHED = 1e-4
"""A start has reached the optimum if its objective is at most this much above it, relatively."""
RTOL = 1e-13
"""Relative change of the objective at which a search ends."""
RTOL_OF_DRAWS = 1e-9
"""The same in the bootstrap, where draws differ far more."""
AT_ONCE = 2_000_000
"""Most numbers in one array."""
MOST_STEPS = 500
MOST_TRIALS = 30
"""Lengths tried along one direction."""
DECREASE, CURVATURE = 1e-4, 0.9
"""Weak Wolfe conditions: fall by this share of what the slope promises, and end with this share of it."""
ROUNDING = 1e-15
"""A fall below this share of the objective cannot be told from rounding."""
PATIENCE = 3
"""Steps without progress after which a row has converged."""


@dataclass(frozen=True)
class Law:
    """One law on one set of points; θ is what the search moves."""

    evaluate: Callable[[Array], tuple[Array, Array]]
    """θ (rows, P) -> `log L̂` (rows, n) and its derivative (rows, P, n)."""
    constants: Callable[[Array], dict[str, Array]]
    """θ (…, P) -> the constants of the law by name, each (…)."""
    starts: Array
    """(number of starts, P)."""
    low: Array
    high: Array
    """Bounds of θ."""
    terms: tuple[str, ...]
    """The terms of the loss. The first entries of θ are the logarithms of their factors, so that the first
    rows of the derivative are the terms' shares of the loss."""
    bounded: Mapping[int, str]
    """By index in θ, the exponents that may end on a bound."""


@dataclass(frozen=True)
class Minimum:
    """The best of all starts."""

    theta: Array
    value: float
    num_starts: int
    num_reached: int


def objective(law: Law, log_loss: Array, weights: Array, theta: Array) -> tuple[Array, Array]:
    """`Σ_i w_i H(log L̂_i − log L_i)/δ` and its gradient; `H(r) = r²/2` inside δ, `δ(|r| − δ/2)` outside.

    For θ (rows, P) and weights (rows, n): values (rows,) and gradients (rows, P). Summed, not averaged, and
    in units of δ: a mean of such small numbers falls below a tolerance before it is at its minimum.
    """
    predicted, derivative = law.evaluate(theta)
    residual = predicted - log_loss
    clipped = np.minimum(np.maximum(residual, -DELTA), DELTA)
    pull = weights * clipped
    value = (pull * (residual - clipped / 2)).sum(1) / DELTA
    return value, np.einsum("rpn,rn->rp", derivative, pull) / DELTA


def minimize(law: Law, log_loss: Array) -> Minimum:
    """The lowest minimum that any start leads to, and how many starts led there."""
    num = len(law.starts)
    theta, value = _search_from(law, log_loss, law.starts, np.ones((num, len(log_loss))), RTOL)
    best = int(value.argmin())
    ceiling = value[best] * (1 + REACHED) + 1e-9 * len(log_loss)
    return Minimum(theta[best], float(value[best]), num, int((value <= ceiling).sum()))


def bootstrap(
    law: Law,
    log_loss: Array,
    optimum: Array,
    distinct: Indices,
    draws: int,
    seed: int,
    progress: Progress | None,
) -> Array:
    """θ of fits to points drawn with replacement, (draws, P).

    Each starts at the optimum and at a point near it. A draw with fewer distinct sizes than θ has entries is
    underdetermined, and is drawn again. `distinct` (n,) numbers the sizes.
    """
    generator = np.random.default_rng(seed)
    num, size = len(log_loss), len(optimum)
    needed = min(size, len(np.unique(distinct)))
    weights, starts = np.empty((draws, num)), np.empty((draws, 2, size))
    for index in range(draws):
        while True:
            drawn = generator.integers(num, size=num)
            if len(np.unique(distinct[drawn])) >= needed:
                break
        weights[index] = np.bincount(drawn, minlength=num)
        starts[index] = optimum, optimum + 0.2 * generator.standard_normal(size)
    found = []
    chunk = max(10, min(100, AT_ONCE // (2 * num * size)))
    for begin in range(0, draws, chunk):
        pair = starts[begin : begin + chunk]
        both = np.repeat(weights[begin : begin + chunk], 2, axis=0)
        theta, value = _search_from(law, log_loss, pair.reshape(-1, size), both, RTOL_OF_DRAWS)
        better = value.reshape(-1, 2).argmin(1)
        found.append(theta.reshape(-1, 2, size)[np.arange(len(pair)), better])
        if progress is not None:
            done = begin + len(pair)
            progress(f"bootstrap: {done} of {draws} draws", done / draws)
    return np.concatenate(found)


def _search_from(
    law: Law, log_loss: Array, starts: Array, weights: Array, rtol: float
) -> tuple[Array, Array]:
    return descend(
        lambda theta, rows: objective(law, log_loss, weights[rows], theta), starts, law.low, law.high, rtol
    )


def descend(objective: Objective, starts: Array, low: Array, high: Array, rtol: float) -> tuple[Array, Array]:
    """Minimise every row from its own start, inside `low ≤ θ ≤ high`: (θ, values).

    A row has converged when its objective falls by less than `rtol` of itself in three steps in a row, or its
    gradient is zero.

    >>> theta, value = descend(lambda x, rows: ((x**2).sum(1), 2 * x), np.array([[3.0, 4.0]]),
    ...                        np.array([-9.0, 1.0]), np.array([9.0, 9.0]), 1e-12)
    >>> abs(theta).round(6).tolist(), value.round(6).tolist()
    ([[0.0, 1.0]], [1.0])
    """
    search = _Search(objective, starts, low, high, rtol)
    rows = search.begin(np.arange(len(starts)))
    while len(rows):
        ended = search.try_length(rows)
        if ended.any():
            search.move(rows[ended])
            rows = np.concatenate([rows[~ended], search.begin(rows[ended])])
    return search.theta, search.value


class _Search:
    """The state of all rows. None waits for another: each evaluation is the next trial of every row."""

    def __init__(self, objective: Objective, starts: Array, low: Array, high: Array, rtol: float) -> None:
        self.objective, self.low, self.high, self.rtol = objective, low, high, rtol
        self.theta = np.clip(starts, low, high)
        num, size = self.theta.shape
        self.value, self.gradient = objective(self.theta, np.arange(num))
        self.inverse = np.broadcast_to(np.eye(size), (num, size, size)).copy()
        self.scaled = np.zeros(num, dtype=bool)
        self.steps, self.idle, self.trials = np.zeros((3, num), dtype=np.intp)
        # Of the step that is searched for: where it may go, its length, bounds of it, and the best so far.
        self.free = np.ones((num, size), dtype=bool)
        self.along = np.zeros((num, size))
        self.step, self.shortest, self.longest = np.zeros((3, num))
        self.new, self.new_value, self.new_gradient = (
            each.copy() for each in (self.theta, self.value, self.gradient)
        )

    def begin(self, rows: Indices) -> Indices:
        """Choose a direction and a first length; without the rows that have converged."""
        at, slope = self.theta[rows], self.gradient[rows]
        free = ~((at <= self.low) & (slope > 0) | (at >= self.high) & (slope < 0))  # not held by a bound
        left = np.abs(np.where(free, slope, 0.0)).max(1)
        keep = (left > 1e-9) & (self.idle[rows] < PATIENCE) & (self.steps[rows] < MOST_STEPS)
        rows, at, slope, free = rows[keep], at[keep], slope[keep], free[keep]
        self.free[rows] = free
        self.along[rows] = _direction(self.inverse[rows], slope, free)
        self.step[rows] = np.where(self.scaled[rows], 1.0, np.minimum(1.0, 1 / np.abs(slope).sum(1)))
        self.shortest[rows], self.longest[rows], self.trials[rows] = 0.0, np.inf, 0
        self.new[rows], self.new_value[rows], self.new_gradient[rows] = at, self.value[rows], slope
        return rows

    def try_length(self, rows: Indices) -> Flags:
        """Evaluate each row at its length, which is then doubled or bisected. Which rows have ended?

        Those that meet the weak Wolfe conditions, and those where no length does.
        """
        at, value, step = self.theta[rows], self.value[rows], self.step[rows]
        tried = np.clip(at + step[:, None] * self.along[rows], self.low, self.high)
        found, slope = self.objective(tried, rows)
        moved = tried - at
        promised = (self.gradient[rows] * moved).sum(1)
        falls = found <= value + DECREASE * promised
        bends = (slope * moved).sum(1) >= CURVATURE * promised
        better = rows[falls]  # the best so far, should the trials run out
        self.new[better], self.new_value[better], self.new_gradient[better] = (
            each[falls] for each in (tried, found, slope)
        )
        longest = np.where(falls, self.longest[rows], step)
        shortest = np.where(falls & ~bends, step, self.shortest[rows])
        self.step[rows] = np.where(np.isfinite(longest), (shortest + longest) / 2, 2 * step)
        self.longest[rows], self.shortest[rows] = longest, shortest
        self.trials[rows] += 1
        told = np.abs(promised) > ROUNDING * np.abs(value)
        return falls & bends | ~told | (self.trials[rows] >= MOST_TRIALS)

    def move(self, rows: Indices) -> None:
        """Take the step that was found; none if there is none."""
        value, new_value, free = self.value[rows], self.new_value[rows], self.free[rows]
        moved, change = self.new[rows] - self.theta[rows], self.new_gradient[rows] - self.gradient[rows]
        _update(self.inverse, self.scaled, rows, np.where(free, moved, 0.0), np.where(free, change, 0.0))
        progress = value - new_value > self.rtol * np.maximum(np.abs(value), 1e-12)
        self.idle[rows] = np.where(progress, 0, self.idle[rows] + 1)
        self.idle[rows[(moved == 0).all(1)]] = PATIENCE  # the next search would be the same
        self.steps[rows] += 1
        self.theta[rows], self.value[rows], self.gradient[rows] = (
            each[rows] for each in (self.new, self.new_value, self.new_gradient)
        )


def _direction(inverse: Array, gradient: Array, free: Flags) -> Array:
    """The quasi-Newton direction; the negative gradient where that is no descent direction."""
    down = -np.where(free, gradient, 0.0)
    along = np.where(free, (inverse * down[:, None, :]).sum(2), 0.0)
    leads_down = (along * gradient).sum(1) < 0
    return np.where(leads_down[:, None], along, down)


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
