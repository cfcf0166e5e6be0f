"""Texts and labelled examples, and batches of them as pure functions of a seed and a step."""

# N examples, B examples in a batch, T tokens, C channels, H height, W width

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from theodolite.core.errors import UseError

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Text:
    """A text as one long row of tokens.

    Args:
        name: its name in batches and messages.
        tokens: integers below `vocab`, (number of tokens,). Bytes are kept as `torch.uint8`.
        vocab: number of different tokens.
    """

    name: str
    tokens: Tensor
    vocab: int


@dataclass(frozen=True)
class Examples:
    """Examples with labels. Pixels stay bytes, a quarter of the memory, until a batch is drawn.

    Args:
        name: its name in batches and messages.
        values: (N, ...), floats, or pixels (N, C, H, W) as `torch.uint8`.
        labels: (N,), integers below `classes`.
        classes: number of different labels.
        mean: of each channel of the training set, with pixels from 0 to 1. Empty: pixels are not normalised.
        std: standard deviation, likewise.

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
        """The inputs of some rows, or of all, as normalised floats."""
        chosen = self.values if rows is None else self.values[rows]
        if chosen.dtype != torch.uint8:
            return chosen
        mean, std = (torch.tensor(channel)[:, None, None] for channel in (self.mean, self.std))
        return (chosen.float() / 255 - mean) / std


def generator(*words: str | int) -> np.random.Generator:
    """Random numbers that depend only on the words, not on the process, its history or its device.

    The words are hashed to the 128-bit key of a counter-based generator, so neighbouring seeds and steps are
    independent.

    >>> generator("sotu", 0, 7).integers(100, size=3).tolist()
    [46, 99, 66]
    >>> generator("sotu", 0, 7).random() == generator("sotu", 0, 7).random()
    True

    References:
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011 (Philox).
    """
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def draw_text(text: Text, *, num: int, length: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """`num` windows at random positions: tokens (B, T) and the token after each of them (B, T).

    >>> counting = Text("counting", torch.arange(100, dtype=torch.uint8), vocab=100)
    >>> tokens_BT, targets_BT = draw_text(counting, num=2, length=5, seed=0, step=0)
    >>> targets_BT - tokens_BT
    tensor([[1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1]])
    """
    places = len(text.tokens) - length
    if places < 1:
        raise UseError(
            f"{text.name} has {len(text.tokens)} tokens, too few for a window of {length} "
            "and the token after it"
        )
    start_B = torch.from_numpy(generator(text.name, seed, step).integers(places, size=num))
    window_BT = text.tokens[start_B[:, None] + torch.arange(length + 1)].long()
    return window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous()


def draw_examples(examples: Examples, *, num: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """`num` examples: inputs (B, ...) and labels (B,). Every epoch is another permutation of the set.

    The last examples of an epoch are dropped if they are fewer than `num`.

    >>> digits = Examples("digits", torch.arange(10.0), torch.arange(10), classes=10)
    >>> first, second = (draw_examples(digits, num=5, seed=0, step=step)[1] for step in (0, 1))
    >>> torch.cat([first, second]).sort().values
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    batches = len(examples.labels) // num
    if batches == 0:
        raise UseError(f"{examples.name} has {len(examples.labels)} examples, too few for a batch of {num}")
    epoch, turn = divmod(step, batches)
    rows_B = _order(examples.name, seed, epoch, len(examples.labels))[turn * num : (turn + 1) * num]
    return examples.inputs(rows_B), examples.labels[rows_B]


@functools.lru_cache(maxsize=8)
def _order(name: str, seed: int, epoch: int, num: int) -> Tensor:
    """All rows in the order of an epoch, whose batches share it; (N,)."""
    return torch.from_numpy(generator(name, seed, epoch).permutation(num))
