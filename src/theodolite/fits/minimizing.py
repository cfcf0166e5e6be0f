"""The search: Huber's loss of the log residuals, summed, from many starts; and the bootstrap around it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theodolite.core.progress import Progress
from theodolite.fits.descending import descend
from theodolite.fits.laws import Law
from theodolite.fits.result import Array, Indices

DELTA = 1e-3
"""Beyond this log residual an error counts linearly. Real runs scatter more, so this is close to a median."""
REACHED = 1e-4
"""A start has reached the optimum if its objective is at most this much above it, relatively."""
TOLERANCE = 1e-13
"""Relative change of the objective at which a search ends."""
TOLERANCE_OF_DRAWS = 1e-9
"""The same in the bootstrap, whose draws differ by far more than this leaves open."""
AT_ONCE = 2_000_000
"""Numbers that a search in step may hold in one array."""


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


def minimize(law: Law, log_loss: Array, *, starts: Array | None = None) -> Minimum:
    """The lowest minimum that any start leads to, and how many starts led there."""
    starts = law.starts if starts is None else starts
    theta, value = _descend(law, log_loss, starts, np.ones((len(starts), len(log_loss))), TOLERANCE)
    best = int(value.argmin())
    ceiling = value[best] * (1 + REACHED) + 1e-9 * len(log_loss)
    return Minimum(theta[best], float(value[best]), len(starts), int((value <= ceiling).sum()))


def bootstrap(
    law: Law,
    log_loss: Array,
    optimum: Array,
    *,
    distinct: Indices,
    draws: int,
    seed: int,
    progress: Progress | None,
) -> Array:
    """θ of fits to points drawn with replacement, (draws, P).

    Each begins at the optimum and at a place near it. A draw with fewer distinct sizes than θ has entries
    could be fitted in many ways, and is drawn again. `distinct` (n,) numbers the sizes.
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
        theta, value = _descend(law, log_loss, pair.reshape(-1, size), both, TOLERANCE_OF_DRAWS)
        better = value.reshape(-1, 2).argmin(1)
        found.append(theta.reshape(-1, 2, size)[np.arange(len(pair)), better])
        if progress is not None:
            done = begin + len(pair)
            progress(f"bootstrap: {done} of {draws} draws", done / draws)
    return np.concatenate(found)


def on_bounds(law: Law, theta: Array) -> tuple[str, ...]:
    """The exponents that ended on a bound of the search."""
    near = np.minimum(theta - law.low, law.high - theta) < 1e-6
    return tuple(name for place, name in law.bounded.items() if near[place])


def _descend(
    law: Law, log_loss: Array, starts: Array, weights: Array, tolerance: float
) -> tuple[Array, Array]:
    def many(theta: Array, rows: Indices) -> tuple[Array, Array]:
        return objective(law, log_loss, weights[rows], theta)

    return descend(many, starts, law.low, law.high, tolerance)
