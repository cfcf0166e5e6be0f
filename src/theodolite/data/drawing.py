"""Batches as pure functions of a seed and a step."""

# B examples in a batch, T tokens

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.data.sets import Examples, Text


def generator(*words: str | int) -> np.random.Generator:
    """Random numbers that depend on the words alone, not on the process, its history or its device.

    The words are hashed to the 128-bit key of a counter-based generator, so neighbouring seeds and
    steps have nothing in common.

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
    """`num` windows at random places: tokens (B, T) and the token after each of them (B, T).

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

    What an epoch leaves over, being fewer than `num`, is dropped.

    >>> digits = Examples("digits", torch.arange(10.0), torch.arange(10), classes=10)
    >>> first, second = (draw_examples(digits, num=5, seed=0, step=step)[1] for step in (0, 1))
    >>> torch.cat([first, second]).sort().values
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    batches = len(examples.labels) // num
    if batches == 0:
        raise UseError(f"{examples.name} has {len(examples.labels)} examples, too few for a batch of {num}")
    epoch, turn = divmod(step, batches)
    order = generator(examples.name, seed, epoch).permutation(len(examples.labels))
    rows_B = torch.from_numpy(order[turn * num : (turn + 1) * num])
    return examples.inputs(rows_B), examples.labels[rows_B]
