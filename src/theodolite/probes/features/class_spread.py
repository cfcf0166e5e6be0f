"""Class means, and how far samples are from them: sums over batches, in memory for K×D and K×K numbers.

With h a feature vector, μ_c the mean of class c, μ the mean of the K class means, and m_c = μ_c − μ:

    S_W = mean over samples of (h − μ_c)(h − μ_c)ᵀ,    S_B = 1/K Σ_c m_c m_cᵀ

S_W and S_B are D×D, and neither is made. `S_B = MᵀM/K` for the matrix M (K, D) of centred means, so with the
eigenvectors of `G = MMᵀ`, `G u_r = λ_r u_r`, S_B has the eigenvectors `v_r = Mᵀu_r/√λ_r` and

    Tr S_W S_B⁺ = K · mean over samples of Σ_r (v_rᵀ(h − μ_c))²/λ_r,    v_rᵀ(h − μ_c) = u_rᵀM(h − μ_c)/√λ_r

The sum runs over eigenvalues above `RTOL` times the largest. All sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RTOL = 1e-8
"""Smaller eigenvalues of S_B, relative to the largest, count as zero."""
MOST_SCORES = 2**22
"""Most products of samples and means at a time."""


@dataclass(frozen=True)
class ClassGeometry:
    """Class means and the spread around them, as numbers. Made by `ClassSpread.geometry`."""

    quotient: float
    """NC1 as `Tr S_W/Tr S_B`."""
    pinv: float
    """NC1 as `Tr(S_W S_B⁺)/K`: the spread within the span of the class means alone."""
    cdnv: float
    """Class-distance normalised variance: the mean over pairs of `(var_i + var_j)/(2‖μ_i − μ_j‖²)`."""
    nc2: float
    """Distance of the class means from a simplex: `‖G/‖G‖ − (I − 11ᵀ/K)/√(K−1)‖`, Frobenius norms."""
    equinorm: float
    """The standard deviation of the lengths of centred class means over their mean."""
    equiangle: float
    """The mean distance of the cosine of two centred class means from −1/(K−1)."""
    nearest: float
    """The share of samples whose nearest class mean is that of their own class."""


class ClassMeans:
    """First pass: the mean of each class."""

    def __init__(self, counts: Tensor, rows: Tensor) -> None:
        self.counts = counts
        """Samples by class (K,), each at least 1."""
        self.sums = rows.new_zeros(len(counts), rows.shape[1], dtype=torch.float64)
        """(K, D), as wide as the rows."""

    def add(self, rows: Tensor, classes: Tensor) -> None:
        """Take samples (n, D) of classes (n,), numbered from 0 to K − 1."""
        self.sums.index_add_(0, classes, rows.double())

    @property
    def means(self) -> Tensor:
        """(K, D)."""
        return self.sums / self.counts[:, None]


class ClassSpread:
    """Second pass: the spread of samples around the means of their classes.

    Args:
        means: of the classes (K, D), in float64.
        counts: samples by class (K,).
        eps: relative rounding of the features. Class means that differ by less count as equal.
    """

    def __init__(self, means: Tensor, counts: Tensor, eps: float = 0.0) -> None:
        self.counts = counts
        self.mean = means.mean(0)
        self.centred = means - self.mean
        self.gram = self.centred @ self.centred.T
        between = float(self.gram.diagonal().mean())
        self.is_apart = between > eps**2 * float(means.square().sum(1).mean())
        """Do the class means differ by more than rounding?"""
        values, self._vectors = torch.linalg.eigh(self.gram)
        self._values = torch.where(values > RTOL * values[-1], values, math.inf)
        self.within = torch.zeros_like(values)
        """By class: the sum of squared distances from its mean."""
        self.projected = torch.zeros_like(values)
        """By eigenvector u_r: the sum of `(u_rᵀM(h − μ_c))²`."""
        self.near = torch.zeros_like(values)
        """By class: samples whose nearest class mean is its own."""

    def add(self, rows: Tensor, classes: Tensor) -> Tensor:
        """Take samples (n, D) of classes (n,); returns the class of the nearest mean of each (n,)."""
        step = max(1, MOST_SCORES // len(self.counts))
        pairs = zip(rows.split(step), classes.split(step), strict=True)
        return torch.cat([self._add(*pair) for pair in pairs]) if len(rows) else classes

    def _add(self, rows: Tensor, classes: Tensor) -> Tensor:
        away = rows.double() - self.mean - self.centred[classes]
        self.within.index_add_(0, classes, away.square().sum(1))
        scores = away @ self.centred.T
        self.projected += (scores @ self._vectors).square().sum(0)
        # ‖h − μ_k‖² less what does not depend on k, with h = μ_c + away.
        farther = self.gram.diagonal() - 2 * (scores + self.gram[classes])
        nearest = farther.argmin(1)
        self.near.index_add_(0, classes, (nearest == classes).double())
        return nearest

    def geometry(self, shared: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> ClassGeometry:
        """The numbers; `shared` adds up the sums of several processes.

        >>> means = torch.eye(2).double()
        >>> spread = ClassSpread(means, torch.tensor([2, 2]))
        >>> rows = torch.tensor([[1.5, 0.0], [0.5, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> _ = spread.add(rows, torch.tensor([0, 0, 1, 1]))
        >>> spread.geometry().quotient, spread.geometry().cdnv  # 0.125/0.5, (0.25 + 0)/(2·2)
        (0.25, 0.0625)
        """
        within, projected, near = map(shared, (self.within, self.projected, self.near))
        num, classes = float(self.counts.sum()), len(self.counts)
        lengths = self.gram.diagonal().sqrt()
        cosines = self.gram / lengths.outer(lengths)
        squares = self.gram.diagonal()[:, None] + self.gram.diagonal() - 2 * self.gram
        own = within / self.counts
        others = ~torch.eye(classes, dtype=torch.bool, device=within.device)
        ratios = (own[:, None] + own)[others] / (2 * squares[others])
        return ClassGeometry(
            quotient=float(within.sum() / num / self.gram.diagonal().mean()) if self.is_apart else math.inf,
            pinv=float((projected / self._values**2).sum() / num) if self.is_apart else math.inf,
            cdnv=float(ratios.mean()) if self.is_apart else math.inf,
            nc2=distance_from_simplex(self.gram) if self.is_apart else math.nan,
            equinorm=float(lengths.std(correction=0) / lengths.mean()) if self.is_apart else math.nan,
            equiangle=float((cosines[others] + 1 / (classes - 1)).abs().mean())
            if self.is_apart
            else math.nan,
            nearest=float(near.sum() / num),
        )


def distance_from_simplex(matrix: Tensor) -> float:
    """`‖A/‖A‖ − (I − 11ᵀ/K)/√(K−1)‖` of a matrix A (K, K): 0 if A is a multiple of a simplex's Gram matrix.

    >>> distance_from_simplex(3 * (torch.eye(4) - 0.25)) < 1e-6
    True
    """
    matrix = matrix.double()
    classes = len(matrix)
    simplex = torch.eye(classes, dtype=matrix.dtype, device=matrix.device) - 1 / classes
    return float(torch.linalg.norm(matrix / torch.linalg.norm(matrix) - simplex / math.sqrt(classes - 1)))
