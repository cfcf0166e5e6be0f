"""Scale vectors in training: removed, decayed, one for each reader, on both sides, in two parts; on enwik8.

The claims of the scale-vector paper: removing them hurts; decay helps those of Input-Norms and harms those of
Output-Norms; three small changes help each, and more so together. Effects are of thousandths of a nat, so
every comparison is between runs of the same seeds, which share their batches and their start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from theodolite.fleet.run import Run
from theodolite.fleet.training import Workloads
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, FleetRuns, Row, Study
from theodolite_studies.scale_vectors.arms import EXACT, FULL, SMALL, ArmSetting, workload
from theodolite_studies.scale_vectors.claims import ArmRuns, claims
from theodolite_studies.scale_vectors.flow import experiments
from theodolite_studies.scale_vectors.report import figures, notes


def cells(setting: ArmSetting) -> list[Cell]:
    """Parts of arms that are one program each, in the order of their worth; then the flow, by seed."""
    parts = dict.fromkeys(arm.part for arm in setting.arms)
    flows: list[Cell] = [{"part": EXACT, "seed": seed} for seed in range(setting.exact_seeds)]
    return [*({"part": part} for part in parts), *flows]


def run(cell: Cell, *_: object) -> Iterator[Record]:
    """The gradient flow, which trains no network."""
    yield from experiments(cell["seed"])


def runs(setting: ArmSetting, part: str, rows: Sequence[Row]) -> list[Run]:
    """Those of all arms of a part."""
    return [run for arm in setting.arms if arm.part == part for run in setting.runs(arm)]


def workloads(setting: ArmSetting) -> Workloads:
    """One for each structure."""
    names = dict.fromkeys(arm.structure for arm in setting.arms)
    made = [workload(name, text=setting.text, num=setting.num, length=setting.length) for name in names]
    return {one.name: one for one in made}


def run_records(setting: ArmSetting, rows: Sequence[Row]) -> list[Record]:
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


STUDY = Study(
    "scale-vectors",
    cells,
    run,
    claims,
    figures,
    notes,
    data=ArmRuns,
    full=FULL,
    small=SMALL,
    fleet=FleetRuns(
        runs,
        run_records,
        ("part", "arm", "lr", "weight_decay", "seed", "kind", "step", "on_weight", "on_gain"),
        workloads=workloads,
    ),
)
