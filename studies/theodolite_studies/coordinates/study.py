"""The coordinate check over the whole range: seven networks, two optimizers, widths and depths, seeds.

The claim: with width–depth muP every branch, the stream and the change of the logits keep their size from
width 64 to 1024 and from depth 2 to 32, and with the standard parameterization they do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.fleet.pool import Failure, pooled
from theodolite.planning.parameterization import (
    PARAMETERIZATIONS,
    Parameterization,
    plan_for,
    with_zero_readout,
)
from theodolite.probes.scaling.coordinates import AXES, Axis, Slope, fit_slopes, worst_first
from theodolite.probes.scaling.first_steps import Track, follow
from theodolite_studies.framework.networks import NETWORKS, network
from theodolite_studies.framework.records import Record, Records

OPTIMIZERS = ("adamw", "muon-kimi")
TOLERANCE = 0.1
LEARNING_RATES = {
    "gpt-pre": {"adamw": 2**-8, "muon-kimi": 2**-6, "beside muon-kimi": 2**-8},
    "gpt-post": {"adamw": 2**-8, "muon-kimi": 2**-6, "beside muon-kimi": 2**-8},
    "gpt-peri": {"adamw": 2**-8, "muon-kimi": 2**-6, "beside muon-kimi": 2**-8},
    "gpt-out": {"adamw": 2**-8, "muon-kimi": 2**-6, "beside muon-kimi": 2**-8},
    "gpt-none": {"adamw": 2**-12, "muon-kimi": 2**-6, "beside muon-kimi": 2**-8},
    "hf-llama": {"adamw": 2**-11, "muon-kimi": 2**-7, "beside muon-kimi": 2**-11},
    "hf-gpt2": {"adamw": 2**-11, "muon-kimi": 2**-7, "beside muon-kimi": 2**-11},
}
"""At base size; `beside` is of what AdamW trains beside Muon. Found by trying several on the depths and
looking at the slopes: for `gpt-none` and the networks of transformers the verdict at ±0.1 depends on them.
The study's page says what others gave."""
QUANTITIES = (
    "stream.first",
    "stream.middle",
    "stream",
    "branch.0",
    "branch.1",
    "logits",
    "change of stream",
    "change of branch.0",
    "change of branch.1",
    "change of logits",
)
"""In the order in which a record holds them. All networks of the study have two branches in a block."""


@dataclass(frozen=True)
class Grid:
    """Widths at one depth and depths at one width, and how each network is trained there."""

    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    depths: tuple[int, ...] = (2, 4, 8, 16, 32)
    centre: Size = field(default=Size(128, 4))
    """Where both lines of sizes meet."""
    base: Size = field(default=Size(128, 1))
    """Of the plan. At depth 1, so that a branch of L blocks starts at 1/L of what it is by itself: L random
    branches of size b/L add up to b/√L, which must be small beside the stream at every depth that is
    compared for the stream to be flat before anything is learnt."""
    steps: int = 10
    seeds: tuple[int, ...] = (3, 4, 5)
    """Not those that the learning rates were chosen with."""
    num: int = 8
    """Sequences in a batch."""
    length: int = 128

    @property
    def sizes(self) -> tuple[Size, ...]:
        """All sizes, each once."""
        wide = [Size(width, self.centre.depth) for width in self.widths]
        deep = [Size(self.centre.width, depth) for depth in self.depths]
        return tuple(dict.fromkeys([*wide, *deep]))

    @property
    def kept(self) -> tuple[int, int, int]:
        """The steps after which a record holds values."""
        return 0, self.steps // 3, self.steps


FULL = Grid()
SMALL = Grid(
    widths=(64, 128, 192),
    depths=(2, 4, 8),
    centre=Size(64, 2),
    base=Size(64, 1),
    seeds=(0, 1),
    num=4,
    length=32,
)
"""A minute instead of many."""


@dataclass(frozen=True)
class Cell:
    """One network at one size, trained in one way from several seeds."""

    network: str
    optimizer: str
    parameterization: Parameterization
    size: Size
    seeds: tuple[int, ...]

    @property
    def cost(self) -> float:
        """Roughly, so that long ones start first."""
        return self.size.depth * (1 + (self.size.width / 256) ** 2)


@dataclass(frozen=True)
class Claim:
    """The slope that is furthest off, with the plan and with the standard parameterization."""

    network: str
    optimizer: str
    axis: Axis
    plan: Slope
    standard: Slope | None

    @property
    def holds(self) -> bool:
        """Is every slope of the plan within the tolerance?"""
        return self.plan.within(TOLERANCE)


def conduct(
    out: str | Path,
    *,
    grid: Grid = FULL,
    networks: Sequence[str] = tuple(NETWORKS),
    optimizers: Sequence[str] = OPTIMIZERS,
    jobs: int = 1,
    device: str = "cpu",
    tell: Callable[[str], None] = print,
) -> list[Record]:
    """Run what is not yet in the file, and give all that is in it then. Runs that fail are told and left."""
    for name in networks:
        network(name, num=grid.num, length=grid.length)  # an unknown one fails before any work is done
    if unknown := [name for name in optimizers if name not in OPTIMIZERS]:
        raise UseError(f"the study has no optimizer {unknown[0]!r}: it has {' and '.join(OPTIMIZERS)}")
    records = Records(out, about(grid))
    cells = [
        Cell(name, optimizer, parameterization, size, grid.seeds)
        for name in networks
        for optimizer in optimizers
        for parameterization in PARAMETERIZATIONS
        for size in grid.sizes
    ]
    waiting = sorted(_waiting(cells, records.all), key=lambda cell: -cell.cost)
    tell(f"{len(cells) - len(waiting)} of {len(cells)} cells are in {out}")
    failed = 0
    results = pooled(partial(run_cell, grid, device), waiting, jobs, said=tell)
    for count, (cell, result) in enumerate(results, 1):
        title = f"{count}/{len(waiting)}  {cell.network} {cell.optimizer} {cell.parameterization} {cell.size}"
        if isinstance(result, Failure):
            failed += 1
            tell(f"{title}: failed: {result.reason}")
        else:
            records.append(result)
            tell(title)
    if failed:
        tell(f"{failed} of {len(waiting)} cells failed; the same command tries them again")
    return records.all


def about(grid: Grid) -> dict[str, Any]:
    """The first line of the file of records."""
    settings = dataclasses.asdict(grid)
    return {"study": "coordinates", **settings, "lr": LEARNING_RATES, "quantities": QUANTITIES}


def run_cell(grid: Grid, device: str, cell: Cell) -> list[dict[str, Any]]:
    """The records of one cell: the values of each seed after the steps that are kept."""
    workload = network(cell.network, num=grid.num, length=grid.length)
    inputs = workload.batch(0, 0)[0]
    plan = plan_for(
        workload.build,
        inputs,
        cell.size,
        parameterization=cell.parameterization,
        base=grid.base,
        optimizer=cell.optimizer,
        **_learning_rates(cell),
    )
    plan = with_zero_readout(plan)
    found = []
    for seed in cell.seeds:
        track = follow(workload, plan, seed=seed, steps=grid.steps, device=device)
        found.append(
            {
                "network": cell.network,
                "optimizer": cell.optimizer,
                "parameterization": cell.parameterization,
                "width": cell.size.width,
                "depth": cell.size.depth,
                "seed": seed,
                "status": track.status,
                "values": [[_short(track.values[name][step]) for step in grid.kept] for name in QUANTITIES],
            }
        )
    return found


def tracks_of(
    records: Iterable[Record], name: str, optimizer: str, parameterization: str
) -> tuple[Track, ...]:
    """The tracks of one network trained in one way, with the steps that were kept."""
    wanted = (name, optimizer, parameterization)
    return tuple(
        Track(
            size=Size(record["width"], record["depth"]),
            seed=record["seed"],
            status=record["status"],
            values={
                quantity: tuple(float("nan") if value is None else value for value in values)
                for quantity, values in zip(QUANTITIES, record["values"], strict=True)
            },
            expected={quantity: -1.0 for quantity in QUANTITIES if "branch" in quantity},
            branches=(),
            stream=(),
        )
        for record in records
        if (record["network"], record["optimizer"], record["parameterization"]) == wanted
    )


def claims(records: Sequence[Record]) -> tuple[Claim, ...]:
    """For each network, optimizer and axis the slopes that are furthest off after the last step."""
    found = []
    for name, optimizer in dict.fromkeys((record["network"], record["optimizer"]) for record in records):
        for axis in AXES:
            planned, standard = (
                worst_first(
                    slope
                    for slope in fit_slopes(tracks_of(records, name, optimizer, parameterization))
                    if slope.judged and slope.axis == axis
                )
                for parameterization in PARAMETERIZATIONS
            )
            if planned:
                found.append(Claim(name, optimizer, axis, planned[0], standard[0] if standard else None))
    return tuple(sorted(found, key=lambda claim: (OPTIMIZERS.index(claim.optimizer), claim.axis)))


def table(found: Sequence[Claim]) -> str:
    """The claims as a table in Markdown."""
    lines = [
        "| network | optimizer | against | plan: furthest off | holds | standard: furthest off |",
        "|---|---|---|---|---|---|",
    ]
    for claim in found:
        standard = _worded(claim.standard) if claim.standard else "not run"
        lines.append(
            f"| {claim.network} | {claim.optimizer} | {claim.axis} | {_worded(claim.plan)} | "
            f"{'yes' if claim.holds else 'no'} | {standard} |"
        )
    return "\n".join(lines)


def _worded(slope: Slope) -> str:
    if slope.excess != slope.excess:
        return f"{slope.quantity}: diverged"
    return f"{slope.quantity} {slope.excess:+.2f} ± {(slope.high - slope.low) / 2:.2f}"


def _waiting(cells: Iterable[Cell], records: Iterable[Record]) -> Iterator[Cell]:
    """The cells that have not ended, with the seeds that are missing."""

    def runs(cell: Cell) -> Iterator[tuple[Any, ...]]:
        start = (cell.network, cell.optimizer, cell.parameterization, cell.size.width, cell.size.depth)
        yield from ((*start, seed) for seed in cell.seeds)

    keys = ("network", "optimizer", "parameterization", "width", "depth", "seed")
    ended = {tuple(record[key] for key in keys) for record in records}
    for cell in cells:
        seeds = tuple(seed for seed, run in zip(cell.seeds, runs(cell), strict=True) if run not in ended)
        if seeds:
            yield dataclasses.replace(cell, seeds=seeds)


def _learning_rates(cell: Cell) -> dict[str, float]:
    rates = LEARNING_RATES[cell.network]
    beside = rates.get(f"beside {cell.optimizer}")
    return {"lr": rates[cell.optimizer], **({"vector_lr": beside} if beside else {})}


def _short(value: float) -> float | None:
    """Four digits are enough to draw and to fit; JSON has no nan."""
    return float(f"{value:.4g}") if abs(value) < float("inf") else None
