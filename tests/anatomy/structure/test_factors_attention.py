"""Numbers on queries, keys and values: the weight's own, or the scale of attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import theodolite as th
from theodolite import Size

TOKENS = torch.arange(6)[None]
HEADS = 2


class Attention(nn.Module):
    """`out(softmax(s·qᵀk)·v)`, with a number on all three projections, on queries alone, or on values."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        on_queries = 7.0 if self.way == "queries" else 1.0
        if self.way in ("fused", "split by axis"):
            y = self.qkv(y) * 5.0
            q, k, v = y.chunk(3, -1) if self.way == "fused" else y.unflatten(-1, (3, -1)).unbind(-2)
        else:
            q, k, v = self.q(y) * on_queries, self.k(y), self.v(y) * (5.0 if self.way == "values" else 1.0)
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
        if self.way == "split by axis":  # by hand, with another number behind the split
            mixed = ((q * 0.25) @ k.mT).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, scale=0.25)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def dissected(way: str) -> th.Anatomy:
    def build(width: int, depth: int) -> nn.Module:
        blocks = (Attention(width, way) for _ in range(depth))
        return nn.Sequential(nn.Embedding(6, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 6))

    return th.dissect(build, TOKENS, size=Size(16, 2))


@pytest.mark.parametrize("way", ["fused", "split by axis"])
def test_a_number_before_queries_and_keys_part_is_that_of_their_weight(way: str) -> None:
    anatomy = dissected(way)
    factors = {name: part.factor for name, part in anatomy.items() if part.factor != 1}
    assert factors == {"1.qkv.weight": 5.0, "2.qkv.weight": 5.0}
    assert [kind.scale for kind in anatomy.attentions] == [pytest.approx(0.25)] * 2


def test_a_number_on_queries_alone_is_the_scale_of_attention() -> None:
    anatomy = dissected("queries")
    assert {part.factor for part in anatomy.values()} == {1.0}
    assert [kind.scale for kind in anatomy.attentions] == [pytest.approx(7 * 0.25)] * 2


def test_a_number_on_values_is_that_of_their_weight() -> None:
    anatomy = dissected("values")
    factors = {name: part.factor for name, part in anatomy.items() if part.factor != 1}
    assert factors == {"1.v.weight": 5.0, "2.v.weight": 5.0}
    assert math.isclose(anatomy.attentions[0].scale or math.nan, 0.25)
