"""Tensors outside of every branch belong to the block that alone reads what they make."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.anatomy import dissect
from theodolite.core.size import Size

from ..hand import CLASSES, FEATURES, TOKENS, Block, mlp


class Modulated(nn.Module):
    """Two branches a block. Layers of each block, and one of the network, scale branches by a condition."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.condition, self.everywhere = nn.Linear(FEATURES, width), nn.Linear(width, width)
        self.time = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            Block(
                {
                    "first": Block(mlp(width)),
                    "second": Block(mlp(width)),
                    "both": nn.Linear(width, 2 * width),
                    "one": nn.Linear(width, width),
                    "table": nn.Embedding(7, width),
                }
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Readout of the stream."""
        condition = F.silu(self.condition(x.mean(1, keepdim=True)))
        everywhere, embedded = self.everywhere(condition), self.time(condition)
        x = self.embed(x)
        for block in self.blocks:
            labelled = embedded + block.table(torch.arange(len(x))[:, None])
            for_first, for_second = block.both(labelled).chunk(2, -1)
            x = x + added(block.first, x, for_first + everywhere)
            x = x + added(block.second, x, for_second + everywhere + block.one(condition))
        return self.head(x)


def added(block: Block, x: Tensor, scale: Tensor) -> Tensor:
    return block.down(F.gelu(block.up(block.norm(x) * (1 + scale))))


def test_a_layer_that_modulates_all_branches_of_a_block_belongs_to_its_first_one() -> None:
    anatomy = dissect(Modulated, torch.zeros(2, TOKENS, FEATURES), size=Size(32, 3))
    places = {name: (part.block, part.branch) for name, part in anatomy.items()}
    for block in range(3):
        assert places[f"blocks.{block}.both.weight"] == places[f"blocks.{block}.both.bias"] == (block, 0)
        assert places[f"blocks.{block}.one.weight"] == (block, 1)
        assert places[f"blocks.{block}.table.weight"] == (block, 0)
        assert anatomy[f"blocks.{block}.table.weight"].role == "input"
    assert places["everywhere.weight"] == places["condition.weight"] == (None, None)
    assert not any(anatomy[f"blocks.{block}.both.weight"].ends_branch for block in range(3))


def test_a_single_block_does_not_own_what_more_blocks_would_share() -> None:
    one, two = (
        dissect(Modulated, torch.zeros(2, TOKENS, FEATURES), size=Size(32, depth)) for depth in (1, 2)
    )
    for name, part in one.items():
        assert (part.block, part.branch) == (two[name].block, two[name].branch), name


def test_a_single_block_has_what_stands_beside_its_only_branch() -> None:
    class Beside(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
            parts = ({"scale": nn.Linear(FEATURES, width), "mlp": Block(mlp(width))} for _ in range(depth))
            self.blocks = nn.ModuleList(map(Block, parts))

        def forward(self, x: Tensor) -> Tensor:
            stream = self.embed(x)
            for block in self.blocks:
                stream = stream + added(block.mlp, stream, block.scale(x))
            return self.head(stream)

    for depth in (1, 2):
        part = dissect(Beside, torch.zeros(2, TOKENS, FEATURES), size=Size(32, depth))[
            "blocks.0.scale.weight"
        ]
        assert (part.block, part.branch) == (0, 0), depth


def test_a_single_block_without_a_module_of_its_own_has_what_feeds_it() -> None:
    class Flat(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
            self.scale = nn.Linear(FEATURES, width)

        def forward(self, x: Tensor) -> Tensor:
            stream = self.embed(x)
            return self.head(stream + self.down(F.gelu(self.up(stream) * self.scale(x))))

    anatomy = dissect(Flat, torch.zeros(2, TOKENS, FEATURES), size=Size(32, 1))
    assert (anatomy["scale.weight"].block, anatomy["scale.weight"].branch) == (0, 0)
