"""Batches of a text, which a study's setting names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.data.batches import Split, Text

TEXTS: Mapping[str, Callable[[Split], Text]] = {"enwik8": data.enwik8, "sotu": data.state_of_the_union}


def batch_of(text: str, split: Split, num: int, length: int, seed: int, step: int) -> Batch:
    """`num` sequences of `length` bytes and the bytes that follow them, by seed and step alone.

    >>> batch_of("sotu", "validation", 2, 16, seed=0, step=0)[0].shape
    torch.Size([2, 16])
    """
    return data.draw_text(TEXTS[text](split), num=num, length=length, seed=seed, step=step)
