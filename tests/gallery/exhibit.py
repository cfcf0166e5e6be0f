"""One network of the gallery: how it is built and fed, and the truth about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from theodolite import Size
from theodolite.core.calling import Build

WIDTHS = (32, 64, 128)
DEPTHS = (2, 4, 8)


@dataclass(frozen=True)
class Exhibit:
    """A network written from its definition, and what is true of it by reasoning.

    Args:
        name: unique, as the page shows it.
        build: `build(width, depth) -> nn.Module`.
        batch: `batch(seed) -> (inputs, targets)`, the same for the same seed.
        loss: `loss(output, targets) -> scalar`, of what the network returns, untouched.
        roles: by pattern of names the role of every tensor; the first pattern that matches counts.
        branches: the number of residual branches at depth 2.
        shows: why it is here, in one line.
        widths: the widths over which slopes are measured; the first is the base.
        depths: the same over depth, at the base width; empty where depth repeats no block.
        lr: the learning rate at the base size.
        exceptions: by pattern of module names, the reason why its change does not keep its size.
        cheap: whether the tests measure its slopes too; all do by `python -m tests.gallery`.
        hints: what a user has to say, as `roles=` of `plan`: patterns and roles.
    """

    name: str
    build: Build
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    roles: Mapping[str, str]
    branches: int
    shows: str
    widths: tuple[int, ...] = WIDTHS
    depths: tuple[int, ...] = DEPTHS
    lr: float = 2.0**-9
    optimizer: str = "adamw"
    cheap: bool = False
    exceptions: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)

    @property
    def base(self) -> Size:
        """The smallest network."""
        return Size(self.widths[0], self.depths[0] if self.depths else 2)


def tokens(vocabulary: int, length: int, *, batch: int = 8) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Random tokens, each with a random next one to predict."""

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(vocabulary, (batch, length + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return draw


def images(
    classes: int, size: int = 16, *, channels: int = 3, batch: int = 16
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Random images and classes."""

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.randn(batch, channels, size, size, generator=generator),
            torch.randint(classes, (batch,), generator=generator),
        )

    return draw


def next_token_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every position."""
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
