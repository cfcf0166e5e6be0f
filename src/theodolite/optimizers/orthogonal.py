"""Orthogonal factors by matrix products alone, in batches of equal shapes.

With the singular value decomposition `X = UΣVᵀ`, an odd polynomial of a matrix is one of its singular
values: `aX + b(XXᵀ)X + c(XXᵀ)²X = U(aΣ + bΣ³ + cΣ⁵)Vᵀ`. Polynomials that push (0, 1] towards 1 give UVᵀ.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

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

LARGE = 2**24
"""Entries from which on a copy of a stack takes longer than the start of a kernel."""
SHORT = 128
"""Matrices with a shorter side are computed in float32 on the CPU."""


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
    dtype = computing_dtype(matrices.dtype, matrices.device, matrices.shape)
    return iterated(matrices.to(dtype), steps=steps, eps=eps)


def iterated(x: Tensor, *, steps: int, eps: float | Tensor) -> Tensor:
    """`newton_schulz` in the dtype that the matrices have."""
    return _iterate(normalised(x, eps), [JORDAN] * steps)


def normalised(matrices: Tensor, eps: float | Tensor) -> Tensor:
    """`X/(‖X‖_F + eps)` for entries of any size; 0 for zero.

    Entries are scaled by a power of two first, which rounds nothing: squares of 10²⁵ are beyond float32, and
    those of 10⁻²⁵ below it.
    """
    wide = torch.promote_types(matrices.dtype, torch.float32)
    # Not the norm of order ∞, which takes ten times as long on a CPU.
    low, high = torch.aminmax(matrices.flatten(-2), dim=-1, keepdim=True)
    largest = torch.maximum(-low, high)[..., None].to(wide)
    # Not beyond 2^±126: neither the factor nor its inverse may leave the normal numbers of float32.
    exponent = torch.frexp(largest).exponent.clamp(-126, 126)
    # By its bits: on a GPU torch compiles exp2 when it is first used, and warns where it cannot keep it.
    factor = (127 - exponent).bitwise_left_shift(23).view(torch.float32).to(wide)
    scaled = matrices * factor.to(matrices.dtype)
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True) + eps * factor
    return scaled.div_(norm.clamp_min(torch.finfo(wide).tiny).to(matrices.dtype))


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


def computing_dtype(dtype: torch.dtype, device: torch.device, shape: Sequence[int]) -> torch.dtype:
    """bfloat16 where it is multiplied faster, float32 elsewhere, and float64 for float64.

    An accelerator multiplies it faster; so do CPUs that have instructions for it, unless a side is so short
    that products are not what takes the time.
    """
    if dtype == torch.float64:
        return torch.float64
    if device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if min(shape[-2:]) >= SHORT and _multiplies_bfloat16() else torch.float32


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Has this CPU instructions for it? Without them it is several times slower than float32."""
    asked = (
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return any(ask is not None and bool(ask()) for ask in asked)


def _iterate(x: Tensor, coefficients: Iterable[tuple[float, float, float]]) -> Tensor:
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    alone = len(x) == 1  # products of two matrices take less on the CPU than those of two stacks of one
    x = x[0] if alone else x
    add = torch.addmm if alone else torch.baddbmm
    # XXᵀ or XᵀX, the smaller of them: both give the same.
    tall = shape[-2] > shape[-1]
    for a, b, c in coefficients:
        gram = x.mT @ x if tall else x @ x.mT
        power = add(gram, gram, gram, beta=b, alpha=c)
        if x.dtype == torch.bfloat16 and x.numel() >= LARGE:
            # a·I in the matrix spares a copy of X, and rounds no more than bfloat16 does elsewhere.
            power.diagonal(dim1=-2, dim2=-1).add_(a)
            x = x @ power if tall else power @ x
        else:
            x = add(x, x, power, beta=a) if tall else add(x, power, x, beta=a)
    return x.reshape(shape)
