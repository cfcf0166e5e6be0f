"""How far one value of a forward pass moves with another, at the data: the norm of a Jacobian."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from theodolite.errors import UseError

Edge = GradientEdge | Tensor
"""Where autograd hands on a gradient, as of `theodolite.anatomy.rerun`."""

STEPS = 30
TOLERANCE = 1e-3
"""Of the change in one step, where the iteration ends."""


def jacobian_norm(
    outputs: Sequence[Edge], weights: Sequence[float], like: Tensor, inputs: Sequence[Edge]
) -> float:
    """`‖∂(Σ wᵢ outputᵢ)/∂inputs‖₂`, by power iteration: never above the truth.

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
    generator = torch.Generator().manual_seed(0)
    vector = [torch.randn(one.shape, generator=generator).to(one) for one in products]
    found = 0.0
    for _ in range(STEPS):
        size = _length(vector)
        if size == 0:
            break
        vector = [one / size for one in vector]
        (image,) = _grad(products, [u], vector)
        if image is None:
            break
        last, found = found, max(found, _length([image]))
        if found <= last * (1 + TOLERANCE):
            break
        pulled = _grad(outputs, edges, [weight * image for weight in weights])
        vector = [
            torch.zeros_like(one) if new is None else new for one, new in zip(products, pulled, strict=True)
        ]
    return found


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


def _length(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([one.detach().double().square().sum() for one in tensors]).sum().sqrt())
