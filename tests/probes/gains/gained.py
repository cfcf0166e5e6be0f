"""A network with gains of every kind, and an optimizer that spares all of them from decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

INPUTS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
WORDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A norm that only `up` reads, one that the stream reads, and a LayerScale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.mix, self.scale = nn.Linear(width, width, bias=False), nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after(self.down(self.up(self.before(x)).relu()))
        return x + self.scale * self.mix(x.tanh())


class Net(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.last = nn.RMSNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


INPUT_GAINS = {"blocks.0.before.weight", "blocks.1.before.weight", "norm.weight"}
OUTPUT_GAINS = {f"blocks.{n}.{name}" for n in (0, 1) for name in ("after.weight", "scale")}


def usual(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """No decay on vectors."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{"lr": 0.01, "weight_decay": 0.2} | options)


def names(rows: Any) -> set[str]:
    return {row.name for row in rows}


def decay_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    name_of = {id(p): name for name, p in model.named_parameters()}
    found = [
        (name_of[id(p)], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    ]
    assert len(found) == len(dict(found)), "a tensor is in two groups"
    return dict(found)
