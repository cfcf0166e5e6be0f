"""FlexAttention, checkpoints and control flow in operators are seen as the operations they stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import theodolite as th
from theodolite.core.calling import call
from theodolite.core.size import Size
from theodolite.workloads import next_token_loss

VOCAB, TOKENS = 11, 8


def _sdpa(block: Block, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _flex(block: Block, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def _compiled(block: Block, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return torch.compile(flex_attention)(q, k, v, block_mask=mask, enable_gqa=True)


def _learned(block: Block, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + block.slopes[h] * (j - i) + block.distances[h, i - j]

    return flex_attention(q, k, v, score_mod=add, block_mask=mask, enable_gqa=True)


def _plainly(block: Block, x: Tensor) -> Tensor:
    return x + block.feed(x)


def _checkpointed(block: Block, x: Tensor, *, reentrant: bool) -> Tensor:
    return checkpoint(_plainly, block, x, use_reentrant=reentrant)


def _on_condition(block: Block, x: Tensor) -> Tensor:
    return torch.cond(x.sum() < 1e9, lambda x: x + block.feed(x), lambda x: x - block.feed(x), (x,))


def _in_a_loop(block: Block, x: Tensor) -> Tensor:
    once = torch.zeros((), dtype=torch.long)
    return torch.while_loop(lambda i, x: i < 1, lambda i, x: (i + 1, x + block.feed(x)), (once, x))[1]


class Block(nn.Module):
    def __init__(self, width: int, attend: Callable[..., Tensor], add: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.add = attend, add
        self.heads = width // 4
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        if attend is _learned:
            self.slopes = nn.Parameter(torch.zeros(self.heads))
            self.distances = nn.Parameter(torch.zeros(self.heads, TOKENS))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (-1, 4)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.heads // 2, self.heads // 2], dim=1)
        x = x + self.out(self.attend(self, q, k, v, mask).transpose(1, 2).flatten(2))
        return self.add(self, x)


class Model(nn.Module):
    def __init__(
        self,
        width: int,
        depth: int,
        attend: Callable[..., Tensor] = _sdpa,
        add: Callable[..., Tensor] = _plainly,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, attend, add) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


INPUTS = torch.arange(2 * TOKENS).reshape(2, TOKENS) % VOCAB
WAYS = {
    "flex": {"attend": _flex},
    "flex, compiled": {"attend": _compiled},
    "checkpoint": {"add": partial(_checkpointed, reentrant=False)},
    "reentrant checkpoint": {"add": partial(_checkpointed, reentrant=True)},
    "cond": {"add": _on_condition},
    "while_loop": {"add": _in_a_loop},
}


@pytest.fixture(scope="module")
def expected() -> str:
    return str(th.dissect(Model, INPUTS, size=Size(16, 2)))


@pytest.mark.parametrize("way", WAYS)
def test_an_operator_is_seen_as_what_it_computes(way: str, expected: str) -> None:
    assert str(th.dissect(partial(Model, **WAYS[way]), INPUTS, size=Size(16, 2))) == expected


def test_numbers_that_a_score_mod_looks_up_are_biases_and_a_plan_covers_them() -> None:
    plan = th.plan(partial(Model, attend=_learned), INPUTS, size=Size(32, 2), base=Size(16, 2), lr=0.01)
    rows = plan.rows
    for name in ("blocks.0.slopes", "blocks.1.distances"):
        assert rows[name].role == "bias"
        assert rows[name].lr == rows["embed.weight"].lr


@pytest.mark.parametrize("attend", [_flex, _compiled])
def test_flex_attention_trains_on_the_cpu_as_attention_does(attend: Callable[..., Tensor]) -> None:
    gradients = []
    for way in (_sdpa, attend):
        torch.manual_seed(0)
        model = Model(16, 1, attend=way)
        next_token_loss(call(model, INPUTS), INPUTS).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_flex_attention_is_differentiated_twice() -> None:
    sharpest = []
    for way in (_sdpa, _flex):
        torch.manual_seed(0)
        model = Model(16, 1, attend=way)
        operator = th.probes.hessian(model, next_token_loss, (INPUTS, INPUTS))
        generator = torch.Generator().manual_seed(0)
        sharpest.append(operator @ torch.randn(operator.size, generator=generator))
    torch.testing.assert_close(*sharpest)
