"""Work is counted whatever a forward pass does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from theodolite.models import GPT
from theodolite.surveying.budget import GROUPED, pass_work


def test_it_is_what_torch_counts() -> None:
    model, tokens = GPT(32, 2), torch.zeros(2, 8, dtype=torch.long)

    def run() -> None:
        model(tokens).sum().backward()

    with FlopCounterMode(display=False) as counter:
        run()
    assert pass_work(run).multiplications == counter.get_total_flops() / 2


def test_a_convolution_by_groups_counts_as_many_operations() -> None:
    images = torch.ones(1, 8, 5, 5)
    plain, depthwise = nn.Conv2d(8, 8, 3, bias=False), nn.Conv2d(8, 8, 3, groups=8, bias=False)
    few, many = pass_work(lambda: plain(images)), pass_work(lambda: depthwise(images))
    assert (few.multiplications, many.multiplications) == (8 * 8 * 9 * 9, 8 * 9 * 9)
    assert many.operations - few.operations == GROUPED - 1


class Derivative(nn.Module):
    """A physics-informed network differentiates itself in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = self.last(torch.tanh(self.first(x)))
            (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value + slope.sum(1, keepdim=True)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 2))

    def forward(self) -> Tensor:
        return self.weight[:4]


class Looked(nn.Module):
    """A module of its own returns a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = Table(), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.table())


# 4 · (2·8 + 8·1) forward and 4 · (8·1 + 8·2) for the derivative; then twice that backward.
@pytest.mark.parametrize(("build", "forward"), [(Derivative, 192), (Looked, 8)])
def test_derivatives_in_a_forward_pass_and_views_of_parameters(build: type[nn.Module], forward: int) -> None:
    model, inputs = build(), torch.ones(4, 2)
    with torch.no_grad():
        assert pass_work(lambda: model(inputs)).multiplications == forward
    assert pass_work(lambda: F.mse_loss(model(inputs), inputs[:, :1]).backward()).multiplications > forward
