"""Only branches that repeat with depth are scaled with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.planning.counterparts import repeated_branches

BASE, DEEP = th.Size(8, 2), th.Size(8, 4)
pytestmark = pytest.mark.usefixtures("one_dissection")
INPUTS = torch.zeros(2, 6, 3)


class Block(nn.Module):
    def __init__(self, width: int, shortcut: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.shortcut = nn.Linear(width, 2 * width) if shortcut else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.shortcut is not None:
            hidden = hidden + self.shortcut(x).tanh()
        return x + self.down(hidden.relu())


class Net(nn.Module):
    """Blocks after one branch that stands alone: wav2vec 2.0's convolution of positions ends in a GELU."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, width), nn.Linear(width, 2)
        self.conv1 = nn.Conv1d(width, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.alone(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def alone(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.conv1(x.transpose(1, 2)).transpose(1, 2))


def counts(build: Any) -> tuple[int, int, int]:
    target, base = (th.dissect(build, INPUTS, size=size) for size in (DEEP, BASE))
    found = repeated_branches(target, base)
    return len(found.at_target), len(found.at_base), len(found.lone)


def test_a_branch_that_stands_alone_is_left_alone_and_the_others_get_their_own_ratio() -> None:
    made = th.plan(Net, INPUTS, size=DEEP, base=BASE, lr=0.25)
    assert (made["conv1.weight"].lr, made["conv1.weight"].eps) == (0.25, 1e-8)
    assert made["blocks.3.down.weight"].lr == 0.25 / 2  # not 3/5, the ratio of all branches
    assert "r_L = 2: residual branches 4 = 2 × 2" in str(made.explain("blocks.3.down.weight"))
    assert made.notes == (
        "1 residual branch does not repeat with depth (conv1.weight): the plan scales the other 4 with "
        "depth, and leaves it alone.",
    )
    assert not th.plan(Net, INPUTS, size=th.Size(16, 2), base=BASE, lr=0.25).notes


def test_a_branch_that_stands_alone_and_ends_in_a_tensor_is_left_alone_too() -> None:
    class Ended(Net):
        def alone(self, x: Tensor) -> Tensor:
            return x + self.conv1(x.transpose(1, 2)).transpose(1, 2)

    made = th.plan(Ended, INPUTS, size=DEEP, base=BASE, lr=0.25)
    assert made["conv1.weight"].lr == 0.25
    assert made["blocks.3.down.weight"].lr == 0.25 / 2


def test_a_block_of_another_kind_in_the_same_list_counts() -> None:
    class First(Net):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__(width, depth)
            self.blocks[0] = Block(width, shortcut=True)

    assert counts(First) == (4, 2, 1)


def test_blocks_that_share_their_weights_repeat() -> None:
    class Shared(Net):
        """The branch that stands alone comes after each block."""

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = self.alone(block(x))
            return self.head(x)

    assert counts(Shared) == (8, 4, 0)
    with pytest.raises(UseError, match="ends in no tensor that scales it"):
        th.plan(Shared, INPUTS, size=DEEP, base=BASE, lr=0.25)


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(99 * seed + step))
    return drawn, drawn[..., :2]


WORKLOAD = th.Workload("net", Net, batch, F.mse_loss, BASE)


def test_the_spectral_condition_takes_the_same_ratio() -> None:
    found = th.probes.spectral(WORKLOAD, DEEP, base=BASE, lr=0.01, steps=1)
    rows = {row.name: row for row in found.rows}
    assert rows["conv1.weight"].step.expected == 1
    assert rows["blocks.3.down.weight"].step.expected == 1 / 2


def test_the_coordinate_check_leaves_it_out_of_the_branches() -> None:
    found = th.probes.coordinates(WORKLOAD, [BASE, DEEP], base=BASE, lr=0.01, steps=1, seeds=[0])
    for track in found.tracks:
        _, *others = track.branches[0]
        mean = math.sqrt(sum(size**2 for size in others) / len(others))
        assert len(others) == track.size.depth
        assert track.values["branch.0"][0] == pytest.approx(mean)
        assert track.expected["branch.0"] == 1 / track.size.depth


class Skips(nn.Module):
    """`γ·x + f(x)` in every block, behind a layer and a gain that are there once."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(8, width), nn.Parameter(torch.ones(width))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for gain, up, down in zip(self.gains, self.up, self.down, strict=True):
            x = gain * x + down(up(x).relu())
        return self.head(x)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_what_acts_on_the_stream_in_every_block_learns_by_one_over_depth(optimizer: str) -> None:
    plan = th.plan(
        Skips, torch.zeros(2, 8), size=th.Size(16, 8), base=th.Size(16, 2), lr=1.0, optimizer=optimizer
    )
    assert {plan[f"gains.{block}"].lr for block in range(8)} == {1 / 4}
    assert {plan[f"gains.{block}"].init.mean for block in range(8)} == {1.0}
    assert plan["scale"].lr == plan["first.weight"].lr == plan["head.bias"].lr == 1.0
    assert "c = 1/r_L = 1/4" in str(plan.explain("gains.3"))
