"""Layers that several families of the gallery are made of."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

HEAD = 8
"""Entries of a head; the number of heads follows the width."""

SMALL_LR = 2.0**-12
"""For slopes of small changes: three steps of it move activations by a few percent."""


def start_small(module: nn.Module) -> None:
    """The initialisation of BERT and ViT: weights of std 0.02, biases of 0.

    Branches start small beside the stream. Otherwise the stream of a shallow network consists of what its
    branches put out at the start, which falls as 1/√depth, and a norm behind it would show that.
    """
    for child in module.modules():
        if isinstance(child, nn.Linear):
            nn.init.normal_(child.weight, std=0.02)
            nn.init.zeros_(child.bias)


class Attention(nn.Module):
    """Multi-head attention of `x` to `context`, which is `x` itself where none is given."""

    def __init__(self, width: int, context: int | None = None) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(context or width, width)
        self.value = nn.Linear(context or width, width)
        self.out = nn.Linear(width, width)
        start_small(self)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """What `x` takes from the context."""
        context = x if context is None else context
        q, k, v = self.query(x), self.key(context), self.value(context)
        q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner or 2 * width), nn.Linear(inner or 2 * width, width)
        start_small(self)

    def forward(self, x: Tensor) -> Tensor:
        """Up, bent, down."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A transformer's block with norms before its branches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Two residual branches."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))
