"""The first and second derivative of a loss by the logits.

Autograd gives them for any loss. For a cross-entropy with a saturated softmax they are inaccurate: in float32
`p_y − 1` is zero from `1 − p_y = 6e-8` on, and so is what should have the size of the other classes'
probabilities. So a loss that behaves like a cross-entropy is recognised by evaluating it, and its derivatives
are computed in a form that stays accurate.
"""

# N rows, K classes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from theodolite.core.errors import UseError

LogitLoss = Callable[[Tensor, Any], Tensor]
"""`loss(logits, targets) -> scalar`."""

SEED = 0


@dataclass(frozen=True)
class CrossEntropy:
    """A loss `−Σ_n w_n Σ_k q_nk log p_nk`, where p is the softmax of the logits along one dimension.

    Its derivative is `w (p − q)`, the derivative of that `w (diag p − ppᵀ)`.
    """

    weights: Tensor
    """w, with a dimension of 1 for the classes: 1/N in a mean, 0 where a target is ignored."""
    targets: Tensor
    """q, of the shape of the logits."""
    hard: bool
    """Is every q a single class?"""
    dim: int

    def __call__(self, logits: Tensor) -> Tensor:
        """`w (p − q)`, differentiable once."""
        return _Residual.apply(logits, self.weights.to(logits), self.targets.to(logits), self.hard, self.dim)


def score(loss: LogitLoss, logits: Tensor, targets: Any, known: CrossEntropy | None) -> Tensor:
    """`∂ℓ/∂z` at the logits, differentiable by them."""
    if known is not None:
        return known(logits)
    value = loss(logits, targets)
    if not value.requires_grad:
        raise UseError("the loss does not depend on the logits: it has no derivative by them")
    (found,) = torch.autograd.grad(value, logits, create_graph=True)
    return found


@torch.enable_grad()
def recognise(loss: LogitLoss, logits: Tensor, targets: Any) -> CrossEntropy | None:
    """The loss as a cross-entropy with weights and targets; None if it is another loss.

    At two random points its second derivative must be that of a cross-entropy with the same weights, its
    first derivative must give the same targets, and at the logits themselves both must be as expected.

    >>> logits, targets = torch.zeros(2, 3), torch.tensor([0, 2])
    >>> recognise(torch.nn.functional.cross_entropy, logits, targets).weights.flatten()
    tensor([0.5000, 0.5000])
    >>> recognise(lambda logits, targets: logits.square().mean(), logits, targets) is None
    True
    """
    if logits.ndim == 0 or not logits.is_floating_point():
        return None
    dims = [-1] if logits.ndim < 3 else [-1, 1]
    try:
        # Checked first: a loss of probabilities must not be given other values, which ends a CUDA process.
        dims = [dim for dim in dims if _sums_to_zero(loss, logits, targets, dim)]
        found = next((found for dim in dims if (found := _recognise(loss, logits, targets, dim))), None)
        return found if found is None or agrees(found, loss, logits, targets) else None
    except Exception:  # evaluating the loss at the logits themselves will show the error
        return None


def _derivatives(
    loss: LogitLoss, point: Tensor, targets: Any, direction: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The first derivative at a point, and the second along a direction; None if there is none."""
    (first,) = torch.autograd.grad(loss(point, targets), point, create_graph=True)
    second = torch.autograd.grad(first, point, direction)[0] if first.requires_grad else None
    return first.detach(), second


def _wide(logits: Tensor) -> Tensor:
    """A copy in at least float32 to differentiate by: in bf16 and fp16 rounding is too large."""
    return logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()


def _sums_to_zero(loss: LogitLoss, logits: Tensor, targets: Any, dim: int) -> bool:
    """Does the derivative sum to zero over the classes, as `p − q` does?"""
    point = _wide(logits)
    (first,) = torch.autograd.grad(loss(point, targets), point)
    # Where the softmax is saturated, the rest is rounding.
    return bool(first.sum(dim).abs().max() <= 1e-3 * first.abs().max() + 1e-6)


@torch.enable_grad()
def agrees(known: CrossEntropy, loss: LogitLoss, logits: Tensor, targets: Any) -> bool:
    """Are the loss's derivatives at these logits those of the cross-entropy, up to rounding?

    A loss that clamps its logits is a cross-entropy for small logits only.
    """
    point = _wide(logits)
    direction = torch.randn(point.shape, generator=torch.Generator().manual_seed(SEED)).to(point)
    if not loss(point, targets).requires_grad:
        return False
    first, second = _derivatives(loss, point, targets, direction)
    if second is None:
        return False
    expected = known(point)
    (curved,) = torch.autograd.grad(expected, point, direction)
    apart = torch.maximum((first - expected).abs().max(), (second - curved).abs().max())
    close = 1e-9 if point.dtype == torch.float64 else 1e-5
    return bool(apart <= close * known.weights.max())


def _recognise(loss: LogitLoss, logits: Tensor, targets: Any, dim: int) -> CrossEntropy | None:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    close = 1e-9 if dtype == torch.float64 else 1e-4
    generator = torch.Generator().manual_seed(SEED)
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(2):
        drawn = torch.randn(2, *logits.shape, generator=generator, dtype=dtype).to(logits.device)
        point, direction = drawn[0].requires_grad_(), drawn[1]
        first, second = _derivatives(loss, point, targets, direction)
        if second is None:
            return None
        p = point.detach().softmax(dim)
        expected = p * (direction - (p * direction).sum(dim, keepdim=True))
        weights = (second * expected).sum(dim, keepdim=True) / expected.square().sum(dim, keepdim=True)
        largest = weights.abs().max()
        weights = torch.where(weights.abs() <= close * largest, 0.0, weights)
        off = (second - weights * expected).abs().max()
        if not bool(largest > 0) or bool(off > close * largest) or bool((weights < 0).any()):
            return None
        counted = weights > 0
        found.append((weights, torch.where(counted, p - first / torch.where(counted, weights, 1.0), 0.0)))
    (weights, q), (again, q_again) = found
    changed = (weights - again).abs().max() > close * weights.max()
    if bool(changed) or bool((q - q_again).abs().max() > 100 * close):
        return None
    one_hot = torch.zeros_like(q).scatter(dim, q.argmax(dim, keepdim=True), 1.0)
    hard = not bool(((q - one_hot).abs() * (weights > 0)).max() > max(close / 10, 1e-9))
    return CrossEntropy(weights, one_hot if hard else q, hard, dim)


class _Residual(torch.autograd.Function):
    """`w (p − q)` of logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor, targets: Tensor, hard: bool, dim: int) -> Tensor:
        p = logits.softmax(dim)
        ctx.save_for_backward(p, weights)
        ctx.dim = dim
        if not hard:
            return weights * (p - targets)
        others = p * (1 - targets)
        # For the target class −Σ p of the others: p − 1 would be 0 where they are small.
        return weights * (others - targets * others.sum(dim, keepdim=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor, None, None, None, None]:
        p, weights = ctx.saved_tensors
        return weights * spread(p, direction, ctx.dim), None, None, None, None


def spread(p: Tensor, direction: Tensor, dim: int = -1) -> Tensor:
    """`(diag p − ppᵀ) a`, in differences to the likeliest class, which are accurate where p is near 1.

    >>> spread(torch.tensor([1.0, 1e-12]), torch.tensor([3.0, 1.0]))
    tensor([ 2.0000e-12, -2.0000e-12])
    """
    relative = direction - direction.gather(dim, p.argmax(dim, keepdim=True))
    return p * (relative - (p * relative).sum(dim, keepdim=True))
