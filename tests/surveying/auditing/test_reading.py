"""What is read beside the rules: the sizes of gradients, as far as they say something of later steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from theodolite.core.size import Size
from theodolite.surveying.auditing.reading import gradient_sizes, read
from theodolite.workloads import Workload


class Gated(nn.Module):
    """A weight behind a gate and a head that start at zero, and one behind the head alone."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.head = nn.Parameter(torch.zeros(width)), nn.Linear(width, 2, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + self.gate * self.inner(x).tanh())


def test_a_gradient_that_is_zero_at_two_steps_says_nothing_of_later_ones(rows):
    def make(model):
        return Adam(model.parameters(), lr=1e-3)

    found = gradient_sizes(rows(Gated), make, Size(32, 1), seed=0, steps=4)
    # The head has one at once, the gate and the first layer at the second step, the inner one at the third.
    assert set(found) == {"head.weight", "gate", "first.weight"}
    assert set(gradient_sizes(rows(Gated), make, Size(32, 1), seed=0, steps=1)) == {"head.weight"}


class Looked(nn.Module):
    """A table of eight tokens, of ones; the loss is half the sum of the squares of those looked up."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(8, width)
        nn.init.ones_(self.table.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def looked_up() -> Workload:
    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([[1, 5]]), torch.zeros(1)

    return Workload("looked", Looked, batch, lambda found, _: found.square().sum() / 2)


def gradient(steps: int, **group: float) -> float:
    """Of the table: at each step the entries themselves, which a step multiplies by 1 − lr."""

    def make(model):
        return SGD([{"params": model.parameters(), **group}], lr=0.1)

    found = gradient_sizes(looked_up(), make, Size(4, 1), seed=0, steps=steps)
    return found["table.weight"]


def test_the_size_of_a_gradient_is_that_of_the_entries_that_have_one_and_the_largest_of_all_steps():
    assert gradient(1) == pytest.approx(1)  # not √(2/8) of it
    assert gradient(3, lr=0.5) == pytest.approx(1)
    assert gradient(3, lr=3.0) == pytest.approx(4)
    assert gradient(3, lr=3.0, lr_scale=0.5) == pytest.approx(1)  # steps of 1.5 halve it


def test_a_tensor_of_two_groups_is_judged_by_the_first():
    def make(model):
        return [Adam(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.2)]

    workload = looked_up()
    reading = read(workload, make, Size(4, 1), batch=workload.batch(0, 0), roles={"table.weight": "input"})
    assert reading.names == ("table.weight",)
    assert (reading.options["table.weight"].rule, reading.options["table.weight"].lr) == ("adamw", 0.1)


def test_gradients_of_a_sparse_table_are_those_of_a_dense_one():
    def sparse(width: int, depth: int) -> nn.Module:
        network = Looked(width, depth)
        network.table = nn.Embedding(8, width, sparse=True)
        nn.init.ones_(network.table.weight)
        return network

    def make(model):
        return SGD(model.parameters(), lr=0.1)

    workloads = looked_up(), dataclasses.replace(looked_up(), build=sparse)
    dense, other = (gradient_sizes(one, make, Size(4, 1), seed=0, steps=3) for one in workloads)
    assert other == pytest.approx(dense)
