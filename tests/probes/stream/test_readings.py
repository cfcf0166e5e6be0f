"""The largest value is found wherever it is; masks are none, what is no finite number is an overflow."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.probes.stream.stream import stream
from theodolite.workloads import next_token_loss

TOKENS = torch.arange(16).reshape(2, 8)
FUTURE = torch.ones(8, 8).triu(1)


class Attending(nn.Module):
    """One block of attention with a mask of one's own; `seen` are the scores that may be looked at."""

    def __init__(self, fill: float, how: str) -> None:
        super().__init__()
        self.fill, self.how, self.seen = fill, how, math.nan
        self.embed, self.norm = nn.Embedding(16, 32), nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.readout = nn.Linear(32, 16)
        nn.init.normal_(self.query.weight)  # the scores are the largest of all values
        nn.init.normal_(self.key.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        scores = self.query(y) @ self.key(y).transpose(1, 2) * 2
        self.seen = scores.detach().abs().max().item()
        if self.how == "filled":
            scores = scores.masked_fill(FUTURE.bool(), self.fill) * 1.0
        elif self.how == "added":
            scores = scores + torch.where(FUTURE.bool(), self.fill, 0.0)
        elif self.how == "subtracted":  # … and moved, and joined by another
            scores = (scores - FUTURE * -self.fill).view(-1, 8)
            scores = torch.cat([scores, torch.zeros(16, 1)], dim=1)
            scores = (scores - scores.amax(1, keepdim=True).detach() * 0)[:, :8].view(2, 8, 8)
        elif self.how == "scattered":
            below = torch.full_like(scores, self.fill)
            scores = below.scatter(2, torch.arange(8).expand(2, 8, 8), scores) + FUTURE * self.fill
        return self.readout(x + self.out(scores.softmax(-1) @ self.value(y)))


@pytest.mark.parametrize("how", ["filled", "added", "subtracted", "scattered"])
@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_masks_are_no_large_values_in_whatever_way_they_are_made(how: str, fill: float) -> None:
    model = Attending(fill, how)
    found = stream(model, next_token_loss, (TOKENS, TOKENS), skip=False).largest
    model(TOKENS)  # the probe takes back what a pass has set
    assert found.value == pytest.approx(model.seen, rel=1e-4)
    assert found.where == "block 0, branch 0"


def test_a_score_that_is_too_large_is_seen_beside_a_mask() -> None:
    model = Attending(-1e4, "added")
    with torch.no_grad():
        model.query.weight.mul_(1000)
    assert stream(model, next_token_loss, (TOKENS, TOKENS), skip=False).largest.headroom < 0


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 8, generator=generator).to(dtype), torch.arange(16) % 10


@pytest.mark.parametrize(
    "factor, dtype", [(1e4, torch.float16), (1e30, torch.float32), (math.nan, torch.float32)]
)
def test_what_is_no_finite_number_is_an_overflow(factor: float, dtype: torch.dtype) -> None:
    model = th.models.ResidualMLP(32, 3, inputs=8)
    with torch.no_grad():
        for layer in (0, 1):
            model.blocks[1].layers[layer].weight.mul_(factor)
    found = stream(model.to(dtype), F.cross_entropy, batch(dtype), skip=False)
    assert found.largest.value == math.inf
    assert found.largest.headroom == -math.inf
    assert found.largest.where == "block 1, branch 0"
    assert "no headroom: some values are not finite" in str(found)
    assert not found.massive


def test_half_precision_up_to_its_end() -> None:
    """What float16 can hold is as large in float16 as it is in float32."""
    model = th.models.ResidualMLP(32, 3, inputs=8)
    with torch.no_grad():
        model.readout.weight.mul_(65504 / 1.3 / model(batch()[0]).abs().max())
    whole = stream(model, F.cross_entropy, batch(), skip=False).largest
    half = stream(model.half(), F.cross_entropy, batch(torch.float16), skip=False).largest
    assert half.value == pytest.approx(whole.value, rel=0.01)
    assert whole.headroom == pytest.approx(math.log2(1.3), rel=0.01)


@pytest.mark.parametrize(
    "part, factor, where",
    [("embed", math.nan, "before the first block"), ("readout", 1e4, "after the last block")],
)
def test_outside_of_the_blocks(part: str, factor: float, where: str) -> None:
    model = th.models.GPT(32, 2, vocab=16)
    with torch.no_grad():
        getattr(model, part).weight.mul_(factor)
    assert stream(model, next_token_loss, (TOKENS, TOKENS), skip=False).largest.where == where


def test_columns_of_one_entry_are_taken_for_statistics_and_not_looked_at() -> None:
    model = th.models.ResidualMLP(1, 2, inputs=8, outputs=1)
    found = stream(model, F.mse_loss, (batch()[0], torch.ones(16, 1)), skip=False)
    assert math.isnan(found.largest.headroom)
    assert "float16   not known" in str(found)
