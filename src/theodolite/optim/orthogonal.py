"""Orthogonal factors by matrix products alone, in batches of equal shapes.

With the singular value decomposition `X = UΣVᵀ`, an odd polynomial of a matrix is one of its singular
values: `aX + b(XXᵀ)X + c(XXᵀ)²X = U(aΣ + bΣ³ + cΣ⁵)Vᵀ`. Polynomials that push (0, 1] towards 1 give UVᵀ.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

JORDAN = (3.4445, -4.7750, 2.0315)
"""Steepest at zero; singular values end between 0.7 and 1.2 and stay there."""

POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
)
"""Each the best polynomial for what the ones before leave; the last is the classical one, which converges."""


def newton_schulz(matrices: Tensor, *, steps: int, eps: float | Tensor) -> Tensor:
    """Muon's `UVᵀ`, roughly: Jordan's quintic, after a division by the Frobenius norm plus eps.

    Args:
        matrices: (…, m, n), of any dtype.
        steps: number of iterations.
        eps: in units of the matrices; or one for each of them, (…, 1, 1).

    >>> flat = newton_schulz(torch.diag(torch.tensor([4.0, 2.0, 1.0])), steps=5, eps=1e-7)
    >>> bool((flat.diagonal() - 1).abs().max() < 0.35), flat[0, 1].item()
    (True, 0.0)

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    x = matrices.to(computing_dtype(matrices))
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + eps).to(x.dtype)
    return _iterate(x, [JORDAN] * steps)


def polar(matrices: Tensor) -> Tensor:
    """`UVᵀ` to about 1e-4 where singular values are above 1e-3 of the Frobenius norm; 0 for zero.

    Args:
        matrices: (…, m, n), of float32 or float64, in which it computes.

    References:
        Amsel et al., The Polar Express: optimal matrix sign methods, 2025.
    """
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    # A hair more than the norm, so that rounding leaves no singular value above 1.
    x = matrices / (norm * 1.01).clamp_min(torch.finfo(matrices.dtype).tiny)
    return _iterate(x, POLAR_EXPRESS)


def computing_dtype(tensor: Tensor) -> torch.dtype:
    """bfloat16 on an accelerator, float32 on the CPU, and float64 for float64."""
    if tensor.dtype == torch.float64:
        return torch.float64
    return torch.float32 if tensor.device.type == "cpu" else torch.bfloat16


def _iterate(x: Tensor, coefficients: Iterable[tuple[float, float, float]]) -> Tensor:
    tall = x.shape[-2] > x.shape[-1]
    shape = x.shape
    x = (x.mT if tall else x).reshape(-1, *sorted(shape[-2:]))
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if tall else x
    return x.reshape(shape)
