"""Learning-rate transfer over the whole range: five optimizers, widths 128 to 1024, depths 2 to 64.

Language models are trained on enwik8, diffusion transformers on CIFAR-10 (depths 4 to 16).

The claim: with a plan the best base learning rate stays where it is as the network grows, wider and deeper is
never worse, and networks without norms train at every depth; with the standard parameterization none of this
holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from theodolite.core.size import Size
from theodolite.fleet.run import Precision, Run
from theodolite.fleet.training import Workloads
from theodolite.models import DiT
from theodolite.planning.parameterization import WITHOUT_FACTORY, Parameterization
from theodolite.workloads import Workload, workload
from theodolite_studies.framework.networks import network
from theodolite_studies.framework.records import Record, select
from theodolite_studies.framework.study import Cell, FleetRuns, Row, Setting, Study, no_cell
from theodolite_studies.transfer.report import (
    BARE,
    DIT,
    DIT_RANDOM,
    NetworkFamilies,
    claims,
    figures,
    notes,
)

WIDE = tuple(Size(width, 4) for width in (128, 256, 512, 1024))
DEEP = tuple(Size(128, depth) for depth in (2, 4, 8, 16, 32, 64))
SIZES_DIT = (*WIDE, Size(128, 8), Size(128, 16))
FOUR = (Size(128, 4), Size(512, 4), Size(128, 2), Size(128, 16))
ROUNDS = 3
"""How often a window is widened whose best learning rate is its first or its last."""
FALL = {"adamw": 1.0, "lion": 1.0, "sgd": 1.0, "muon-kimi": 0.5, "muon": 0.5}
"""The power of the width by which the best learning rate of the standard parameterization may fall. Only the
first window depends on it."""


@dataclass(frozen=True)
class OptimizerPart:
    """One optimizer on one network over some sizes."""

    name: str
    workload: str
    optimizer: str
    sizes: tuple[Size, ...]
    centre: int
    """log2 of the base learning rate around which the windows lie. It was found beforehand at base size, with
    another seed and half as many steps; for Muon-Kimi on diffusion transformers by a run that was cut off."""


@dataclass(frozen=True, kw_only=True)
class TransferSetting(Setting):
    """How every run is trained, and which parts there are, in the order of their worth."""

    parts: tuple[OptimizerPart, ...]
    base: Size
    steps: int
    warmup: int
    held_out: int
    precision: Precision
    seeds: tuple[int, ...] = (0, 1, 2)
    workloads: Workloads = field(default_factory=dict)
    """Those that are the study's own, by name."""

    def about(self) -> dict[str, Any]:
        """How runs are trained; parts may be added."""
        names = ("steps", "warmup", "held_out", "precision")
        base = [self.base.width, self.base.depth]
        return {"base": base, **{name: getattr(self, name) for name in names}}

    def expected(self, part: OptimizerPart, parameterization: Parameterization, size: Size) -> int:
        """log2 of where a window is centred: the plan's stays; the standard one's falls as the width."""
        if parameterization == "plan":
            return part.centre
        return part.centre - round(FALL[part.optimizer] * math.log2(size.width / self.base.width))

    def reach(self, size: Size) -> int:
        """Octaves to either side of that, and by how many a window is widened.

        Large networks, which take most of the time, get fewer.
        """
        work = size.depth * size.width**2 / (self.base.depth * self.base.width**2)
        return 2 if work < 8 else 1

    def run(
        self, part: OptimizerPart, parameterization: Parameterization, size: Size, exponent: int, seed: int
    ) -> Run:
        """One run of a part."""
        return Run(
            workload=part.workload,
            size=size,
            lr=2.0**exponent,
            optimizer=part.optimizer,
            parameterization=parameterization,
            base=self.base if parameterization == "plan" else None,
            seed=seed,
            steps=self.steps,
            warmup=self.warmup,
            held_out=self.held_out,
            precision=self.precision,
            every=max(1, self.steps // 50),
            options={"betas": (0.9, 0.95)} if part.optimizer == "adamw" else {},
            vector_options={"betas": (0.9, 0.95)} if part.optimizer.startswith("muon") else {},
        )


def _dit_random() -> Workload:
    """The diffusion transformer with modulation layers and a readout that start at random, not at zero."""
    build = partial(DiT, channels=3, side=32, modulation="random")
    return dataclasses.replace(workload(DIT), name=DIT_RANDOM, build=build)


GPT = "gpt-enwik8"
FULL = TransferSetting(
    parts=(
        OptimizerPart("adamw", GPT, "adamw", tuple(dict.fromkeys([*WIDE, *DEEP])), -7),
        OptimizerPart("muon-kimi", GPT, "muon-kimi", tuple(dict.fromkeys([*WIDE, *DEEP])), -6),
        OptimizerPart("adamw-bare", BARE, "adamw", DEEP, -8),
        OptimizerPart("muon-kimi-bare", BARE, "muon-kimi", DEEP, -7),
        OptimizerPart("sgd", GPT, "sgd", FOUR, -2),
        OptimizerPart("lion", GPT, "lion", FOUR, -9),
        OptimizerPart("muon", GPT, "muon", FOUR, -4),
        OptimizerPart("dit-adamw", DIT, "adamw", SIZES_DIT, -7),
        OptimizerPart("dit-muon-kimi", DIT, "muon-kimi", SIZES_DIT, -6),
        OptimizerPart("dit-random-adamw", DIT_RANDOM, "adamw", SIZES_DIT, -6),
        OptimizerPart("dit-random-muon-kimi", DIT_RANDOM, "muon-kimi", SIZES_DIT, -6),
    ),
    base=Size(128, 4),
    steps=500,
    warmup=50,
    held_out=16,
    precision="bfloat16",
    workloads={DIT_RANDOM: _dit_random()},
)
SMALL = TransferSetting(
    small=True,
    parts=(
        OptimizerPart(
            "adamw-bare", "gpt-none", "adamw", tuple(Size(64, depth) for depth in (4, 8, 16, 32)), -8
        ),
        OptimizerPart("adamw", "gpt-pre", "adamw", (Size(64, 4), Size(128, 4), Size(64, 16)), -7),
    ),
    base=Size(64, 4),
    steps=150,
    warmup=15,
    held_out=16,
    precision="float32",
    workloads={name: network(name, num=8, length=64) for name in ("gpt-none", "gpt-pre")},
)
"""For a CPU: the built-in text, small batches and few steps; about an hour on two cores."""


def wanted(setting: TransferSetting, name: str, rows: Sequence[Row]) -> list[Run]:
    """The runs of a part: a window of learning rates for each size, widened where its best is at an edge."""
    part = next(part for part in setting.parts if part.name == name)
    runs = []
    for size in part.sizes:
        for parameterization in WITHOUT_FACTORY:
            centre, reach = setting.expected(part, parameterization, size), setting.reach(size)
            mine = select(
                rows,
                workload=part.workload,
                optimizer=part.optimizer,
                parameterization=parameterization,
                width=size.width,
                depth=size.depth,
            )
            low, high = _widened(mine, centre, reach, len(setting.seeds))
            for exponent in range(low, high + 1):
                for seed in setting.seeds:
                    runs.append(setting.run(part, parameterization, size, exponent, seed))
    return runs


def _widened(rows: Sequence[Row], centre: int, reach: int, num_seeds: int) -> tuple[int, int]:
    """The window that the rows there are ask for: its first and its last exponent."""
    low, high = centre - reach, centre + reach
    if not rows:
        return low, high
    exponents = [round(math.log2(row["lr"])) for row in rows]
    start, stop = min(low, *exponents), max(high, *exponents)
    means: dict[int, float] = {}
    for exponent in range(start, stop + 1):
        losses = [
            math.inf if row["held_out"] is None else row["held_out"]
            for row, there in zip(rows, exponents, strict=True)
            if there == exponent and row["status"] != "failed"
        ]
        if len(losses) < num_seeds:  # half a window says nothing about its edges
            return start, stop
        means[exponent] = sum(losses) / len(losses)
    finite = {exponent: mean for exponent, mean in means.items() if math.isfinite(mean)}
    if low - start >= ROUNDS * reach or stop - high >= ROUNDS * reach:
        return start, stop
    if not finite:  # all diverged: only lower ones can help
        return start - reach, stop
    best = min(finite, key=lambda exponent: finite[exponent])
    return start - reach * (best == start), stop + reach * (best == stop)


KEYS = ("workload", "optimizer", "parameterization", "width", "depth", "lr", "seed")


def run_records(setting: TransferSetting, rows: Sequence[Row]) -> Iterator[Record]:
    """Of each run what claims and figures need."""
    for row in rows:
        if row["status"] != "failed":
            loss = None if row["held_out"] is None else round(row["held_out"], 5)
            yield {**{name: row[name] for name in (*KEYS, "status", "step")}, "held_out": loss}


def cells(setting: TransferSetting) -> list[Cell]:
    """A part each."""
    return [{"part": part.name} for part in setting.parts]


STUDY = Study(
    "transfer",
    cells,
    no_cell,
    claims,
    figures,
    notes,
    data=lambda records, setting: NetworkFamilies(records, setting.base),
    full=FULL,
    small=SMALL,
    fleet=FleetRuns(
        wanted, run_records, KEYS, workloads=lambda setting: setting.workloads, rounds=ROUNDS + 1
    ),
)
