"""The largest singular value of many matrices at once, by power iteration.

The iteration multiplies by `A` and `Aᵀ` only, so it suits matrices of any size on any device. It keeps all
its vectors (Lanczos): the best estimate inside their span comes from the same products, in tens of steps
where the last vector alone would need hundreds on a random matrix, whose singular values lie close together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.core.exclusive import exclusive

TOLERANCE = 1e-2
"""On the residual of σ². The error of σ itself is about its square over the gap below σ, far smaller."""
MOST_STEPS = 100
CHECK_EVERY = 5
"""Steps between two looks at the residual, each of which waits for the device."""


@dataclass(frozen=True)
class SpectralNorm:
    """Largest singular values, one for each matrix of a stack, and how far they can be trusted."""

    value: Tensor
    """`‖A‖₂`, never above the truth; nan for a matrix with entries that are not finite."""
    uncertainty: Tensor
    """Some singular value lies within this of `value`, in the same unit."""
    converged: bool
    """Did the residuals of all matrices fall below the tolerance?"""
    steps: int


@exclusive()
@torch.no_grad()
def spectral_norm(
    matrices: Tensor, *, tolerance: float = TOLERANCE, most_steps: int = MOST_STEPS
) -> SpectralNorm:
    """`‖A‖₂` of a matrix, or of each of a stack (…, m, n), in float32.

    With `v` the current estimate of the right singular vector and `θ = ‖Av‖²`, it stops when
    `‖AᵀAv − θv‖ ≤ tolerance·θ`. A zero matrix has converged at once.

    >>> found = spectral_norm(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
    >>> found.value, found.converged
    (tensor(3.), True)
    >>> spectral_norm(torch.diag(torch.tensor([3 + 4j, 1.0]))).value
    tensor(5.)
    """
    stack = matrices.detach().reshape(-1, *matrices.shape[-2:])
    if stack.is_complex():  # a real matrix of the same singular values, each twice
        real, imaginary = stack.real, stack.imag
        stack = torch.cat([torch.cat([real, -imaginary], 2), torch.cat([imaginary, real], 2)], 1)
    stack = stack.float()
    if stack.shape[1] < stack.shape[2]:
        stack = stack.mT  # the vectors live on the shorter side
    # Entries are brought to about one, so that squares of small gradients do not vanish.
    scale = stack.abs().amax((1, 2)) if stack.shape[2] else stack.new_zeros(len(stack))
    broken = ~scale.isfinite()
    scale = torch.where(broken | (scale == 0), torch.ones_like(scale), scale)
    stack = torch.where(broken[:, None, None], torch.zeros_like(stack), stack / scale[:, None, None])
    theta, residual, steps = _lanczos(stack, tolerance, most_steps)
    value = theta.sqrt() * scale
    # |θ − σ²| ≤ r, so |√θ − σ| ≤ r/√θ.
    uncertainty = torch.where(theta > 0, residual / theta.sqrt(), residual) * scale
    value = torch.where(broken, torch.full_like(value, torch.nan), value)
    batch = matrices.shape[:-2]
    return SpectralNorm(
        value.reshape(batch),
        uncertainty.reshape(batch),
        converged=bool((residual <= tolerance * theta).all()) and not bool(broken.any()),
        steps=steps,
    )


def _lanczos(stack: Tensor, tolerance: float, most_steps: int) -> tuple[Tensor, Tensor, int]:
    """The largest eigenvalue of each AᵀA, its residual, and the number of steps."""
    num, _, short = stack.shape
    last = min(most_steps, short)
    if last == 0:
        return stack.new_zeros(num), stack.new_zeros(num), 0
    start = torch.randn(short, generator=torch.Generator().manual_seed(0)).to(stack.device)
    vector = (start / start.norm()).expand(num, short)
    basis = stack.new_zeros(num, last, short)
    tridiagonal = stack.new_zeros(num, last, last)
    for step in range(last):
        basis[:, step] = vector
        product = _gram(stack, vector)
        tridiagonal[:, step, step] = (vector * product).sum(1)
        # Twice, as one pass leaves rounding errors that grow from step to step.
        kept = basis[:, : step + 1]
        for _ in range(2):
            product = product - torch.einsum("nkd,nk->nd", kept, torch.einsum("nkd,nd->nk", kept, product))
        beta = product.norm(dim=1)
        # An exhausted space (a matrix of low rank, or zero) goes on with zero vectors, which change nothing.
        spent = beta <= 1e-6 * tridiagonal.abs().amax((1, 2))
        beta = beta.masked_fill(spent, 0.0)
        vector = product / torch.where(spent, torch.ones_like(beta), beta)[:, None]
        vector = vector.masked_fill(spent[:, None], 0.0)
        done = step + 1
        if done % CHECK_EVERY == 0 or done == last:
            values, vectors = torch.linalg.eigh(tridiagonal[:, :done, :done])
            theta = values[:, -1].clamp(min=0.0)
            residual = beta * vectors[:, -1, -1].abs()
            if done == last or bool((residual <= tolerance * theta).all()):
                return theta, residual, done
        if done < last:
            tridiagonal[:, step, done] = tridiagonal[:, done, step] = beta
    raise AssertionError("unreachable")


def _gram(stack: Tensor, vectors: Tensor) -> Tensor:
    """`AᵀA v` for each matrix A and its vector v."""
    return torch.einsum("nij,ni->nj", stack, torch.einsum("nij,nj->ni", stack, vectors))
