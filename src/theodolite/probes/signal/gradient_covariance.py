"""How near to diagonal the covariance of the stream's gradient is.

The theory of depth growth asks that no direction of the gradient varies much more than its channels do on
average: `λ_max(Σ) ≤ C·trΣ/d`, C the same at every width. Channels that know nothing of each other have it. So
the correlations of channels are looked at, beside what chance alone gives.
"""

# C channels

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BINS = 80
"""Of the histogram of correlations, from −1 to 1."""
LARGEST_SHOWN = 128
"""Matrices up to this many channels are kept, for a map of them."""
DENSE = 512
"""Up to here all eigenvalues are taken, above it only the largest."""


@dataclass(frozen=True)
class Covariance:
    """Of the units' gradients by a shift of the stream. Made by `describe`."""

    units: int
    channels: int
    trace: float
    largest: float
    """The largest eigenvalue."""
    variances: tuple[float, ...]
    """Quantiles of the diagonal, at `QUANTILES`."""
    covariances: tuple[float, ...]
    """Quantiles of the entries beside the diagonal."""
    correlations: tuple[float, ...]
    """The same over both channels' standard deviations."""
    counts: tuple[int, ...]
    """Of correlations, in `BINS` equal parts of −1 to 1."""
    beyond: float
    """The share of correlations beyond `2/√units`; by chance alone 5 % are."""
    matrix: Tensor | None = field(default=None, repr=False, compare=False)
    """The covariance itself, of few channels."""

    @property
    def effective(self) -> float:
        """C: the largest eigenvalue over the mean one."""
        return self.largest * self.channels / self.trace if self.trace > 0 else math.nan

    @property
    def chance(self) -> float:
        """C of equal channels that know nothing of each other: `(1 + √(d/n))²` (Marchenko and Pastur)."""
        return (1 + math.sqrt(self.channels / max(self.units - 1, 1))) ** 2

    def __str__(self) -> str:
        return (
            f"{self.channels} channels over {self.units} units: C = {self.effective:.3g} (chance alone "
            f"{self.chance:.3g}), {self.beyond:.0%} of correlations beyond 2/√n (chance alone 5 %)"
        )


def describe(covariance: Tensor, units: int, *, keep: bool = False) -> Covariance:
    """What a covariance matrix (C, C), estimated on some units, says.

    Args:
        covariance: in float64, unbiased.
        units: on how many it was estimated.
        keep: keep a matrix of more than `LARGEST_SHOWN` channels too.

    >>> found = describe(torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64)), units=100)
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
    return Covariance(
        units=units,
        channels=number,
        trace=float(variances.sum()),
        largest=_largest(matrix),
        variances=_quantiles(variances),
        covariances=_quantiles(beside),
        correlations=_quantiles(correlations),
        counts=tuple(int(one) for one in counts.tolist()),
        beyond=float((correlations.abs() > 2 / math.sqrt(units)).double().mean())
        if len(correlations)
        else 0.0,
        matrix=matrix if keep or number <= LARGEST_SHOWN else None,
    )


def _largest(matrix: Tensor) -> float:
    if len(matrix) <= DENSE:
        return max(0.0, float(torch.linalg.eigvalsh(matrix)[-1]))
    start = np.random.default_rng(0).standard_normal(len(matrix))
    from scipy.sparse.linalg import eigsh  # slow to import

    return max(0.0, float(eigsh(matrix.numpy(), k=1, v0=start, return_eigenvectors=False)[0]))


def _quantiles(values: Tensor) -> tuple[float, ...]:
    if not len(values):
        return (math.nan,) * len(QUANTILES)
    return tuple(float(one) for one in np.quantile(values.numpy(), QUANTILES))
