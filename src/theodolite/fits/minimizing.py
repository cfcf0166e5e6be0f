"""Minimise Huber's loss of the log residuals by variable projection, for a law and for draws of a bootstrap.

The loss is a sum of terms `c_j φ_j(x; ψ)`: linear in its factors c ≥ 0, with a few shape constants ψ such as
exponents. At each ψ of a coarse grid the best factors are found; from there all constants move together.

All starts and all draws are rows of one array, and are searched together: with a handful of unknowns most of
the time is overhead of calls.
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

DELTA = 1e-3
"""Beyond this log residual an error counts linearly. Real runs scatter more, so this is close to a median."""
REACHED = 1e-4
"""A start has reached the optimum if its objective is at most this much above it, relatively."""
APART = 5e-3
"""Two searches of a draw that end further apart than this share may be in two minima."""
RTOL = 1e-13
"""Relative change of the objective below which a step is no progress."""
RTOL_OF_DRAWS = 1e-6
"""The same in the bootstrap, where draws differ far more."""
RTOL_OF_FACTORS = 1e-6
"""The same for the factors at given exponents, from where all constants move on."""
PATIENCE = 6
"""Steps without progress, or refused at a damping above 1, after which a row has converged."""
MOST_STEPS, MOST_STEPS_OF_DRAWS, MOST_STEPS_OF_FACTORS = 3000, 150, 50
SOFTER, HARDER = 1 / 5, 8.0
"""Factors on the damping after a step that was taken, and after one that was refused."""
LEAST_DAMPING, MOST_DAMPING = 1e-4, 1e6
RIDGE = 1e-12
"""Added to the diagonal of the normalised Hessian, so that constants that look alike have a step."""
AT_ONCE = 2_000_000
"""Most numbers in one array."""


@dataclass(frozen=True)
class Law:
    """One law on one set of points; θ is what the search moves: the factors of the terms, then the shape."""

    evaluate: Callable[[Array], tuple[Array, Array]]
    """θ (rows, P) -> `log L̂` (rows, n) and its derivative (rows, P, n)."""
    constants: Callable[[Array], dict[str, Array]]
    """θ (…, P) -> the constants of the law by name, each (…)."""
    starts: Array
    """A coarse grid of the shape, (number of starts, P − number of terms)."""
    low: Array
    high: Array
    """Bounds of θ."""
    terms: tuple[str, ...]
    """The terms of the loss. The first entries of θ are their factors."""
    bounded: Mapping[int, str]
    """By index in θ, the exponents that may end on a bound."""

    @property
    def num_constants(self) -> int:
        """P."""
        return len(self.low)


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
    value, pull, _ = _huber(predicted - log_loss, weights)
    return value, np.einsum("rpn,rn->rp", derivative, pull)


def minimize(law: Law, log_loss: Array) -> Minimum:
    """The lowest minimum that any start leads to, and how many starts led there."""
    starts = with_best_factors(law, log_loss, law.starts)
    weights = np.ones((len(starts), len(log_loss)))
    theta, value = descend(law, log_loss, weights, starts, RTOL)
    best = int(value.argmin())
    ceiling = value[best] * (1 + REACHED) + 1e-9 * len(log_loss)
    return Minimum(theta[best], float(value[best]), len(starts), int((value <= ceiling).sum()))


def with_best_factors(law: Law, log_loss: Array, shapes: Array) -> Array:
    """For each shape (rows, …) the θ with the best factors, (rows, P)."""
    num_terms = len(law.terms)
    even = np.full((len(shapes), num_terms), np.exp(log_loss.mean()) / num_terms)
    weights = np.ones((len(shapes), len(log_loss)))
    begin = np.concatenate([even, shapes], axis=1)
    return descend(
        law, log_loss, weights, begin, RTOL_OF_FACTORS, only=num_terms, most_steps=MOST_STEPS_OF_FACTORS
    )[0]


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

    Each starts at the optimum and in the middle of the law's grid; where these two end differently, from the
    whole grid. A draw with fewer distinct sizes than θ has entries is
    underdetermined, and is drawn again. `distinct` (n,) numbers the sizes.
    """
    generator = np.random.default_rng(seed)
    num, size = len(log_loss), law.num_constants
    needed = min(size, len(np.unique(distinct)))
    weights = np.empty((draws, num))
    for index in range(draws):
        while True:
            drawn = generator.integers(num, size=num)
            if len(np.unique(distinct[drawn])) >= needed:
                break
        weights[index] = np.bincount(drawn, minlength=num)
    every = np.concatenate([optimum[None], with_best_factors(law, log_loss, law.starts)])
    pair = every[[0, 1 + len(law.starts) // 2]]
    found = []
    chunk = max(10, min(100, AT_ONCE // (len(pair) * num * size)))
    for begin in range(0, draws, chunk):
        theta, value = _from_each(law, log_loss, weights[begin : begin + chunk], pair)
        some = np.flatnonzero(value.max(1) > value.min(1) * (1 + APART) + 1e-9 * num)
        best = theta[np.arange(len(theta)), value.argmin(1)]
        if len(some):
            theta, value = _from_each(law, log_loss, weights[begin + some], every)
            best[some] = theta[np.arange(len(some)), value.argmin(1)]
        found.append(best)
        if progress is not None:
            done = begin + len(best)
            progress(f"bootstrap: {done} of {draws} draws", done / draws)
    return np.concatenate(found)


def _from_each(law: Law, log_loss: Array, weights: Array, starts: Array) -> tuple[Array, Array]:
    """For each row of weights the end of the search from each start: θ (rows, starts, P), values."""
    rows, num = len(weights), len(starts)
    repeated = np.repeat(weights, num, axis=0)
    theta, value = descend(
        law,
        log_loss,
        repeated,
        np.tile(starts, (rows, 1)),
        RTOL_OF_DRAWS,
        most_steps=MOST_STEPS_OF_DRAWS,
    )
    return theta.reshape(rows, num, -1), value.reshape(rows, num)


def descend(
    law: Law,
    log_loss: Array,
    weights: Array,
    starts: Array,
    rtol: float,
    *,
    only: int | None = None,
    most_steps: int = MOST_STEPS,
) -> tuple[Array, Array]:
    """Minimise every row from its own start, within the bounds: (θ, values).

    Each step solves `(JᵀDJ + S)s = −g`, where D is Huber's second derivative, 1 inside δ and 0 outside, plus
    a damping times `δ/|r|` outside. At damping 1, without S, these are iteratively reweighted least squares,
    a bound of the objective from above, so some step goes down. S approximates the second derivatives of the
    law by what J changed in the steps before (a symmetric update of rank one), which matters where few points
    are inside δ. A row has converged when six steps in a row bring less than `rtol` of its objective. `only`
    the first entries of θ are moved, if given.
    """
    theta, num = np.clip(starts, law.low, law.high), len(starts)
    size = theta.shape[1]
    moving = np.arange(size) < (size if only is None else only)
    predicted, derivative = law.evaluate(theta)
    residual = predicted - log_loss
    value = _huber(residual, weights)[0]
    bend = np.zeros((num, size, size))
    damping, idle, rows = np.ones(num), np.zeros(num, dtype=np.intp), np.arange(num)
    for _ in range(most_steps):
        at, counts = theta[rows], weights[rows]
        along = _step(law, at, residual[rows], derivative[rows], counts, damping[rows], bend[rows], moving)
        tried = np.clip(at + along, law.low, law.high)
        predicted, slopes = law.evaluate(tried)
        off = predicted - log_loss
        found, pull, _ = _huber(off, counts)
        before = value[rows]
        progress = before - found > rtol * np.maximum(before, 1e-12)
        falls = found < before
        down = rows[falls]
        turned = np.einsum("rpn,rn->rp", slopes[falls] - derivative[down], pull[falls])
        _update(bend, down, (tried - at)[falls], turned)
        theta[down], residual[down], derivative[down], value[down] = (
            each[falls] for each in (tried, off, slopes, found)
        )
        damping[rows] = np.clip(damping[rows] * np.where(falls, SOFTER, HARDER), LEAST_DAMPING, MOST_DAMPING)
        idle[rows] = np.where(progress, 0, idle[rows] + (falls | (damping[rows] > 1)))
        rows = rows[idle[rows] < PATIENCE]
        if not len(rows):
            break
    return theta, value


def _update(bend: Array, rows: Indices, moved: Array, turned: Array) -> None:
    """`S ← S + vvᵀ/vᵀs` with `v = t − Ss`, so that S then takes the step s to the change t it made."""
    missing = turned - (bend[rows] * moved[:, None, :]).sum(2)
    along = (missing * moved).sum(1)
    told = np.abs(along) > 1e-8 * np.sqrt((missing**2).sum(1) * (moved**2).sum(1))
    missing, along = missing[told], along[told]
    bend[rows[told]] += missing[:, :, None] * missing[:, None, :] / along[:, None, None]


def _huber(residual: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Values (rows,), derivatives by the residuals (rows, n), and where these are inside δ."""
    clipped = np.minimum(np.maximum(residual, -DELTA), DELTA)
    pull = weights * clipped / DELTA
    return (pull * (residual - clipped / 2)).sum(1), pull, clipped == residual


def _step(
    law: Law,
    at: Array,
    residual: Array,
    derivative: Array,
    weights: Array,
    damping: Array,
    bend: Array,
    moving: Flags,
) -> Array:
    """The damped Newton step of each row, without S where that is no descent; zero for what a bound holds."""
    _, pull, inside = _huber(residual, weights)
    gradient = np.einsum("rpn,rn->rp", derivative, pull)
    held = (at <= law.low) & (gradient > 0) | (at >= law.high) & (gradient < 0) | ~moving
    outside = damping[:, None] * DELTA / np.maximum(np.abs(residual), DELTA)
    curvature = weights * np.where(inside, 1.0, outside) / DELTA
    hessian = (derivative * curvature[:, None]) @ derivative.swapaxes(1, 2)
    scale = np.sqrt(np.einsum("rpp->rp", hessian))
    scale = np.where(held | (scale == 0), 1.0, scale)
    free = ~held / scale
    both = free[:, :, None] * free[:, None, :]
    hessian *= both
    diagonal = np.einsum("rpp->rp", hessian)  # a view
    diagonal += RIDGE + 1e-6 * damping[:, None] + held
    down = -(gradient * free)[:, :, None]
    step = np.linalg.solve(hessian, down)
    bent = np.linalg.solve(hessian + bend * both, down)
    descends = (bent * down).sum((1, 2)) > 0
    return free * np.where(descends[:, None, None], bent, step)[:, :, 0]
