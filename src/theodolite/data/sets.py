"""The two shapes a data set has: a long text, or examples with labels."""

# N examples, C channels, H height, W width

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Text:
    """A text as one long row of tokens.

    Args:
        name: what batches and messages call it.
        tokens: whole numbers below `vocab`, (number of tokens,). Bytes are kept as `torch.uint8`.
        vocab: number of different tokens.
    """

    name: str
    tokens: Tensor
    vocab: int


@dataclass(frozen=True)
class Examples:
    """Examples with labels. Pixels stay bytes until a batch is drawn: a quarter of the memory.

    Args:
        name: what batches and messages call it.
        values: (N, ...), floats, or pixels (N, C, H, W) as `torch.uint8`.
        labels: (N,), whole numbers below `classes`.
        classes: number of different labels.
        mean: of each channel of the training set, on the scale where 255 is 1. Empty: nothing is done.
        std: likewise.

    >>> white = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
    >>> Examples("white", white, torch.tensor([0]), classes=2, mean=(0.5,), std=(0.25,)).inputs()
    tensor([[[[2., 2.],
              [2., 2.]]]])
    """

    name: str
    values: Tensor
    labels: Tensor
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def inputs(self, rows: Tensor | None = None) -> Tensor:
        """The inputs as floats, normalised: of these rows, or of all."""
        chosen = self.values if rows is None else self.values[rows]
        if chosen.dtype != torch.uint8:
            return chosen
        mean, std = (torch.tensor(channel)[:, None, None] for channel in (self.mean, self.std))
        return (chosen.float() / 255 - mean) / std
