"""Which tensor at base size a tensor corresponds to."""

import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from theodolite import Size, UseError, dissect
from theodolite.planning.counterparts import counterparts

from .zoo import INPUTS, Zoo


class Kinds(nn.Module):
    """A block of each of these kinds."""

    def __init__(self, width, kinds):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(nn.ModuleDict({kind: mlp(width)}) for kind in kinds)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            for branch in layer.values():
                x = x + branch(x)
        return self.last(x)


def mlp(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def partners(build, target, base):
    found = counterparts(dissect(build, INPUTS, size=target), dissect(build, INPUTS, size=base))
    return {name: part.name for name, part in found.items()}


@pytest.mark.parametrize("depth, base_depth", [(6, 2), (5, 2), (4, 4), (7, 3), (2, 6), (1, 4)])
def test_block_l_of_L_corresponds_to_block_floor_of_l_times_the_ratio(depth, base_depth):
    found = partners(Zoo, Size(32, depth), Size(16, base_depth))
    for name, partner in found.items():
        if match := re.fullmatch(r"blocks\.(\d+)\.(.*)", name):
            block, rest = int(match[1]), match[2]
            assert partner == f"blocks.{block * base_depth // depth}.{rest}"
        else:
            assert partner == name


def test_blocks_of_several_kinds_meet_the_nearest_of_their_kind():
    def build(width, depth):
        return Kinds(width, [("dense", "sparse")[layer % 2] for layer in range(depth)])

    found = partners(build, Size(32, 8), Size(16, 4))
    assert found["layers.0.dense.0.weight"] == "layers.0.dense.0.weight"
    # Blocks 2 and 3 of 8 both lie at block 1 of 4, which is of the kind of block 3 only.
    assert found["layers.3.sparse.0.weight"] == "layers.1.sparse.0.weight"
    assert found["layers.2.dense.0.weight"] == "layers.0.dense.0.weight"
    assert found["layers.6.dense.2.bias"] == "layers.2.dense.2.bias"
    assert found["layers.7.sparse.2.bias"] == "layers.3.sparse.2.bias"


def test_numbers_inside_of_a_block_are_kept_apart():
    found = partners(Zoo, Size(32, 4), Size(16, 2))
    assert len(found) == len(set(found)) == 6 + 4 * 14
    found = partners(lambda width, depth: Kinds(width, ["mlp"] * depth), Size(32, 4), Size(16, 2))
    assert found["layers.3.mlp.0.weight"] == "layers.1.mlp.0.weight"
    assert found["layers.3.mlp.2.weight"] == "layers.1.mlp.2.weight"


def test_a_kind_of_block_that_the_base_does_not_have_is_named():
    def build(width, depth):
        return Kinds(width, ["dense"] * min(depth, 2) + ["sparse"] * (depth - 2))

    with pytest.raises(UseError) as caught:
        partners(build, Size(32, 8), Size(16, 2))
    said = str(caught.value)
    assert "layers.2.sparse.0.weight in block 2 of 8 has no counterpart at the base size 16 × 2" in said
    assert "2 blocks" in said
    assert "Choose a base at which every kind of tensor and block occurs" in said


def test_a_tensor_outside_of_the_blocks_that_the_base_does_not_have_is_named():
    class WithNorm(Kinds):
        def __init__(self, width, depth):
            super().__init__(width, ["mlp"] * depth)
            if depth >= 2:
                self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3))

    with pytest.raises(UseError, match=r"last.0.weight has no counterpart at the base size 16 × 1"):
        partners(WithNorm, Size(32, 2), Size(16, 1))


def test_a_tensor_whose_role_changes_on_the_way_is_named():
    def build(width, depth):  # a bottleneck that stops growing
        return nn.Sequential(
            nn.Linear(8, min(width, 64)), nn.Linear(min(width, 64), width), nn.Linear(width, 3)
        )

    with pytest.raises(UseError) as caught:
        partners(build, Size(256, 1), Size(16, 1))
    said = str(caught.value)
    assert "1.weight is input at 256 × 1 and hidden at 16 × 1: shapes (256, 64) and (16, 16)" in said
    assert 'say what it is: roles={"1.weight": …}' in said


def test_stages_of_a_network_are_not_mixed_up():
    """Three stages, one of which gets deeper: at equal width no ratio is anything but one."""

    class Staged(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.first = nn.Linear(8, width)
            self.stages = nn.ModuleList(
                nn.ModuleList(
                    nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))
                    for _ in range(blocks)
                )
                for size, blocks in ((width, 2), (2 * width, depth), (4 * width, 2))
            )
            self.widen = nn.ModuleList([nn.Linear(width, 2 * width), nn.Linear(2 * width, 4 * width)])
            self.last = nn.Linear(4 * width, 3)

        def forward(self, x):
            x = self.first(x)
            for number, stage in enumerate(self.stages):
                for block in stage:
                    x = x + block(x)
                if number < 2:
                    x = self.widen[number](x)
            return self.last(x)

    target, base = (dissect(Staged, INPUTS, size=Size(32, depth)) for depth in (9, 3))
    found = counterparts(target, base)
    assert {part.fan_in / found[name].fan_in for name, part in target.items()} == {1.0}
    assert {part.fan_out / found[name].fan_out for name, part in target.items()} == {1.0}


@pytest.mark.parametrize("more", [0, 8])
def test_numbers_inside_a_piece_of_a_name_may_differ(more):
    """Also where fans are not in proportion to the width."""

    class Recurrent(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            inner = width + more
            self.first, self.last = nn.Linear(8, inner), nn.Linear(inner, 3)
            self.cells = nn.ModuleDict({f"layer_{k}": nn.Linear(inner, inner) for k in range(depth)})

        def forward(self, x):
            x = self.first(x)
            for cell in self.cells.values():
                x = cell(x).relu()
            return self.last(x)

    found = partners(Recurrent, Size(32, 4), Size(16, 2))
    assert found["cells.layer_3.weight"] == "cells.layer_1.weight"


def stack(width, depth):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), *layers, nn.Linear(width, 3))


class Listed(nn.Module):
    """Weights in one list and biases in another."""

    def __init__(self, width, depth):
        super().__init__()
        fans = [8, *[width] * (depth + 1), 3]
        self.biases = nn.ParameterList(torch.rand(size) for size in fans[1:])
        self.weights = nn.ParameterList(torch.randn(pair) for pair in pairwise(fans))

    def forward(self, x):
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = (x @ weight + bias).tanh()
        return x


@pytest.mark.parametrize("build", [stack, Listed])
def test_a_bias_goes_with_the_weight_it_is_added_to(build):
    found = partners(build, Size(16, 5), Size(16, 2))
    biases = {name: partner for name, partner in found.items() if "bias" in name}
    assert len(biases) == 7
    for name, partner in biases.items():
        weight = name.replace("biases", "weights").replace("bias", "weight")
        assert partner == found[weight].replace("weights", "biases").replace("weight", "bias")
    first, *inner, last = list(biases.values())
    assert first == next(iter(biases))
    assert {first, last}.isdisjoint(inner)


def test_biases_of_convolutions_and_of_the_norms_behind_them_are_kept_apart():
    def build(width, depth):
        def layer(fan_in):
            return nn.Conv2d(fan_in, width, 3), nn.BatchNorm2d(width), nn.ReLU()

        inner = [module for _ in range(depth) for module in layer(width)]
        return nn.Sequential(*layer(2), *inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))

    images = torch.zeros(2, 2, 12, 12)
    target, base = (dissect(build, images, size=Size(8, depth)) for depth in (4, 2))
    found = {name: part.name for name, part in counterparts(target, base).items()}
    for layer in range(5):  # the modules of layer n are 3n and 3n + 1
        partner = 0 if layer == 0 else 1 + (layer - 1) // 2
        for module, kind in ((0, "weight"), (0, "bias"), (1, "weight"), (1, "bias")):
            assert found[f"{3 * layer + module}.{kind}"] == f"{3 * partner + module}.{kind}"


def test_biases_of_a_recurrent_network_go_with_their_layer():
    class Recurrent(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.cells, self.last = nn.LSTM(8, width, depth), nn.Linear(width, 3)

        def forward(self, x):
            return self.last(self.cells(x)[0])

    found = partners(Recurrent, Size(16, 4), Size(16, 2))
    for layer, partner in enumerate((0, 1, 1, 1)):
        assert found[f"cells.weight_ih_l{layer}"] == f"cells.weight_ih_l{partner}"
        assert found[f"cells.bias_ih_l{layer}"] == f"cells.bias_ih_l{partner}"


def test_a_table_that_only_the_first_block_reads_is_itself_at_every_depth():
    class First(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.embed, self.table = nn.Linear(3, width), nn.Linear(3, width)
            self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
            self.head = nn.Linear(width, 2)

        def forward(self, x):
            h = self.embed(x)
            for number, block in enumerate(self.blocks):
                h = h + block(torch.relu(h + (self.table(x) if number == 0 else 0)))
            return self.head(h)

    one, many = (dissect(First, torch.zeros(2, 3), size=Size(32, depth)) for depth in (1, 4))
    assert (one["table.weight"].block, many["table.weight"].block) == (None, 0)
    for target, base in ((many, one), (one, many)):
        assert counterparts(target, base)["table.weight"] is base["table.weight"]
