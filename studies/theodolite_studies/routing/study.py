"""Routing along depth in diffusion transformers: three symptoms of depth, along time, and the loss.

After DAR (Rethinking cross-layer information routing in diffusion transformers, 2026): in trained diffusion
transformers the residual stream inflates, gradients fall along depth and neighbouring blocks become alike.
Branches that read a learned mixture of all earlier outputs, with weights that depend on the denoising time,
should cure this and train better. The paper's exact query is not reproduced: see
`theodolite.models.routing`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batch, on_device
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.examples import take
from theodolite.core.files import plain
from theodolite.core.size import Size
from theodolite.fleet.program import Program
from theodolite.fleet.run import Precision, Run
from theodolite.fleet.stack import stack
from theodolite.fleet.training import LOOK_EVERY, arithmetic, precision_of
from theodolite.models import DiT
from theodolite.models.dit import DiTStream
from theodolite.probes import stream
from theodolite.workloads import Workload, workload
from theodolite_studies.framework.records import Record, short
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.routing.arms import ADD, ROUTED, TIME_ROUTED, Arms
from theodolite_studies.routing.claims import CLAIMS
from theodolite_studies.routing.report import figures, notes

HALVES = 2
"""Disjoint sets of images on which streams are read: one chooses the times to compare, the other judges."""
EARLY = 0.25
"""The part of training after which the plain stream is read for the first time."""
POINTS = 20
"""Training losses in a record."""


@dataclass(frozen=True, kw_only=True)
class RoutingSetting(Setting):
    """How every network of the study is trained and read."""

    size: Size
    base: Size
    """Where the plan starts from."""
    exponents: Mapping[DiTStream, tuple[float, ...]]
    """By residual, log2 of the learning rates at base size."""
    seeds: tuple[int, ...]
    steps: int
    warmup: int
    num: int
    """Images in a batch, at most 128."""
    held_out: int
    """Held-out batches of 128: those with even numbers choose a learning rate, the others judge."""
    images: int
    """Held-out images in each half of a reading, at most 64; each is read at every time."""
    times: int
    precision: Precision

    def about(self) -> dict[str, Any]:
        """All of it; seeds and learning rates may be added."""
        values = plain(self)
        for name in ("small", "seeds", "exponents"):
            del values[name]
        return values | {name: [*values[name].values()] for name in ("size", "base")}


FULL = RoutingSetting(
    size=Size(128, 12),
    base=Size(128, 4),
    exponents={
        ADD: (-7.5, -6.5, -5.5),
        ROUTED: (-7.5, -6.5, -5.5),
        TIME_ROUTED: (-8.5, -7.5, -6.5, -5.5),
    },
    seeds=(0, 1, 2, 3, 4),
    steps=1000,
    warmup=100,
    num=128,
    held_out=32,
    images=32,
    times=6,
    precision="bfloat16",
)
SMALL = RoutingSetting(
    small=True,
    size=Size(64, 6),
    base=Size(64, 2),
    exponents=dict.fromkeys((ADD, ROUTED, TIME_ROUTED), (-7.0, -6.0, -5.0)),
    seeds=(0, 1),
    steps=150,
    warmup=15,
    num=64,
    held_out=16,
    images=16,
    times=6,
    precision="float32",
)
"""For a CPU: about a quarter of an hour on one core."""


def cells(setting: RoutingSetting) -> list[Cell]:
    """All of a seed, then those of the next: whatever is there can be compared."""
    return [
        {"residual": residual, "seed": seed, "lr": exponent}
        for seed in setting.seeds
        for residual, exponents in setting.exponents.items()
        for exponent in exponents
    ]


def run(cell: Cell, setting: RoutingSetting, device: str) -> Iterator[Record]:
    """Train a network by the fleet's program of one model, and read it."""
    residual, seed = cell["residual"], cell["seed"]
    network = network_of(residual, setting.num)
    mine = run_of(setting, network, seed, cell["lr"])
    batch, along = reading_batch(setting, network)
    early = round(EARLY * setting.steps) if residual == ADD else -1
    record: dict[str, Any] = {}
    with untouched_randomness(seed), arithmetic(mine, device):
        models = stack([mine], network, device)
        program = Program(models, network, device)
        for step in range(setting.steps):
            if step == early:
                half = [place for place, value in enumerate(along) if value % HALVES == 0]
                model = models.single(0)
                record["early"] = read(model, network, take(batch, half), [along[i] for i in half], 1)
            if step % LOOK_EVERY == 0 and not program.alive():
                break
            program.step()
        losses = program.series["loss"][:, 0].cpu()
        model = models.single(0)
        held_out = held_out_losses(model, network, mine, device)
        record["parameters"] = sum(tensor.numel() for tensor in model.parameters())
        ended = bool(losses.isfinite().all()) and all(map(math.isfinite, held_out))
        record["validation"] = short(statistics.fmean(held_out[::2]), 6) if ended else None
        record["test"] = short(statistics.fmean(held_out[1::2]), 6) if ended else None
        if ended:
            record["course"] = course_of(losses)
            record["late"] = read(model, network, batch, along, HALVES)
    yield record


def run_of(setting: RoutingSetting, network: Workload, seed: int, exponent: float) -> Run:
    """One network's training as the fleet knows it: AdamW under the plan, linear warmup and decay."""
    return Run(
        workload=network.name,
        size=setting.size,
        lr=2.0**exponent,
        base=setting.base,
        seed=seed,
        steps=setting.steps,
        warmup=setting.warmup,
        held_out=setting.held_out,
        precision=setting.precision,
        options={"betas": (0.9, 0.95)},
    )


@functools.cache
def network_of(residual: DiTStream, num: int) -> Workload:
    """`dit-fashion` with one kind of residual, the first `num` images of its batches."""
    whole = workload("dit-fashion")
    build = partial(DiT, residual=residual)
    return dataclasses.replace(whole, name=f"dit-{residual}", build=build, batch=_FirstExamples(whole, num))


@dataclass(frozen=True)
class _FirstExamples:
    """The batches of a workload, cut."""

    whole: Workload
    num: int

    def __call__(self, seed: int, step: int) -> Batch:
        return take(self.whole.batch(seed, step), slice(self.num))


def times_of(setting: RoutingSetting) -> list[float]:
    """The middles of equal parts of [0, 1].

    >>> times_of(dataclasses.replace(SMALL, times=2))
    [0.25, 0.75]
    """
    return [(2 * place + 1) / (2 * setting.times) for place in range(setting.times)]


def reading_batch(setting: RoutingSetting, network: Workload) -> tuple[Batch, list[int]]:
    """Held-out images, noise and labels at every time, and the group of each example: 2·time + half.

    All times share the same images, so that they differ in nothing but the time. As the velocity v of a
    linear path is constant, `x_s = x_t + (s − t)·v`. No loss is taken on this batch.
    """
    inputs, velocity = take(network.draw_held_out(setting.held_out), slice(HALVES * setting.images))
    x, t, labels = inputs
    halves = [place * HALVES // len(velocity) for place in range(len(velocity))]
    times = times_of(setting)
    moved = [x + (time - t)[:, None, None, None] * velocity for time in times]
    repeats = len(times)
    batch = (
        (
            torch.cat(moved),
            torch.cat([torch.full_like(t, time) for time in times]),
            labels.repeat(repeats),
        ),
        velocity.repeat(repeats, 1, 1, 1),
    )
    return batch, [HALVES * place + half for place in range(repeats) for half in halves]


def read(model: nn.Module, network: Workload, batch: Batch, along: Sequence[int], halves: int) -> Record:
    """The stream of every group of a batch, in float32.

    Returns:
        `start`: the size of the stream before the first branch, by half and time. `stream`, `added`,
        `gradient`, `cosine`: by half, time and branch, the size of the stream (or mixture) after it, that
        of the branch, that of the loss's gradient with respect to the branch, and the cosine of the stream
        before and after. `share`: the last branch over the stream that it reads.
    """
    found = stream(model, network.loss, batch, skip=False, along=along, groups=len(set(along))).streams
    by_half = [found[half::halves] for half in range(halves)]
    names = {"stream": "stream", "added": "added", "gradient": "branch_gradient", "cosine": "cosine"}
    values: dict[str, Any] = {
        key: [[[short(getattr(one, name)) for one in at.branches] for at in half] for half in by_half]
        for key, name in names.items()
    }
    values["start"] = [[short(at.start) for at in half] for half in by_half]
    values["share"] = [[short(at.branches[-1].share) for at in half] for half in by_half]
    return values


@torch.no_grad()
def held_out_losses(model: nn.Module, network: Workload, run: Run, device: str) -> list[float]:
    """Of every held-out batch."""
    losses: list[Tensor] = []
    with evaluated(model):
        for step in range(run.held_out):
            batch = on_device(network.draw_held_out(step), device)
            with precision_of(run, device):
                losses.append(network.evaluate(model, batch))
    values: list[float] = torch.stack(losses).double().tolist()
    return values


def course_of(losses: Tensor) -> list[float | None]:
    """Means of the training loss over `POINTS` parts of training, or of every step if these are fewer.

    >>> course_of(torch.arange(40.0))[:3]
    [0.5, 2.5, 4.5]
    """
    return [short(float(part.mean()), 4) for part in losses.tensor_split(min(POINTS, len(losses)))]


STUDY = Study(
    "routing",
    cells,
    run,
    CLAIMS,
    figures,
    notes,
    data=Arms.of,
    full=FULL,
    small=SMALL,
)
