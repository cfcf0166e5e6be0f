"""The search: Huber's loss of the log residuals, summed, by L-BFGS from many starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theodolite.fits.fit import Array, Progress
from theodolite.fits.laws import Law

DELTA = 1e-3
"""Beyond this log residual an error counts linearly. Real runs scatter more, so this is close to a median."""
REACHED = 1e-4
"""A start has reached the optimum if its objective is at most this much above it, relatively."""


@dataclass(frozen=True)
class Minimum:
    """The best of all starts."""

    theta: Array
    value: float
    num_starts: int
    num_reached: int


def objective(law: Law, log_loss: Array, weights: Array, theta: Array) -> tuple[float, Array]:
    """`Σ_i w_i H(log L̂_i − log L_i)/δ` and its gradient; `H(r) = r²/2` inside δ, `δ(|r| − δ/2)` outside.

    Summed, not averaged, and in units of δ: a mean of such small numbers falls below the tolerances of an
    optimizer long before it is at its minimum.
    """
    predicted, derivative = law.evaluate(theta)
    residual = predicted - log_loss
    clipped = np.clip(residual, -DELTA, DELTA)
    value = float(weights @ (clipped * (residual - clipped / 2))) / DELTA
    return value, derivative @ (weights * clipped) / DELTA


def minimize(
    law: Law, log_loss: Array, *, starts: Array | None = None, weights: Array | None = None
) -> Minimum:
    """The lowest minimum that any start leads to, and how many starts led there."""
    weights = np.ones_like(log_loss) if weights is None else weights
    found = [_descend(law, log_loss, weights, start) for start in (law.starts if starts is None else starts)]
    best, theta = min(found, key=lambda pair: pair[0])
    ceiling = best * (1 + REACHED) + 1e-9 * len(log_loss)
    return Minimum(theta, best, len(found), sum(value <= ceiling for value, _ in found))


def bootstrap(
    law: Law,
    log_loss: Array,
    optimum: Array,
    *,
    distinct: Array,
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
    found = np.empty((draws, size))
    for index in range(draws):
        while True:
            drawn = generator.integers(num, size=num)
            if len(np.unique(distinct[drawn])) >= needed:
                break
        weights = np.bincount(drawn, minlength=num).astype(np.float64)
        beside = np.clip(optimum + 0.2 * generator.standard_normal(size), law.low, law.high)
        found[index] = minimize(law, log_loss, starts=np.stack([optimum, beside]), weights=weights).theta
        if progress is not None and index % 10 == 9:
            progress(f"bootstrap: {index + 1} of {draws} draws", (index + 1) / draws)
    return found


def on_bounds(law: Law, theta: Array) -> tuple[str, ...]:
    """The exponents that ended on a bound of the search."""
    near = np.minimum(theta - law.low, law.high - theta) < 1e-6
    return tuple(name for place, name in law.bounded.items() if near[place])


def _descend(law: Law, log_loss: Array, weights: Array, start: Array) -> tuple[float, Array]:
    from scipy import optimize

    result = optimize.minimize(
        lambda theta: objective(law, log_loss, weights, theta),
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=list(zip(law.low, law.high, strict=True)),
        options={"maxiter": 1000, "maxfun": 4000, "ftol": 1e-13, "gtol": 1e-8, "maxcor": 20},
    )
    return float(result.fun), np.asarray(result.x)
