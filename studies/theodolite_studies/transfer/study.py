"""Learning-rate transfer over the whole range: five optimizers, widths 128 to 1024, depths 2 to 64, enwik8.

The claim: with a plan the best base learning rate stays where it is as the network grows, wider and deeper is
never worse, and networks without norms train at every depth; with the standard parameterization none of this
holds.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite.core.progress import Progress
from theodolite.core.size import Size
from theodolite.fleet.driver import RunReport, conduct
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Precision, Run
from theodolite.fleet.training import Workloads
from theodolite.planning.parameterization import PARAMETERIZATIONS, Parameterization
from theodolite.sweeping.curves import Row
from theodolite_studies.framework.networks import network

WIDE = tuple(Size(width, 4) for width in (128, 256, 512, 1024))
DEEP = tuple(Size(128, depth) for depth in (2, 4, 8, 16, 32, 64))
FOUR = (Size(128, 4), Size(512, 4), Size(128, 2), Size(128, 16))
ROUNDS = 3
"""How often a window is widened whose best learning rate is its first or its last."""
FALL = {"adamw": 1.0, "lion": 1.0, "sgd": 1.0, "muon-kimi": 0.5, "muon": 0.5}
"""The power of the width by which the best learning rate of the standard parameterization may fall. Only the
first window depends on it."""


@dataclass(frozen=True)
class Part:
    """One optimizer on one network over some sizes."""

    name: str
    workload: str
    optimizer: str
    sizes: tuple[Size, ...]
    centre: int
    """log2 of the base learning rate around which the windows lie, found at base size with another seed and
    half as many steps."""


@dataclass(frozen=True)
class Setting:
    """How every run is trained, and which parts there are, in the order of their worth."""

    name: str
    parts: tuple[Part, ...]
    base: Size
    steps: int
    warmup: int
    held_out: int
    precision: Precision
    seeds: tuple[int, ...] = (0, 1, 2)
    workloads: Workloads = field(default_factory=dict)
    """Those that are the study's own, by name."""

    def expected(self, part: Part, parameterization: Parameterization, size: Size) -> int:
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
        self, part: Part, parameterization: Parameterization, size: Size, exponent: int, seed: int
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


GPT, BARE = "gpt-enwik8", "gpt-enwik8-bare"
FULL = Setting(
    "full",
    (
        Part("adamw", GPT, "adamw", tuple(dict.fromkeys([*WIDE, *DEEP])), -7),
        Part("muon-kimi", GPT, "muon-kimi", tuple(dict.fromkeys([*WIDE, *DEEP])), -6),
        Part("adamw-bare", BARE, "adamw", DEEP, -8),
        Part("muon-kimi-bare", BARE, "muon-kimi", DEEP, -7),
        Part("sgd", GPT, "sgd", FOUR, -2),
        Part("lion", GPT, "lion", FOUR, -9),
        Part("muon", GPT, "muon", FOUR, -4),
    ),
    base=Size(128, 4),
    steps=500,
    warmup=50,
    held_out=16,
    precision="bfloat16",
)
SMALL = Setting(
    "small",
    (
        Part("adamw-bare", "gpt-none", "adamw", tuple(Size(64, depth) for depth in (4, 8, 16, 32)), -8),
        Part("adamw", "gpt-pre", "adamw", (Size(64, 4), Size(128, 4), Size(64, 16)), -7),
    ),
    base=Size(64, 4),
    steps=150,
    warmup=15,
    held_out=16,
    precision="float32",
    workloads={name: network(name, num=8, length=64) for name in ("gpt-none", "gpt-pre")},
)
"""For a CPU: the built-in text, small batches and few steps; about an hour on two cores."""


def part_names(setting: Setting) -> tuple[str, ...]:
    """The names of the parts, in order."""
    return tuple(part.name for part in setting.parts)


def make(
    out: str | Path,
    *,
    setting: Setting = FULL,
    parts: Sequence[str] = (),
    engine: str = "auto",
    means: Resources | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] = print,
) -> RunReport | None:
    """Make the runs that the ledger in a folder does not hold, part by part; the report of the last.

    A window whose best learning rate lies at its edge is widened, at most three times. Stops at the first
    part that was interrupted.
    """
    known = part_names(setting)
    for name in parts:
        if name not in known:
            raise UseError(f"the study has no part {name!r}: it has {', '.join(known)}")
    chosen = [part for part in setting.parts if not parts or part.name in parts]
    report = None
    able = dataclasses.replace(means or Resources(), workloads=setting.workloads)
    with Ledger.open(out, name="transfer", spec=_spec(setting)) as ledger:
        for part in chosen:
            for turn in range(ROUNDS + 1):
                settled = ledger.settled()
                runs = wanted(setting, part, ledger.rows())
                left = sum(run.identity not in settled for run in runs)
                if turn and not left:
                    break
                tell(f"{part.name}: {len(runs)} runs, {left} of them to make")
                report = conduct(runs, ledger, engine=engine, resources=able, progress=progress)
                if not report.ok:
                    tell(str(report))
                if report.stopped:
                    return report
    return report


def wanted(setting: Setting, part: Part, rows: Sequence[Row]) -> list[Run]:
    """The runs of a part: a window of learning rates for each size, widened where its best is at an edge."""
    runs = []
    for size in part.sizes:
        for parameterization in PARAMETERIZATIONS:
            centre, reach = setting.expected(part, parameterization, size), setting.reach(size)
            mine = [
                row
                for row in rows
                if (row["workload"], row["optimizer"], row["parameterization"])
                == (part.workload, part.optimizer, parameterization)
                and (row["width"], row["depth"]) == (size.width, size.depth)
            ]
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


COLUMNS = (
    "workload",
    "optimizer",
    "parameterization",
    "width",
    "depth",
    "lr",
    "seed",
    "status",
    "step",
    "held_out",
)


def summary(rows: Sequence[Row]) -> str:
    """The small file that the documentation is drawn from: one line of CSV for each run."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    order = sorted(rows, key=lambda row: tuple(row[name] for name in COLUMNS[:7]))
    for row in order:
        if row["status"] != "failed":
            loss = None if row["held_out"] is None else f"{row['held_out']:.5f}"
            writer.writerow({**row, "lr": repr(row["lr"]), "held_out": loss})
    return out.getvalue()


def write_summary(out: str | Path, path: str | Path) -> None:
    """The summary of a ledger, as a file."""
    with Ledger.read(out) as ledger:
        write_whole(Path(path), summary(ledger.rows()))


def read_rows(path: str | Path) -> list[Row]:
    """Rows from a summary, or from a ledger."""
    path = Path(path).expanduser()
    if path.suffix != ".csv":
        with Ledger.read(path) as ledger:
            return list(ledger.rows())
    if not path.is_file():
        raise UseError(f"{path} is not there: run the study first")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise UseError(f"{path} is no summary of the study: its columns are {reader.fieldnames}")
        return [_read(row) for row in reader]


def _read(row: Mapping[str, str]) -> dict[str, Any]:
    whole = {name: int(row[name]) for name in ("width", "depth", "seed", "step")}
    loss = float(row["held_out"]) if row["held_out"] else None
    return {**row, **whole, "lr": float(row["lr"]), "held_out": loss}


def _spec(setting: Setting) -> dict[str, Any]:
    return {
        "study": "transfer",
        "base": [setting.base.width, setting.base.depth],
        "steps": setting.steps,
        "warmup": setting.warmup,
        "held_out": setting.held_out,
        "precision": setting.precision,
    }
