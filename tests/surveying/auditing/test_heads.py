"""The scale of attention logits, and multipliers of queries and keys that the trace shows as a part of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from theodolite import Size, Workload
from theodolite.anatomy import AttentionHeads
from theodolite.surveying.auditing.audit import audit
from theodolite.surveying.auditing.heads import heads_off
from theodolite.surveying.auditing.report import Audit

from .hand_made import VOCAB, batch, loss

WIDTHS = 32, 64, 128


def heads(dim: int, scale: float | None) -> tuple[AttentionHeads]:
    return (AttentionHeads(dim, True, scale, None),)


def test_a_scale_by_the_root_of_growing_heads_is_off_by_a_half() -> None:
    (off,) = heads_off(WIDTHS, [heads(8, 8**-0.5), heads(16, 16**-0.5), heads(32, 32**-0.5)])
    assert (off.heads.head_dim, round(off.own, 6), off.rule) == (8, -0.5, -1)
    assert heads_off(WIDTHS, [heads(8, 0.3), heads(16, 0.15), heads(32, 0.075)]) == ()


def test_a_fixed_head_dimension_needs_a_fixed_scale() -> None:
    assert heads_off(WIDTHS[:2], [heads(8, 0.3), heads(8, 0.3)]) == ()
    (off,) = heads_off(WIDTHS, [heads(8, 0.3), heads(8, 0.15), heads(8, 0.075)])
    assert (round(off.own, 6), off.rule) == (-1, 0)
    (off,) = heads_off([32, 128], [heads(8, 0.4), heads(8, 0.1)])
    assert round(off.own, 6) == -1
    assert heads_off(WIDTHS[:2], [heads(8, None), heads(8, 0.1)]) == ()


class UnitScaled(nn.Module):
    """As in u-muP: initial values of one, and every weight multiplied by one over the root of its fan-in."""

    def __init__(self, width: int, depth: int, faults: tuple[str, ...]) -> None:
        super().__init__()
        self.width, self.faults = width, faults
        self.table = nn.Embedding(VOCAB, width)
        names = "query", "key", "value", "out"
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in names}) for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCAB, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        def multiplied(block: Any, name: str, x: Tensor) -> Tensor:
            made: Tensor = block[name](x)
            return made if name in self.faults else made / math.sqrt(self.width)

        def normed(x: Tensor) -> Tensor:
            return functional.rms_norm(x, (self.width,))

        x, scale = self.table(tokens), 1 / 8
        if "scale" in self.faults:
            scale *= math.sqrt(self.width)
        for block in self.blocks:
            q, k, v = (
                multiplied(block, name, normed(x)).unflatten(-1, (-1, 8)).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            x = x + multiplied(block, "out", mixed.transpose(1, 2).flatten(2))
        return self.head(normed(x)) * (4 / self.width)


def audited(*faults: str, kind: type[Optimizer] = AdamW, train: bool = False) -> Audit:
    """An audit of u-muP along the width, with the faults."""

    def build(width: int, depth: int) -> nn.Module:
        return UnitScaled(width, depth, faults)

    def make(model: Any) -> Optimizer:
        groups = []
        for name, weight in model.named_parameters():
            rate = model.width**-0.5 if name.startswith("blocks") else 1.0
            if kind is SGD:  # the square of the factor of each: 1/√n of hidden weights, whose rate would be 1
                rate = float(model.width)
            groups.append({"params": [weight], "lr": 0.01 * rate, "weight_decay": 0.1 / rate})
        return kind(groups)  # type: ignore[call-arg]

    workload = Workload("unit-scaled", build, batch, loss, Size(32, 2))
    return audit(workload, optimizer=make, depths=[2], train=train)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_multipliers_of_queries_and_keys_are_no_scale_of_their_logits(kind: type[Optimizer]) -> None:
    found = audited(kind=kind)
    assert found.right
    multiplied = {one.name for one in found.width if one.multiplied == pytest.approx(-0.5)}
    assert multiplied == {f"blocks.*.{name}.weight" for name in ("query", "key", "value", "out")}


def test_the_spectral_condition_does_not_doubt_multipliers_that_it_has_not_seen() -> None:
    said = " ".join(audited(train=True).trained)
    assert "query" not in said
    assert "key" not in said


def test_a_scale_that_is_off_besides_is_found() -> None:
    ((finding),) = audited("scale").at("fail")
    assert finding.code == "TH209"
    assert "the scale of their logits goes as width^0.5" in finding.sentence


def test_values_without_their_multiplier_are_not_taken_for_queries() -> None:
    found = audited("value")
    tensors = {str(row["tensor"]) for one in found.at("fail") for row in one.evidence.rows}
    assert "blocks.*.value.weight" in tensors
