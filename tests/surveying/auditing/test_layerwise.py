"""Layer-wise decay of learning rates is no dependence on depth."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from theodolite.core.size import Size
from theodolite.surveying.auditing.exponents import scalings
from theodolite.surveying.auditing.layerwise import LayerwiseDecay, layerwise_decay
from theodolite.surveying.auditing.reading import read
from theodolite.workloads import Workload

from .hand_made import batch, building, loss, make_groups, recipe

DEPTHS = [Size(32, 2), Size(32, 4), Size(32, 8)]


def decaying(rate):
    """As timm does: the embedding, the blocks, the head, each `rate` times the next."""

    def make(model):
        count = len(model.blocks)
        groups = make_groups(model)
        for group, (name, _) in zip(groups, model.named_parameters(), strict=True):
            layer = count + 1
            if name.startswith("blocks"):
                layer = int(name.split(".")[1]) + 1
            elif name.startswith(("wte", "wpe")):
                layer = 0
            group["lr"] *= rate(count, layer)
        return AdamW(groups)

    return make


def readings(rate):
    workload = Workload("mine", building(recipe()), batch, loss)
    return [read(workload, decaying(rate), size, batch=batch(0, 0)) for size in DEPTHS]


def test_the_factor_is_that_of_adjacent_blocks():
    found = layerwise_decay(readings(lambda count, layer: 0.75 ** (count + 1 - layer)))
    assert found is not None
    assert found.factor == pytest.approx(0.75)


def test_equal_learning_rates_are_no_layer_wise_decay():
    assert layerwise_decay(readings(lambda count, layer: 1.0)) is None
    assert layerwise_decay(readings(lambda count, layer: 1 / count)) is None


def test_factors_that_differ_between_blocks_or_depths_are_no_layer_wise_decay():
    assert layerwise_decay(readings(lambda count, layer: 1 / (count + 2 - layer))) is None
    assert layerwise_decay(readings(lambda count, layer: (1 - 1 / count) ** (count + 1 - layer))) is None


def test_depths_are_compared_at_equal_distances_from_the_end():
    for one in scalings(readings(lambda count, layer: 0.75 ** (count + 1 - layer)), "depth"):
        assert one.exponent("lr").excess == pytest.approx(0, abs=1e-6), one.name


def test_a_learning_rate_that_also_falls_with_depth_is_still_seen():
    """Of the blocks and the tables; the readout and its norm stay."""

    def rate(count, layer):
        return 0.75 ** (count + 1 - layer) * (2 / count if layer <= count else 1)

    found = {one.name: one.exponent("lr").excess for one in scalings(readings(rate), "depth")}
    assert found["blocks.*.mlp.up.weight"] == pytest.approx(-1, abs=1e-6)
    assert found["head.weight"] == pytest.approx(0, abs=1e-6)


class Block(nn.Module):
    """A branch of one layer, or of two in every second block."""

    def __init__(self, width, place):
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False) if place % 2 == 0 else nn.Identity()

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Alternating(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(Block(width, place) for place in range(depth))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_between_tensors_that_are_two_blocks_apart_the_factor_counts_twice():
    def make(model):
        groups = [
            {"params": block.parameters(), "lr": 0.5 ** (4 - n)} for n, block in enumerate(model.blocks)
        ]
        rest = [*model.first.parameters(), *model.last.parameters()]
        return AdamW([*groups, {"params": rest, "lr": 1.0}])

    def drawn(seed, step):
        return torch.ones(2, 8), torch.zeros(2, dtype=torch.long)

    workload = Workload("alternating", Alternating, drawn, nn.functional.cross_entropy)
    reading = read(workload, make, Size(16, 4), batch=drawn(0, 0))
    assert layerwise_decay([reading]) == LayerwiseDecay(0.5)
