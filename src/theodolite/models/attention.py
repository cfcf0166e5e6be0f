"""Causal attention with heads of a fixed dimension and rotary positions."""

# B batch, T tokens, D width, H query heads, K key/value heads, C head dimension, R = C/2 rotated pairs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.models.options import require_multiple, require_positive
from theodolite.models.residual import MakeNorm

Rotation = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal self-attention, `W_o softmax(q kᵀ/√C + causal) v`.

    The head dimension is fixed, so the number of heads grows with width and the logits keep their scale.

    Args:
        width: features of the stream.
        head_dim: dimension C of each head.
        kv_heads: number of key/value heads, each shared by an equal group of query heads
            (grouped-query attention); None means one for each query head.
        bias: do the four projections have biases?
        qk_norm: makes the norms of queries and keys over the head dimension; None for no norms.

    The first token can only see itself, so there the branch is `W_o W_v x`:

    >>> attention = Attention(8, head_dim=4)
    >>> x_BTD = torch.randn(1, 3, 8)
    >>> alone_BD = attention.out(attention.value(x_BTD[:, 0]))
    >>> torch.allclose(attention(x_BTD)[:, 0], alone_BD, atol=1e-6)
    True

    References:
        Vaswani et al., Attention is all you need, 2017. Ainslie et al., GQA, 2023.
    """

    def __init__(
        self,
        width: int,
        *,
        head_dim: int,
        kv_heads: int | None = None,
        bias: bool = False,
        qk_norm: MakeNorm | None = None,
    ) -> None:
        super().__init__()
        require_positive(head_dim=head_dim)
        require_multiple("width", width, head_dim, "heads have head_dim dimensions")
        heads = width // head_dim
        kv_heads = heads if kv_heads is None else kv_heads
        require_positive(kv_heads=kv_heads)
        if heads % kv_heads:
            raise UseError(
                f"kv_heads is {kv_heads}, but width {width} has {heads} heads of {head_dim}: "
                f"give a divisor of {heads}, or None for one key/value head per head"
            )
        self.head_dim = head_dim
        self.group = heads // kv_heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.query_norm = qk_norm(head_dim) if qk_norm else nn.Identity()
        self.key_norm = qk_norm(head_dim) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_BTD: Tensor, rotation: Rotation | None = None) -> Tensor:
        """What the branch adds to the stream; `rotation` turns queries and keys by their positions."""
        q_BHTC = self.query_norm(self._split(self.query(x_BTD)))
        k_BKTC = self.key_norm(self._split(self.key(x_BTD)))
        v_BKTC = self._split(self.value(x_BTD))
        if rotation is not None:
            q_BHTC, k_BKTC = rotate(q_BHTC, rotation), rotate(k_BKTC, rotation)
        if self.group > 1:
            k_BKTC = k_BKTC.repeat_interleave(self.group, dim=1)
            v_BKTC = v_BKTC.repeat_interleave(self.group, dim=1)
        mixed_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BKTC, v_BKTC, is_causal=True)
        return self.out(mixed_BHTC.transpose(1, 2).flatten(2))

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def make_rotation(length: int, head_dim: int, like: Tensor, *, base: float = 10_000.0) -> Rotation:
    """Cosines and sines of `t·base^(−r/R)` for positions t and pairs r, on the device of `like`.

    Computed in every forward pass rather than kept in a buffer: a model built on the meta device
    and materialised later would find garbage in it.

    >>> cos_TR, sin_TR = make_rotation(2, 2, torch.zeros(1))
    >>> (cos_TR[1] ** 2 + sin_TR[1] ** 2).round(decimals=5), sin_TR[0]
    (tensor([1.]), tensor([0.]))
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    pairs = head_dim // 2
    frequency_R = base ** (-torch.arange(pairs, device=like.device, dtype=dtype) / pairs)
    angle_TR = torch.arange(length, device=like.device, dtype=dtype)[:, None] * frequency_R
    return angle_TR.cos(), angle_TR.sin()


def rotate(x_BHTC: Tensor, rotation: Rotation) -> Tensor:
    """Turn pair r at position t by its angle, so that `q·k` depends on the distance of two positions only.

    >>> quarter = (torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), quarter)
    tensor([[[[0., 1.]]]])

    References:
        Su et al., RoFormer, 2021.
    """
    cos_TR, sin_TR = rotation
    a_BHTR, b_BHTR = x_BHTC.chunk(2, dim=-1)
    turned_BHTC = torch.cat((a_BHTR * cos_TR - b_BHTR * sin_TR, b_BHTR * cos_TR + a_BHTR * sin_TR), dim=-1)
    return turned_BHTC.to(x_BHTC.dtype)
