"""Scale vectors in training: removed, decayed, one for each reader, on both sides, in two parts; on enwik8.

The claims of the scale-vector paper: removing them hurts; decay helps those of Input-Norms and harms those of
Output-Norms; three small changes help each, and more so together. Effects are of thousandths of a nat, so
every comparison is between runs of the same seeds, which share their batches and their start.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from theodolite_studies.framework.records import Record, Records, read_records
from theodolite_studies.scale_vectors.flow import experiments
from theodolite_studies.scale_vectors.networks import name_of, workload

EXACT = "exact"
"""The part that trains no network."""
STUDY = "scale-vectors"
BASE = Size(128, 4)


@dataclass(frozen=True)
class Arm:
    """One way to train, at every learning rate and weight decay of a grid."""

    structure: str
    """A name in `scale_vectors_networks.STRUCTURES`."""
    exponents: tuple[float, ...]
    """log2 of the learning rates."""
    decays: tuple[float, ...]
    num_seeds: int
    optimizer: str = "adamw"
    schedule: str = "cosine"
    decay: str = "paper"
    size: Size = BASE

    @property
    def part(self) -> str:
        """Arms of one structure, optimizer and size are one program: a part."""
        return "-".join([self.structure, *self._others])

    @property
    def name(self) -> str:
        """What tells it from the others.

        >>> Arm("all", (-7.0,), (0.1,), 3, schedule="wsd", size=Size(256, 8)).name
        'all 256x8 wsd paper'
        """
        return " ".join([self.structure, *self._others, self.schedule, self.decay])

    @property
    def _others(self) -> list[str]:
        others = [] if self.optimizer == "adamw" else [self.optimizer]
        return others if self.size == BASE else [*others, f"{self.size.width}x{self.size.depth}"]


@dataclass(frozen=True)
class Setting:
    """How every run is trained, and which arms there are, their parts in the order of their worth."""

    name: str
    text: str
    arms: tuple[Arm, ...]
    steps: int
    warmup: int
    num: int
    length: int
    held_out: int
    precision: Precision
    exact_seeds: int

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all parts, in order."""
        return tuple(dict.fromkeys([*(arm.part for arm in self.arms), EXACT]))

    def runs(self, arm: Arm) -> list[Run]:
        """Those of an arm."""
        return [
            self.run(arm, exponent, weight_decay, seed)
            for exponent in arm.exponents
            for weight_decay in arm.decays
            for seed in range(arm.num_seeds)
        ]

    def run(self, arm: Arm, exponent: float, weight_decay: float, seed: int) -> Run:
        """One run of an arm. A network that is not of base size is trained by the plan from there."""
        planned = arm.size != BASE
        betas = {"betas": (0.9, 0.95)}
        return Run(
            workload=name_of(arm.structure, self.text),
            size=arm.size,
            lr=2.0**exponent,
            optimizer=arm.optimizer,
            parameterization="plan" if planned else "standard",
            base=BASE if planned else None,
            seed=seed,
            steps=self.steps,
            warmup=self.warmup,
            schedule=arm.schedule,
            weight_decay=weight_decay,
            decay=arm.decay,
            held_out=self.held_out,
            precision=self.precision,
            every=max(1, self.steps // 50),
            options=betas if arm.optimizer == "adamw" else {},
            vector_options={} if arm.optimizer == "adamw" else betas,
        )

    def about(self) -> dict[str, Any]:
        """What a file of records has to agree with to be gone on with."""
        values = dataclasses.asdict(self)
        return {
            "study": STUDY,
            **{name: values[name] for name in values if name not in ("arms", "exact_seeds")},
        }


LRS, DECAYS = (-7.5, -7.0, -6.5), (0.125, 0.5)
"""Around 2⁻⁷, where `study transfer` found AdamW's best. Over 1000 steps of a cosine from 2⁻⁷ a weight that
nothing else moves shrinks by a factor of e^-0.5 and e^-2: enough to matter."""


def _tuned(structure: str, num_seeds: int = 8, **others: Any) -> Arm:
    return Arm(structure, LRS, DECAYS, num_seeds, **others)


FULL = Setting(
    "full",
    "enwik8",
    (
        _tuned("plain"),
        _tuned("plain", decay="matrices"),
        _tuned("plain", 4, schedule="wsd"),
        _tuned("all"),
        _tuned("all", 4, schedule="wsd"),
        _tuned("removed"),
        *(Arm("peri", (-7.0,), DECAYS, 8, decay=decay) for decay in ("matrices", "paper", "everything")),
        _tuned("heterogeneous"),
        _tuned("both"),
        _tuned("direction"),
        Arm("plain", (-7.5, -7.0), DECAYS, 3, size=Size(256, 8)),
        Arm("all", (-7.5, -7.0), DECAYS, 3, size=Size(256, 8)),
        Arm("plain", (-6.5, -6.0), DECAYS, 4, optimizer="muon-kimi"),
        Arm("all", (-6.5, -6.0), DECAYS, 4, optimizer="muon-kimi"),
    ),
    steps=1000,
    warmup=100,
    num=32,
    length=256,
    held_out=32,
    precision="bfloat16",
    exact_seeds=3,
)
SMALL = dataclasses.replace(
    FULL,
    name="small",
    text="sotu",
    arms=tuple(
        dataclasses.replace(arm, exponents=arm.exponents[-1:], decays=arm.decays[-1:], num_seeds=2)
        for arm in FULL.arms
        if arm.size == BASE and arm.optimizer == "adamw"
    ),
    steps=20,
    warmup=2,
    num=2,
    length=32,
    held_out=2,
    precision="float32",
    exact_seeds=2,
)
"""For a CPU: the built-in text and a few steps, to see how it goes."""
SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in (FULL, SMALL)}

RECORDS, RUNS = "records.jsonl", "ledger"


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
    """Make what the folder does not hold, part by part; the report of the last that trained.

    Stops at the first part that was interrupted. What is kept of a part that was made is not made again.
    """
    for name in parts:
        if name not in setting.parts:
            raise UseError(f"the study has no part {name!r}: it has {', '.join(setting.parts)}")
    out, report = Path(out).expanduser(), None
    records = Records(out / RECORDS, setting.about())
    structures = dict.fromkeys(arm.structure for arm in setting.arms)
    made = [workload(each, text=setting.text, num=setting.num, length=setting.length) for each in structures]
    able = dataclasses.replace(means or Resources(), workloads={each.name: each for each in made})
    for part in setting.parts:
        if parts and part not in parts:
            continue
        if part == EXACT:
            there = {record["seed"] for record in records.all}
            for seed in set(range(setting.exact_seeds)) - there:
                records.append(experiments(seed))
            tell(f"{EXACT}: {len(records.all)} records")
            continue
        runs = [run for arm in setting.arms if arm.part == part for run in setting.runs(arm)]
        with Ledger.open(out / RUNS, name=STUDY, spec=setting.about()) as ledger:
            left = sum(run.identity not in ledger.settled() for run in runs)
            tell(f"{part}: {len(runs)} runs, {left} of them to make")
            report = conduct(runs, ledger, engine=engine, resources=able, progress=progress)
        if not report.ok:
            tell(str(report))
        if report.stopped:
            return report
    return report


def read(path: str | Path) -> tuple[Setting, list[Record]]:
    """The setting and the records of a summary or of a folder; runs are records too."""
    path = Path(path).expanduser()
    about, kept = read_records(path / RECORDS if path.is_dir() else path)
    setting = SETTINGS.get(str(about.get("name")))
    if setting is None or about != json.loads(json.dumps(setting.about())):
        raise UseError(f"{path} is no file of the study {STUDY}: its first line is about something else")
    records = list(kept)
    if path.is_dir() and (path / RUNS).exists():
        with Ledger.read(path / RUNS) as ledger:
            records += training_records(ledger.rows(), setting)
    order = [arm.name for arm in setting.arms]
    return setting, sorted(
        records, key=lambda record: (order.index(record["arm"]) if "arm" in record else -1, _key(record))
    )


def write_summary(out: str | Path, path: str | Path) -> None:
    """All records of a folder as one small file, from which tables and figures are made.

    What the file holds already and the folder does not, stays: parts may be made on several machines.
    """
    path = Path(path).expanduser()
    setting, records = read(out)
    together: dict[str, Record] = {}
    if path.exists():
        there, before = read(path)
        if there != setting:
            raise UseError(f"{path} is about another setting of the study: give --summary another path")
        together = {_key(record): record for record in before}
    together |= {_key(record): record for record in records}
    lines = [setting.about(), *(together[key] for key in sorted(together))]
    write_whole(path, "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))


def training_records(rows: Iterable[Mapping[str, Any]], setting: Setting) -> list[Record]:
    """Of each run of a ledger what the claims need."""
    arms = {run.identity: (arm, run) for arm in setting.arms for run in setting.runs(arm)}
    found: list[Record] = []
    for row in rows:
        if row["identity"] not in arms or row["status"] == "failed":
            continue
        arm, run = arms[row["identity"]]
        found.append(
            {
                "part": arm.part,
                "arm": arm.name,
                "lr": run.lr,
                "weight_decay": run.weight_decay,
                "seed": run.seed,
                "loss": None if row["held_out"] is None else round(row["held_out"], 6),
                "seconds": round(row["seconds"], 2),
            }
        )
    return found


def _key(record: Record) -> str:
    names = ("part", "arm", "lr", "weight_decay", "seed", "kind", "step", "on_weight", "on_gain")
    return json.dumps([record.get(name) for name in names])
