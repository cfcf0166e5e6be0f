"""How large a tensor is as an operator: its spectral norm `‖A‖₂`, and `‖A‖_R = √(n_in/n_out)·‖A‖₂`.

The RMS operator norm `‖A‖_R` is the largest factor by which a layer can change the root mean square of its
input. Tensors that are not matrices are measured in the same spirit:

    a bias or a gain     its root mean square (a matrix with one input)
    an embedding         the root mean square of its nonzero rows: a one-hot input reads one row, and a step
                         moves the rows that were read
    a stack of experts   the largest of its matrices
    a convolution        its kernel as one matrix from everything it reads to one position

`‖A‖₂` comes from power iteration, which multiplies by `A` and `Aᵀ` only and suits matrices of any size on any
device. All iterates are kept (Lanczos): on a random matrix, whose singular values lie close together, this
takes tens of steps where the last iterate alone would need hundreds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from theodolite.anatomy.part import Part
from theodolite.core.exclusive import exclusive
from theodolite.optimizers.matrices import as_matrices
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, number

RTOL = 1e-2
"""On the residual of σ². The error of σ itself is about its square over the gap below σ, far smaller."""
MOST_STEPS = 100
CHECK_EVERY = 5
"""Steps between two looks at the residual, each of which waits for the device."""
MOST_STACKED = 1 << 24
"""Matrices of one shape are measured together up to this many entries: a copy of 64 MiB."""


@dataclass(frozen=True)
class SpectralNorm(Result):
    """Largest singular values, one for each matrix of a stack, and how far they can be trusted."""

    kind: ClassVar[str] = "spectral norm"
    value: Tensor
    """`‖A‖₂`, never above the true value; nan for a matrix with entries that are not finite."""
    uncertainty: Tensor
    """Some singular value lies within this of `value`, in the same unit."""
    converged: bool
    """Did the residuals of all matrices fall below the tolerance?"""
    steps: int

    def blocks(self) -> Iterator[Block]:
        """The norms, and whether the iteration converged."""
        end = f"{'converged' if self.converged else 'not converged'} in {self.steps} steps"
        if self.value.ndim:
            yield f"Spectral norms of {self.value.numel()} matrices: {end}"
            yield self.table()
        else:
            yield f"‖A‖₂ = {number(self.value.item(), 5)} ± {self.uncertainty.item():.1g}: {end}"

    def table(self) -> Table:
        """One row for each matrix, by its index in the stack."""
        rows = [
            (", ".join(map(str, at)), self.value[at].item(), self.uncertainty[at].item())
            for at in itertools.product(*map(range, self.value.shape))
        ]
        return Table(("matrix", "‖A‖₂", "uncertainty"), rows)


@exclusive()
@torch.no_grad()
def spectral_norm(matrices: Tensor, *, rtol: float = RTOL, most_steps: int = MOST_STEPS) -> SpectralNorm:
    """`‖A‖₂` of a matrix, or of each of a stack (…, m, n), in float32.

    With `v` the current estimate of the right singular vector and `θ = ‖Av‖²`, it stops when
    `‖AᵀAv − θv‖ ≤ rtol·θ`. A zero matrix converges at once.

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
    theta, residual, steps = _lanczos(stack, rtol, most_steps)
    value = theta.sqrt() * scale
    # |θ − σ²| ≤ r, so |√θ − σ| ≤ r/√θ.
    uncertainty = torch.where(theta > 0, residual / theta.sqrt(), residual) * scale
    value = torch.where(broken, torch.full_like(value, torch.nan), value)
    batch = matrices.shape[:-2]
    return SpectralNorm(
        value.reshape(batch),
        uncertainty.reshape(batch),
        converged=bool((residual <= rtol * theta).all()) and not bool(broken.any()),
        steps=steps,
    )


def rms_norms(tensors: Mapping[str, Tensor], parts: Mapping[str, Part]) -> dict[str, tuple[float, bool]]:
    """`‖A‖_R` of each tensor, and whether the iteration converged.

    >>> part = Part("w", (4, 16), "linear", "hidden", 16, 4, True, True, (1,), (0,))
    >>> rms_norms({"w": torch.eye(4, 16)}, {"w": part})     # √(16/4)·1
    {'w': (2.0, True)}
    """
    found: dict[str, tuple[float, bool]] = {}
    alike: dict[tuple[tuple[int, ...], torch.device], list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        part = parts[name]
        if is_matrix(part):
            matrices = as_matrices(tensor.detach(), (part.in_axes, part.out_axes))
            alike.setdefault((tuple(matrices.shape), matrices.device), []).append((name, matrices))
        else:
            value = _entries(tensor, part)
            found[name] = value, math.isfinite(value)
    for members in alike.values():
        at_once = max(1, MOST_STACKED // max(1, members[0][1].numel()))
        for first in range(0, len(members), at_once):
            together = members[first : first + at_once]
            # A view where there is only one: large matrices are not copied.
            stack = together[0][1][None] if len(together) == 1 else torch.stack([one for _, one in together])
            norms = spectral_norm(stack)
            for (name, _), values in zip(together, norms.value, strict=True):
                scale = math.sqrt(parts[name].fan_in / parts[name].fan_out)
                found[name] = scale * values.max().item(), norms.converged
    return {name: found[name] for name in tensors}


def is_matrix(part: Part) -> bool:
    """Is it measured by its largest singular value?"""
    return bool(part.in_axes) and bool(part.out_axes) and part.op != "embedding"


def _entries(tensor: Tensor, part: Part) -> float:
    """The root mean square of the entries; in an embedding, of those in rows that are not zero."""
    squares = tensor.detach().float().square()
    if part.op == "embedding":
        rows = squares.mean(part.out_axes)
        used = rows[rows != 0]  # keeps nan
        return used.mean().sqrt().item() if len(used) else 0.0
    return squares.mean().sqrt().item()


def _lanczos(stack: Tensor, rtol: float, most_steps: int) -> tuple[Tensor, Tensor, int]:
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
        product = _times(stack.mT, _times(stack, vector))
        tridiagonal[:, step, step] = (vector * product).sum(1)
        # Twice, as one pass leaves rounding errors that grow from step to step.
        kept = basis[:, : step + 1]
        for _ in range(2):
            product = product - _times(kept.mT, _times(kept, product))
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
            if done == last or bool((residual <= rtol * theta).all()):
                return theta, residual, done
        if done < last:
            tridiagonal[:, step, done] = tridiagonal[:, done, step] = beta
    raise AssertionError("unreachable")


def _times(stack: Tensor, vectors: Tensor) -> Tensor:
    """Each matrix of a stack times its vector; (n, i, j), (n, j) → (n, i)."""
    return torch.bmm(stack, vectors[:, :, None])[:, :, 0]
