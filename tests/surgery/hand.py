"""Networks written by hand: one norm, and what may stand between it and the maps that read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, FEATURES = 8, 6
INPUTS = torch.randn(3, 5, FEATURES, generator=torch.Generator().manual_seed(3)).double()


class Hand(nn.Module):
    """`head(x + step(self, x))` of `x = embed(inputs)`, with a norm, two maps and what else is given."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.norm: nn.Module = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for name, part in parts.items():
            setattr(self, name, part)
        self.head = nn.Linear(WIDTH, 3)
        self.step = step
        self.double()
        with torch.no_grad():
            for one in self.parameters():
                if one.dim() == 1:
                    one.add_(torch.rand_like(one))

    def forward(self, x: Tensor) -> Tensor:
        """Readout of the stream."""
        x = self.embed(x)
        found: Tensor = self.head(x + self.step(self, x))
        return found


def plain(block: Any, x: Tensor) -> Tensor:
    """A branch of two maps."""
    made: Tensor = block.down(block.up(block.norm(x)).relu())
    return made
