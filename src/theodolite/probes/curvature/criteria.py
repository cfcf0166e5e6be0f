"""Two numbers of the loss-landscape literature that say how far a spectrum reaches below zero."""

from __future__ import annotations

import torch
from torch import Tensor


def eigenvalue_ratio(nodes: Tensor, weights: Tensor) -> Tensor:
    """`r_e = |λ_min/λ_max|` of each row of a quadrature.

    >>> eigenvalue_ratio(torch.tensor([[-1.0, 0.0, 4.0]]), torch.tensor([[0.1, 0.8, 0.1]]))
    tensor([0.2500])
    """
    there = weights > 0
    low = nodes.masked_fill(~there, torch.inf).amin(-1)
    high = nodes.masked_fill(~there, -torch.inf).amax(-1)
    return (low / high).abs()


def negative_to_positive(nodes: Tensor, weights: Tensor, power: float = 1.0) -> Tensor:
    """`K_Hn = Σ_{λ<0} |λw|ⁿ / Σ_{λ>0} (λw)ⁿ` of each row of a quadrature.

    >>> negative_to_positive(torch.tensor([[-1.0, 0.0, 4.0]]), torch.tensor([[0.2, 0.7, 0.1]]))
    tensor([0.5000])
    """
    terms = (nodes * weights).abs().pow(power)
    return (terms * (nodes < 0)).sum(-1) / (terms * (nodes > 0)).sum(-1)
