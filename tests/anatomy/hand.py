"""Small hand-written networks for the tests: a stream, and blocks as functions of their parts and of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy import Anatomy, dissect
from theodolite.core.size import Size

WIDTH, DEPTH, FEATURES, TOKENS, CLASSES = 32, 2, 6, 5, 3

Step = Callable[[Any, Tensor], Tensor]
Make = Callable[[int], dict[str, nn.Module | nn.Parameter]]


class Stream(nn.Module):
    """`embed`, then `depth` blocks `x = step(block, x)` with the parts of `make(width)`, then `head`."""

    def __init__(self, width: int, depth: int, make: Make, step: Step, last: Make | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(make(width)) for _ in range(depth))
        self.last = Block(last(width)) if last else None
        self.head = nn.Linear(width, CLASSES)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        """Readout of the stream."""
        x = self.embed(x)
        for block in self.blocks:
            x = self.step(block, x)
        return self.head(self.last.norm(x) if self.last is not None else x)


class Block(nn.Module):
    """Holds modules and parameters by name."""

    def __init__(self, parts: dict[str, nn.Module | nn.Parameter]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def look(make: Make, step: Step, last: Make | None = None, *, depth: int = DEPTH) -> Anatomy:
    """The anatomy of a Stream whose inputs are (examples, tokens, features)."""
    inputs = torch.zeros(2, TOKENS, FEATURES)
    return dissect(lambda w, d: Stream(w, d, make, step, last), inputs, size=Size(WIDTH, depth))


def mlp(width: int) -> dict[str, nn.Module | nn.Parameter]:
    """The parts of a branch of two layers and a norm before it."""
    return {
        "norm": nn.LayerNorm(width),
        "up": nn.Linear(width, 2 * width),
        "down": nn.Linear(2 * width, width),
    }


def vector(*shape: int, value: float = 1.0) -> nn.Parameter:
    """A parameter of that shape."""
    return nn.Parameter(torch.full(shape, value))


def heads(x: Tensor, size: int = 8) -> Tensor:
    """(examples, tokens, heads · size) to (examples, heads, tokens, size)."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of heads, put side by side again."""
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)
