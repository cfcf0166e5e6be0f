"""How far one value of a forward pass moves with another, at the data: the norm of a Jacobian."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from theodolite.core.errors import UseError

Edge = GradientEdge | Tensor
"""Where autograd hands on a gradient, as of `theodolite.anatomy.recording.rerun`."""

STEPS = 40
TOLERANCE = 1e-4
"""Of the change in two steps, where the iteration ends."""


def jacobian_norm(
    outputs: Sequence[Edge], weights: Sequence[float], like: Tensor, inputs: Sequence[Edge]
) -> float:
    """`‖∂(Σ wᵢ outputᵢ)/∂inputs‖₂`, never above the truth: Lanczos iteration on `JJᵀ`.

    Args:
        outputs: values of one shape, whose weighted sum moves.
        weights: of the sum.
        like: a tensor of their shape.
        inputs: values or parameters that move it; all count as one vector.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = x * torch.tensor([3.0, 1.0])
    >>> round(jacobian_norm([y], [2.0], y, [x]), 3)
    6.0
    """
    with torch.enable_grad():
        # Linear in u, so that the derivative by u of the product with v is the Jacobian times v, for any v.
        u = torch.zeros_like(like).requires_grad_()
        back = _grad(outputs, inputs, [weight * u for weight in weights], create_graph=True)
    moving = [(edge, one) for edge, one in zip(inputs, back, strict=True) if one is not None]
    if not moving:
        return 0.0
    edges, products = [edge for edge, _ in moving], [one for _, one in moving]
    vector = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
    vector /= vector.norm()
    basis: list[Tensor] = []
    across: list[list[Tensor]] = []  # the products of each image with all vectors so far
    found = [0.0, 0.0]
    for _ in range(min(STEPS, like.numel())):
        basis.append(vector)
        pulled = _grad(outputs, edges, [weight * vector for weight in weights])
        given = [
            torch.zeros_like(one) if new is None else new for one, new in zip(products, pulled, strict=True)
        ]
        (image,) = _grad(products, [u], given)
        if image is None:
            break
        across.append([(image * one).sum() for one in basis])
        found.append(_largest(across))
        # Twice, as one pass leaves rounding errors that grow from step to step.
        for _ in range(2):
            for one in basis:
                image = image - (image * one).sum() * one
        rest = image.norm()
        if found[-1] <= found[-3] * (1 + TOLERANCE) or float(rest) <= 1e-6 * found[-1] ** 2:
            break
        vector = image / rest
    return found[-1]


def _largest(across: Sequence[Sequence[Tensor]]) -> float:
    """The root of the largest eigenvalue of a symmetric matrix, given by its lower rows."""
    size = len(across)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for row, entries in enumerate(across):
        matrix[row, : row + 1] = torch.stack(list(entries)).double().cpu()
    return float(torch.linalg.eigvalsh(matrix).amax().clamp(min=0).sqrt())


def _grad(
    outputs: Sequence[Edge], inputs: Sequence[Edge], along: Sequence[Tensor], *, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    ends: Any = list(outputs)  # edges and tensors may be mixed, which torch's types do not say
    starts: Any = list(inputs)
    try:
        return torch.autograd.grad(
            ends,
            starts,
            list(along),
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        raise UseError(
            "the network is checkpointed, which hides its values from second derivatives: switch that off"
        ) from error
