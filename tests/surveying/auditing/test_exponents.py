"""Exponents of initial values and options, against the powers that a recipe is written with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from theodolite.core.size import Size
from theodolite.surveying.auditing.exponents import Series, power, scalings
from theodolite.surveying.auditing.reading import read
from theodolite.workloads import Workload

from .hand_made import batch, building, loss, make_optimizer, recipe

WIDTHS, DEPTHS = [Size(32, 2), Size(64, 2), Size(128, 2)], [Size(32, 2), Size(32, 4), Size(32, 8)]


def along(axis, build, make, sizes=None, drawn=None, lossy=loss):
    workload = Workload("mine", build, batch, lossy)
    drawn = batch(0, 0) if drawn is None else drawn
    sizes = sizes or {"width": WIDTHS, "depth": DEPTHS}[axis]
    readings = [read(workload, make, size, batch=drawn) for size in sizes]
    return {one.name: one for one in scalings(readings, axis)}


def test_a_power_law_is_recovered_exactly_and_zeros_stay_zeros():
    assert power((1, 2, 4), (5.0, 10.0, 20.0)) == 1.0
    assert power((1, 3, 9), (9.0, 3.0, 1.0)) == -1.0
    assert power((1, 2), (0.0, 0.0)) == 0.0
    assert math.isnan(power((1, 2), (1.0, 0.0)))
    assert math.isnan(power((1, 1), (1.0, 2.0)))


def test_an_exponent_that_is_one_too_large_is_ten_times_at_ten_times_the_size():
    assert Series((1, 1, 1), (1, 1 / 2, 1 / 4)).exponent((1, 2, 4)).at_ten_times == pytest.approx(10)
    assert Series((1, 1 / 2), (1, 1)).exponent((1, 2)).at_ten_times == pytest.approx(0.1)


def test_completep_of_adamw_along_the_width_is_its_table():
    """Table 1 of arXiv 2505.01618: lr, std and eps of each kind of tensor."""
    found = along("width", building(recipe()), make_optimizer)
    powers = {
        name: tuple(one.exponent(quantity).own for quantity in ("lr", "init", "decay", "eps"))
        for name, one in found.items()
    }
    assert powers["wte.weight"] == (0, 0, 0, -1)
    assert powers["blocks.*.attn.qkv.weight"] == (-1, -0.5, 0, -1)
    assert powers["head.weight"] == (0, 0, 0, -1)
    assert found["head.weight"].multiplied == -1
    assert found["blocks.*.mlp.down.weight"].multiplied == 0
    assert set(found["blocks.*.mlp.down.weight"].tensors) == {f"blocks.{i}.mlp.down.weight" for i in (0, 1)}
    assert all(abs(one.exponent("lr").excess) < 1e-6 for one in found.values())
    assert all(abs(one.exponent("init").excess) < 1e-6 for one in found.values())


def test_along_the_depth_the_branch_multiplier_is_the_network_s_own():
    found = along("depth", building(recipe()), make_optimizer)
    assert found["blocks.*.mlp.down.weight"].multiplied == -1
    assert found["blocks.*.mlp.up.weight"].multiplied == 0
    assert found["blocks.*.mlp.down.weight"].growth == (1, 2, 4)
    assert all(abs(one.exponent(what).excess) < 1e-6 for one in found.values() for what in ("lr", "init"))


@pytest.mark.parametrize("power_of_width", [0.5, -0.5, 1.0])
def test_a_multiplier_is_traded_against_std_and_learning_rate(power_of_width):
    """AdamW: W times a, with std and learning rate divided by a, is the same training at every width."""

    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.factor = (width / 32) ** power_of_width
            self.first, self.last = nn.Linear(8, width, bias=False), nn.Linear(width, 2, bias=False)
            self.hidden = nn.Linear(width, width, bias=False)
            for layer in (self.first, self.last, self.hidden):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            with torch.no_grad():
                self.first.weight /= self.factor
                self.last.weight *= (32 / width) ** 0.5
            self.width = width

        def forward(self, x):
            return self.last(torch.tanh(self.hidden(torch.tanh(self.first(x) * self.factor))))

    def make(model):
        return AdamW(
            [
                {"params": model.first.parameters(), "lr": 0.1 / model.factor},
                {"params": [*model.hidden.parameters(), *model.last.parameters()], "lr": 3.2 / model.width},
            ]
        )

    drawn = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
    sizes = [Size(width, 1) for width in (32, 64, 128)]
    found = along("width", Net, make, sizes, drawn, nn.functional.cross_entropy)
    first = found["first.weight"]
    assert first.multiplied == pytest.approx(power_of_width, abs=1e-6)
    assert first.exponent("lr").own == pytest.approx(-power_of_width, abs=1e-6)
    for one in found.values():
        assert one.exponent("lr").excess == pytest.approx(0, abs=1e-6)
        assert one.exponent("init").excess == pytest.approx(0, abs=1e-6)


def test_a_start_that_is_only_measured_comes_with_its_noise():
    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
            nn.init.orthogonal_(self.last.weight)  # singular values of one: entries of 1/√width

        def forward(self, x):
            return self.last(self.first(x).tanh())

    drawn = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
    sizes = [Size(width, 1) for width in (32, 64, 128)]

    def make(model):
        return SGD(model.parameters(), lr=0.1)

    found = along("width", Net, make, sizes, drawn, nn.functional.cross_entropy)
    assert found["last.weight"].noise > 0
    assert found["first.weight"].noise == 0
    assert found["last.weight"].exponent("init").own == pytest.approx(-0.5, abs=1e-6)


def test_tensors_of_equal_names_that_do_not_go_alike_stay_apart():
    def make(model):
        last = {id(one) for one in model.blocks[1].parameters()}
        by_width = 32 / model.wte.embedding_dim
        groups = [
            {"params": [one], "lr": 0.1 * (1.0 if id(one) in last else by_width)}
            for one in model.parameters()
        ]
        return AdamW(groups)

    found = along("width", building(recipe()), make)
    assert found["blocks.0.mlp.up.weight"].exponent("lr").own == -1
    assert found["blocks.1.mlp.up.weight"].exponent("lr").own == 0
