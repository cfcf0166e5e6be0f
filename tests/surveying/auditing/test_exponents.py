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


@pytest.mark.parametrize("power_of_width", [0.5, -0.5])
def test_a_factor_on_a_table_is_traded_against_the_readout_that_it_is_too(power_of_width):
    """With E/a in a·E[tokens], the logits h·Eᵀ need a times the factor that they need with E."""

    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.factor, self.growth = (width / 32) ** power_of_width, width / 32
            self.table = nn.Embedding(11, width)
            self.hidden = nn.Linear(width, width, bias=False)
            nn.init.normal_(self.table.weight, std=0.1 / self.factor)
            nn.init.normal_(self.hidden.weight, std=width**-0.5)

        def forward(self, tokens):
            stream = self.table(tokens) * self.factor
            stream = torch.tanh(self.hidden(torch.tanh(stream)))
            return nn.functional.linear(stream, self.table.weight) * (self.factor / self.growth)

    def make(model):
        hidden = {"params": model.hidden.parameters(), "lr": 0.1 / model.growth}
        return AdamW([{"params": model.table.parameters(), "lr": 0.1 / model.factor}, hidden])

    sizes = [Size(width, 1) for width in (32, 64, 128)]
    drawn = torch.arange(8).reshape(2, 4), torch.zeros(2, 4, dtype=torch.long)
    found = along("width", Net, make, sizes, drawn)
    readout = found["table.weight"].exponent("readout")
    assert (readout.own, readout.rule) == pytest.approx((power_of_width - 1, power_of_width - 1))
    assert all(abs(one.exponent(what).excess) < 1e-6 for one in found.values() for what in ("lr", "init"))


def test_equal_entries_add_up_as_their_number_and_a_gain_starts_at_what_is_added_to_it():
    class Net(nn.Module):
        """Weights of 1/width, whose sums keep their size; and a norm with (1 + gain), as in Gemma."""

        def __init__(self, width, depth):
            super().__init__()
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
            self.hidden, self.gain = nn.Linear(width, width), nn.Parameter(torch.zeros(width))
            nn.init.constant_(self.hidden.weight, 1 / width)

        def forward(self, x):
            x = self.hidden(torch.tanh(self.first(x)))
            return self.last(torch.tanh(nn.functional.rms_norm(x, x.shape[-1:]) * (1 + self.gain)))

    drawn = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
    sizes = [Size(width, 1) for width in (32, 64, 128)]

    def make(model):
        return AdamW(model.parameters(), lr=0.1)

    found = along("width", Net, make, sizes, drawn, nn.functional.cross_entropy)
    hidden = found["hidden.weight"].exponent("init")
    assert (hidden.own, hidden.rule) == (-1, -1)
    assert found["gain"].init.own == found["gain"].init.rule == (1, 1, 1)


def test_growth_along_the_depth_is_that_of_the_number_of_branches():
    class Net(nn.Module):
        """One more block than its depth says."""

        def __init__(self, width, depth):
            super().__init__()
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
            self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth + 1))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = x + block(torch.tanh(x))
            return self.last(x)

    drawn = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)

    def make(model):
        return AdamW(model.parameters(), lr=0.1)

    sizes = [Size(16, depth) for depth in (1, 3, 7)]
    found = along("depth", Net, make, sizes, drawn, nn.functional.cross_entropy)
    assert found["blocks.*.weight"].growth == (1, 2, 4)


def test_the_eps_that_is_compared_is_one_beside_entries_of_gradients_and_the_nearest_of_all_blocks_counts():
    """Muon's eps stands beside the norm of a matrix."""
    workload = Workload("mine", building(recipe(optimizer="muon", eps=1e-12)), batch, loss)
    readings = [read(workload, make_optimizer, size, batch=batch(0, 0)) for size in WIDTHS]
    gradients = dict.fromkeys(readings[0].names, 1e-6)
    gradients["blocks.1.ln_1.weight"] = 1e-10
    found = {one.name: one for one in scalings(readings, "width", gradients)}
    matrix = found["blocks.*.mlp.up.weight"]
    assert matrix.class_name == "Muon"
    assert (matrix.eps, math.isnan(matrix.over_eps)) == (None, True)
    assert found["wte.weight"].over_eps == pytest.approx(1e6, rel=1e-6)
    assert found["blocks.*.ln_1.weight"].over_eps == pytest.approx(1e2, rel=1e-6)


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
    # Four standard errors of the exponent: a std of n normal numbers has one of 1/√(2n), relatively.
    errors = [1 / math.sqrt(2 * 2 * width) for width in (32, 128)]
    assert found["last.weight"].noise == pytest.approx(4 * math.hypot(*errors) / math.log(4))
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


def test_the_noise_of_several_tensors_is_that_of_their_mean():
    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
            self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
            for block in self.blocks:
                nn.init.orthogonal_(block.weight)

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x.tanh())
            return self.last(x)

    drawn = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)

    def noise(depth):
        sizes = [Size(width, depth) for width in (32, 64)]
        found = along(
            "width",
            Net,
            lambda model: SGD(model.parameters(), lr=0.1),
            sizes,
            drawn,
            nn.functional.cross_entropy,
        )
        return next(one.noise for name, one in found.items() if name.startswith("blocks"))

    assert noise(4) == pytest.approx(noise(1) / 2)
