"""What an audit says of training, beside what it read."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from theodolite.core.size import Size
from theodolite.surveying import audit
from theodolite.workloads import Workload


class Rows(nn.Module):
    """muP by hand, with the initial values of `nn.Linear`: biases and the readout start at 1/√width."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(8, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).relu()).relu()
        return self.last(x) * 64 / x.shape[-1]


def make_optimizer(model: nn.Module) -> AdamW:
    middle = model.middle.weight
    others = [tensor for tensor in model.parameters() if tensor is not middle]
    hidden = {"params": [middle], "lr": 0.01 * 64 / len(middle)}
    return AdamW([hidden, {"params": others}], lr=0.01, weight_decay=0.0)


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def test_biases_and_readouts_that_start_small_do_not_contradict_the_reading() -> None:
    workload = Workload("rows", Rows, batch, functional.cross_entropy, Size(64, 1))
    found = audit(workload, optimizer=make_optimizer, seeds=1)
    assert found.right
    assert all("keep their size" in said for said in found.trained), found.trained
