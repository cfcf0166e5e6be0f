"""What a sample of gradients says: alignment of two means, covariance of channels, trust in Student's t.

`v` is the gradient of one example's loss with respect to the stream, with mean `μ` and covariance `Σ`. The
mean over n examples chooses a direction, and the mean over m others judges it: it fails if `⟨v̄_n, v̄_m⟩ ≤
0`.

The theory of depth growth assumes that no direction of the gradient varies much more than its channels do on
average: `λ_max(Σ) ≤ C·trΣ/d`, C the same at every width. Uncorrelated channels satisfy it, so the
correlations of channels are compared with those that chance alone gives.
"""

# C channels

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from theodolite.core import arguments
from theodolite.core.errors import UseError

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BINS = 80
"""Of the histogram of correlations, from −1 to 1."""
LARGEST_SHOWN = 128
"""Matrices up to this many channels are kept, for a heat map."""
DENSE = 512
"""Up to this many channels all eigenvalues are computed, above it only the largest."""
FEWEST, SKEWEST = 30, 0.2
"""Student's t is trusted with at least `FEWEST` values and |skewness|/√m of at most `SKEWEST`."""


@dataclass(frozen=True)
class Covariance:
    """Of the examples' gradients with respect to a shift of the stream. Made by `describe`."""

    examples: int
    channels: int
    trace: float
    largest: float
    """The largest eigenvalue."""
    variances: tuple[float, ...]
    """Quantiles of the diagonal, at `QUANTILES`."""
    covariances: tuple[float, ...]
    """Quantiles of the off-diagonal entries."""
    correlations: tuple[float, ...]
    """Quantiles of the correlations."""
    counts: tuple[int, ...]
    """Correlations in `BINS` equal bins from −1 to 1."""
    beyond: float
    """The fraction of correlations beyond `2/√examples`; 5 % by chance alone."""
    matrix: Tensor | None = field(default=None, repr=False, compare=False)
    """The covariance itself, of few channels."""

    @property
    def effective(self) -> float:
        """C: the largest eigenvalue over the mean one."""
        return self.largest * self.channels / self.trace if self.trace > 0 else math.nan

    @property
    def chance(self) -> float:
        """C of equal, uncorrelated channels: `(1 + √(d/n))²` (Marchenko and Pastur)."""
        return (1 + math.sqrt(self.channels / max(self.examples - 1, 1))) ** 2

    def __str__(self) -> str:
        return (
            f"{self.channels} channels over {self.examples} examples: C = {self.effective:.3g} (chance alone "
            f"{self.chance:.3g}), {self.beyond:.0%} of correlations beyond 2/√n (chance alone 5 %)"
        )


def describe(covariance: Tensor, examples: int, *, keep: bool = False) -> Covariance:
    """Describe a covariance matrix (C, C) that was estimated on some examples.

    Args:
        covariance: in float64, unbiased.
        examples: the number it was estimated on.
        keep: keep a matrix of more than `LARGEST_SHOWN` channels too.

    >>> found = describe(torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64)), examples=100)
    >>> found.effective, found.beyond, found.counts[BINS // 2]
    (1.5, 0.0, 1)
    """
    matrix = covariance.double().cpu()
    matrix = (matrix + matrix.T) / 2
    number = len(matrix)
    variances = matrix.diagonal().clamp(min=0)
    above = torch.ones_like(matrix, dtype=torch.bool).triu(1)
    beside = matrix[above]
    scales = torch.outer(variances.sqrt(), variances.sqrt())[above]
    correlations = (beside / scales)[scales > 0].clamp(-1, 1)
    counts = torch.histc(correlations, BINS, -1, 1) if len(correlations) else torch.zeros(BINS)
    beyond = (correlations.abs() > 2 / math.sqrt(examples)).double()
    return Covariance(
        examples=examples,
        channels=number,
        trace=float(variances.sum()),
        largest=_largest(matrix),
        variances=_quantiles(variances),
        covariances=_quantiles(beside),
        correlations=_quantiles(correlations),
        counts=tuple(int(one) for one in counts.tolist()),
        beyond=float(beyond.mean()) if len(beyond) else 0.0,
        matrix=matrix if keep or number <= LARGEST_SHOWN else None,
    )


def alignment_bound(n: int, m: int, norm_mu: float, lambda_max: float, trace: float) -> float:
    """Upper bound on the probability that two independent mean gradients do not align (Theorem 5).

        P(⟨v̄_n, v̄_m⟩ ≤ 0) ≤ 4λ/(n‖μ‖²) + 4λ/(m‖μ‖²) + 4λ·trΣ/(nm‖μ‖⁴)

    λ is the largest eigenvalue of Σ (the paper's `Cσ²`). It is Chebyshev's inequality, once for each sample,
    and so holds for any distribution. It is a bound only with the true `μ` and `Σ`: with estimates of them it
    is a diagnostic. A value of 1 says nothing.

    Args:
        n: examples that choose the direction.
        m: examples that judge it.
        norm_mu: `‖μ‖`.
        lambda_max: λ.
        trace: `trΣ`.

    >>> alignment_bound(1000, 1000, norm_mu=1.0, lambda_max=1.0, trace=100.0)
    0.0084
    >>> alignment_bound(10, 10, norm_mu=0.1, lambda_max=1.0, trace=100.0)
    1.0
    """
    for name, count in (("n", n), ("m", m)):
        arguments.whole(name, count, least=1)
    for name, value in (("norm_mu", norm_mu), ("lambda_max", lambda_max), ("trace", trace)):
        arguments.number(name, value, least=0)
    if lambda_max == 0:
        return 0.0 if norm_mu > 0 else 1.0
    if norm_mu == 0:
        return 1.0
    noise = lambda_max / norm_mu / norm_mu
    return min(1.0, 4 * noise * (1 / n + 1 / m + trace / norm_mu / norm_mu / n / m))


def mean_interval(values: Tensor, *, level: float = 0.95) -> tuple[float, float, float]:
    """The mean of independent values, one for each example, and Student's t interval for it.

    If `values` are the products `⟨v̄_n, v_i⟩` of a fixed direction with other examples, it is an interval for
    the alignment `⟨v̄_n, μ⟩`, whatever the direction.

    >>> mean, low, high = mean_interval(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> print(f"{mean:.2f} from {low:.2f} to {high:.2f}")
    2.50 from 0.45 to 4.55
    """
    flat = values.detach().double().flatten()
    if flat.numel() < 2:
        raise UseError(f"{flat.numel()} value(s) have no spread: an interval for a mean needs at least 2")
    arguments.number("level", level, least=0, most=1)
    mean = float(flat.mean())
    error = float(flat.std()) / math.sqrt(flat.numel())
    half = float(stdtrit(flat.numel() - 1, (1 + level) / 2)) * error
    return mean, mean - half, mean + half


def misleads(values: Tensor) -> bool:
    """Are values too few or too skewed for Student's t?

    >>> even = torch.linspace(-1, 1, 100)
    >>> misleads(even), misleads(even[:20]), misleads(even.exp() ** 9)
    (False, True, True)
    """
    away = values - values.mean()
    spread = float(away.square().mean())
    skewness = abs(float(away.pow(3).mean())) / spread**1.5 if spread > 0 else 0.0
    return len(values) < FEWEST or skewness > SKEWEST * math.sqrt(len(values))


def _largest(matrix: Tensor) -> float:
    if len(matrix) <= DENSE:
        return max(0.0, float(torch.linalg.eigvalsh(matrix)[-1]))
    from scipy.sparse.linalg import eigsh  # slow to import

    start = np.random.default_rng(0).standard_normal(len(matrix))
    return max(0.0, float(eigsh(matrix.numpy(), k=1, v0=start, return_eigenvectors=False)[0]))


def _quantiles(values: Tensor) -> tuple[float, ...]:
    if not len(values):
        return (math.nan,) * len(QUANTILES)
    return tuple(float(one) for one in np.quantile(values.numpy(), QUANTILES))
