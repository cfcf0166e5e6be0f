"""Sums over units, of which none grows with their number.

Of a map `y = Zφ` the gradient by Z is `M = E_u Σ_t g_t φ_tᵀ`, and of a gain `y = z∘u` it is
`E_u Σ_t g_t∘u_t`, where g is the gradient of a unit's loss by y. With `S = E[φφᵀ]` beside it, `M (S + ρI)⁻¹`
is the step of least squares: of all that do as much to the loss, the one that moves y least.
"""

# B units, P positions of a unit, O outputs, F features, C channels

from __future__ import annotations

import torch
from torch import Tensor

WIDEST = 8192
"""Of maps with more features than this, only the diagonal of S is kept."""
HALVES = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums of numbers of a dtype are taken."""
    return torch.promote_types(dtype, torch.float32)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices; of halves with sums that are not rounded to halves.

    >>> product(torch.ones(1, 300, dtype=torch.bfloat16), torch.ones(300, 1, dtype=torch.bfloat16))
    tensor([[300.]])
    """
    if a.is_cuda and a.dtype in HALVES and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=torch.float32)
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    return a.to(dtype) @ b.to(dtype)


class MapSums:
    """Sums of a map's gradient and of its features' second moment.

    >>> sums = MapSums(1, 2, like=torch.zeros(()))
    >>> sums.add(torch.ones(1, 1, 1), torch.tensor([[[1.0, 2.0]]]))
    >>> sums.add(torch.ones(1, 1, 1), torch.tensor([[[3.0, 0.0]]]))
    >>> mean, shift = sums.mean(units=2)
    >>> mean.tolist(), shift.tolist(), sums.moment().tolist()
    ([[2.0, 1.0]], [1.0], [[5.0, 1.0], [1.0, 2.0]])
    """

    def __init__(self, outputs: int, features: int, *, like: Tensor) -> None:
        dtype, device = wide(like.dtype), like.device
        self.gradient = torch.zeros(outputs, features, dtype=torch.float64, device=device)
        self.shift = torch.zeros(outputs, dtype=torch.float64, device=device)
        square = (features, features) if features <= WIDEST else (features,)
        self.square = torch.zeros(square, dtype=dtype, device=device)
        self.positions = 0

    def add(self, gradient_BPO: Tensor, features_BPF: Tensor) -> None:
        """Add units."""
        self.positions += features_BPF.shape[0] * features_BPF.shape[1]
        gradient, features = gradient_BPO.flatten(0, 1), features_BPF.flatten(0, 1)
        self.gradient += product(gradient.T, features)
        self.shift += gradient.sum(0, dtype=wide(gradient.dtype))
        if self.square.ndim == 1:
            self.square += features.to(self.square.dtype).square().sum(0)
        elif features.dtype == self.square.dtype:
            self.square.addmm_(features.T, features)
        else:
            self.square += product(features.T, features)

    def mean(self, units: int) -> tuple[Tensor, Tensor]:
        """M (O, F), and the same by a bias (O,)."""
        return self.gradient / units, self.shift / units

    def moment(self) -> Tensor:
        """S, or its diagonal, in float64."""
        return self.square.double() / max(self.positions, 1)

    def preconditioned(self, units: int, ridge: float) -> tuple[Tensor, Tensor]:
        """`M (S + ρI)⁻¹`, ρ the ridge times the mean of S's diagonal; and of the bias, whose feature is 1."""
        (mean, shift), moment = self.mean(units), self.moment()
        diagonal = moment if moment.ndim == 1 else moment.diagonal()
        load = ridge * diagonal.mean()
        if not bool(load > 0):  # features that are all zero
            return torch.zeros_like(mean), shift / (1 + ridge)
        if moment.ndim == 1:
            return mean / (moment + load), shift / (1 + ridge)
        diagonal += load  # a view of S
        factor, failed = torch.linalg.cholesky_ex(moment)
        if bool(failed):  # rounding has made it indefinite
            values, vectors = torch.linalg.eigh(moment)
            return mean @ (vectors / values.clamp(min=load)) @ vectors.T, shift / (1 + ridge)
        return torch.cholesky_solve(mean.T, factor).T.contiguous(), shift / (1 + ridge)


class GainSums:
    """Sums of the gradient of a gain and its shift, and of the squares of what the gain multiplies."""

    def __init__(self, channels: int, *, like: Tensor) -> None:
        self.gradient, self.shift, self.square = torch.zeros(
            3, channels, dtype=torch.float64, device=like.device
        )
        self.positions = 0

    def add(self, gradient_BPC: Tensor, features_BPC: Tensor) -> None:
        """Add units."""
        dtype = wide(gradient_BPC.dtype)
        gradient, features = gradient_BPC.to(dtype), features_BPC.to(dtype)
        self.positions += gradient.shape[0] * gradient.shape[1]
        self.gradient += (gradient * features).sum((0, 1))
        self.shift += gradient.sum((0, 1))
        self.square += features.square().sum((0, 1))

    def mean(self, units: int) -> tuple[Tensor, Tensor]:
        """M (C,), and the same by the shift (C,)."""
        return self.gradient / units, self.shift / units

    def preconditioned(self, units: int, ridge: float) -> tuple[Tensor, Tensor]:
        """`M / (S + ρ)` for each channel; and of the shift, whose feature is 1."""
        (mean, shift), moment = self.mean(units), self.square / max(self.positions, 1)
        load = ridge * moment.mean()
        ratio = torch.zeros_like(mean) if not bool(load > 0) else mean / (moment + load)
        return ratio, shift / (1 + ridge)


class GradientSums:
    """Sums of the units' gradients `v` by a shift of the stream, and of `vvᵀ`, in float64.

    >>> sums = GradientSums(2)
    >>> sums.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    >>> sums.mean.tolist(), sums.covariance.tolist()
    ([2.0, 1.0], [[2.0, -2.0], [-2.0, 2.0]])
    """

    def __init__(self, channels: int, device: torch.device | None = None) -> None:
        self.units = 0
        self.total = torch.zeros(channels, dtype=torch.float64, device=device)
        self.outer = torch.zeros(channels, channels, dtype=torch.float64, device=device)

    def add(self, gradients_BC: Tensor) -> None:
        """Add units."""
        gradients = gradients_BC.double()
        self.units += len(gradients)
        self.total += gradients.sum(0)
        self.outer.addmm_(gradients.T, gradients)

    def joined(self, other: GradientSums) -> GradientSums:
        """The sums over both samples."""
        both = GradientSums(0)
        both.units = self.units + other.units
        both.total, both.outer = self.total + other.total, self.outer + other.outer
        return both

    @property
    def mean(self) -> Tensor:
        """v̄."""
        return self.total / self.units

    @property
    def covariance(self) -> Tensor:
        """Σ, unbiased."""
        return (self.outer - self.units * torch.outer(self.mean, self.mean)) / (self.units - 1)
