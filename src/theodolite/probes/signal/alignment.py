"""Do the mean gradients of two independent samples point the same way?

`v` is the gradient of one unit's loss by the stream, with mean `μ` and covariance `Σ`. The mean over n units
chooses a direction, and the mean over m others judges it: the direction is seen to fail if `⟨v̄_n, v̄_m⟩ ≤ 0`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy.special import stdtrit
from torch import Tensor

from theodolite.core.errors import UseError


class Interval(NamedTuple):
    """A mean, and the ends of a two-sided interval for it."""

    mean: float
    low: float
    high: float


def alignment_bound(n: int, m: int, norm_mu: float, lambda_max: float, trace: float) -> float:
    """At most how likely two independent mean gradients fail to align (Theorem 5 on depth expansion).

        P(⟨v̄_n, v̄_m⟩ ≤ 0) ≤ 4λ/(n‖μ‖²) + 4λ/(m‖μ‖²) + 4λ·trΣ/(nm‖μ‖⁴)

    λ is the largest eigenvalue of Σ (the paper's `Cσ²`). It is Chebyshev's inequality, once for each sample,
    and so holds for any distribution. It is a bound only with the true `μ` and `Σ`: with estimates of them it
    is a diagnostic. A value of 1 says nothing.

    Args:
        n: units that choose the direction.
        m: units that judge it.
        norm_mu: `‖μ‖`.
        lambda_max: λ.
        trace: `trΣ`.

    >>> alignment_bound(1000, 1000, norm_mu=1.0, lambda_max=1.0, trace=100.0)
    0.0084
    >>> alignment_bound(10, 10, norm_mu=0.1, lambda_max=1.0, trace=100.0)
    1.0
    """
    if n < 1 or m < 1:
        raise UseError(f"n = {n} and m = {m}: both samples need at least one unit")
    for name, value in (("norm_mu", norm_mu), ("lambda_max", lambda_max), ("trace", trace)):
        if not (math.isfinite(value) and value >= 0):
            raise UseError(f"{name} is {value}: it is a finite number, not below 0")
    if lambda_max == 0:
        return 0.0 if norm_mu > 0 else 1.0
    if norm_mu == 0:
        return 1.0
    noise = lambda_max / norm_mu / norm_mu
    bound = 4 * noise * (1 / n + 1 / m + trace / norm_mu / norm_mu / n / m)
    return min(1.0, bound)


def mean_interval(values: Tensor, *, level: float = 0.95) -> Interval:
    """Student's t interval for the mean of independent values, one for each unit.

    With `values` the products `⟨v̄_n, v_u⟩` of a fixed direction with units that had no part in it, it is an
    interval for the alignment `⟨v̄_n, μ⟩`, and asks nothing of the direction.

    >>> import torch
    >>> mean, low, high = mean_interval(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> print(f"{mean:.2f} from {low:.2f} to {high:.2f}")
    2.50 from 0.45 to 4.55
    """
    flat = values.detach().double().flatten()
    if flat.numel() < 2:
        raise UseError(f"{flat.numel()} unit(s) have no spread: an interval for a mean needs at least 2")
    if not 0 < level < 1:
        raise UseError(f"level is {level}: it lies between 0 and 1, as 0.95")
    mean = float(flat.mean())
    error = float(flat.std()) / math.sqrt(flat.numel())
    reach = float(stdtrit(flat.numel() - 1, (1 + level) / 2)) * error
    return Interval(mean, mean - reach, mean + reach)
