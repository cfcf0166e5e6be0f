"""Checkpoints that are damaged: the run ends with the numbers of one that was never stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.fleet.checkpoint import RunCheckpoint
from theodolite.fleet.run import Outcome, Run
from theodolite.fleet.training import train

from .attack import Attack
from .attack_ledger import Change, cut, flip_a_bit, overwrite_a_sector

RUN = Run("tiny", th.Size(8, 1), 1e-2, base=th.Size(4, 1), steps=6, held_out=1, probes=("gradient",))
STOPPED_AT = 4


class Stop(Exception):
    """What ends a run half-way."""


def build(width: int, depth: int) -> nn.Module:
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(4, width), *hidden, nn.Linear(width, 2))


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1_000_003 * seed + step))
    return inputs, (inputs.sum(1) > 0).long()


def stopping_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    if step == STOPPED_AT:
        raise Stop
    return batch(seed, step)


TINY = th.Workload("tiny", build, batch, nn.functional.cross_entropy)


def numbers(outcome: Outcome) -> tuple[object, ...]:
    return outcome.status, outcome.step, outcome.held_out, outcome.metrics, outcome.readings


def damage(change: Change, count: int, folder: Path) -> Iterator[str | None]:
    uninterrupted = numbers(train(RUN, TINY))
    file = folder / "state.safetensors"
    with contextlib.suppress(Stop):
        train(RUN, dataclasses.replace(TINY, batch=stopping_batch), checkpoint=RunCheckpoint(file, 0))
    whole = file.read_bytes()
    for number in range(count):
        content = bytearray(whole)
        change(content, random.Random(number))
        file.write_bytes(content)
        said: list[str] = []
        try:
            resumed = numbers(train(RUN, TINY, checkpoint=RunCheckpoint(file, 3600, said.append)))
        except Exception as error:
            yield f"the run raised {error!r}"
            continue
        if resumed != uninterrupted:
            yield "the run ended with other numbers"
        elif content != whole and not said:
            yield "the damage was not told"
        else:
            yield None


PROMISE = "it is told and left aside, and the run is equal to one that was never stopped, bit for bit"
ATTACKS = [
    Attack("a bit is flipped in a checkpoint", PROMISE, partial(damage, flip_a_bit), 6, 400),
    Attack("512 bytes of a checkpoint are overwritten", PROMISE, partial(damage, overwrite_a_sector), 3, 200),
    Attack("a checkpoint is cut short", PROMISE, partial(damage, cut), 3, 200),
]
