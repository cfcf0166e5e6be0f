"""Run the parts of the Goldilocks study that a folder does not hold yet; keep what came of them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite.core.progress import Progress
from theodolite.fleet.driver import RunReport, conduct
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger
from theodolite_studies.framework.records import Record, Records, read_records
from theodolite_studies.goldilocks.course import TEMPERATURES, course
from theodolite_studies.goldilocks.networks import NETWORKS, NORMED, TRAINED
from theodolite_studies.goldilocks.setting import PARTS, Setting
from theodolite_studies.goldilocks.training import TRAINING_PARTS, cells, runs_of_a_map, training_records
from theodolite_studies.goldilocks.zone import Start, logit_curve, scale_curves, scale_rows, temperature_curve

RECORDS, RUNS = "records.jsonl", "ledger"
Tell = Callable[[str], None]


def make(
    out: str | Path,
    *,
    setting: Setting,
    parts: Sequence[str] = (),
    engine: str = "auto",
    means: Resources | None = None,
    progress: Progress | None = None,
    tell: Tell = print,
) -> RunReport | None:
    """Make what the folder does not hold, part by part; the report of the last that trained.

    Measurements go to a file of records, a line for each curve; training runs go to a ledger. Whoever stops
    it loses the curve or the runs that were under way. Stops at the first part that was interrupted.
    """
    for name in parts:
        if name not in PARTS:
            raise UseError(f"the study has no part {name!r}: it has {', '.join(PARTS)}")
    out, means = Path(out).expanduser(), means or Resources()
    report = None
    for part in PARTS:
        if parts and part not in parts:
            continue
        if part in TRAINING_PARTS:
            report = _train(out, part, setting, engine, means, progress, tell)
            if report.stopped:
                return report
        else:
            _measure(out, part, setting, means.device, tell)
    return report


def read_folder(out: str | Path) -> tuple[Record, list[Record]]:
    """What a folder is about, and all that it holds, training as records too."""
    out = Path(out).expanduser()
    about, records = read_records(out / RECORDS)
    records = list(records)
    if (out / RUNS).exists():
        with Ledger.read(out / RUNS) as ledger:
            records += training_records(ledger.rows(), Setting.from_about(about))
    return about, records


def read(path: str | Path) -> tuple[Record, list[Record]]:
    """What a summary or a folder is about, and its records."""
    path = Path(path).expanduser()
    return read_folder(path) if path.is_dir() else read_records(path)


def write_summary(out: str | Path, path: str | Path) -> None:
    """All records of a folder as one file, from which figures are drawn.

    What the file holds already, about the same setting, and the folder does not, stays: parts may be made on
    several machines.
    """
    path = Path(path).expanduser()
    about, records = read_folder(out)
    together = {key_of(record): record for record in records}
    if path.exists():
        there, before = read_records(path)
        if there != about:
            raise UseError(f"{path} is about another setting of the study: give --summary another path")
        together = {key_of(record): record for record in before} | together
    lines = [about, *(together[key] for key in sorted(together, key=str))]
    write_whole(path, "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))


def key_of(record: Record) -> tuple[Any, ...]:
    """What tells a record from all others."""
    names = ("part", "network", "column", "row", "rule", "temperature", "seed")
    at = record.get("at")  # of a curve, all of its places
    return *(record.get(name, "") for name in names), at if isinstance(at, float) else ""


def _train(
    out: Path,
    part: str,
    setting: Setting,
    engine: str,
    means: Resources,
    progress: Progress | None,
    tell: Tell,
) -> RunReport:
    Records(out / RECORDS, setting.about())  # refuses another setting, and says what the runs are about
    wanted = cells(part, setting)
    workloads = {
        workload.name: workload
        for cell in wanted
        for workload in [cell.network.workload(cell.column, images=setting.images, tested=setting.tested)]
    }
    # One seed of a map at a time: large enough for a GPU, and what a kill can cost.
    able = dataclasses.replace(means, workloads=workloads, chunk=means.chunk or runs_of_a_map(part, setting))
    with Ledger.open(out / RUNS, name="goldilocks", spec=setting.about()) as ledger:
        runs = list({run.identity: run for run in (cell.run(setting) for cell in wanted)}.values())
        left = sum(run.identity not in ledger.settled() for run in runs)
        tell(
            f"{part}: {len(runs)} runs × {setting.epochs} epochs × {setting.images} images, {left} of them "
            "to make"
        )
        report = conduct(runs, ledger, engine=engine, resources=able, progress=progress)
        if not report.ok:
            tell(str(report))
    return report


def _measure(out: Path, part: str, setting: Setting, device: str, tell: Tell) -> None:
    records = Records(out / RECORDS, setting.about())
    there = {key_of(record) for record in records.all}
    start, made = time.perf_counter(), 0
    for keys, measure in _measurements(part, setting, device):
        missing = [key_of(key) not in there for key in keys]
        if not any(missing):
            continue
        found = zip(keys, measure(), missing, strict=True)
        records.append([{**key, **curve} for key, curve, is_missing in found if is_missing])
        before, made = made, made + sum(missing)
        if made // TELL_EVERY > before // TELL_EVERY:
            tell(f"{part}: {made} curves, {time.perf_counter() - start:.0f} s")
    tell(f"{part}: {made} curves made, {len(there)} records were there, {time.perf_counter() - start:.1f} s")


TELL_EVERY = 20
Curves = Callable[[], list[dict[str, Any]]]


def _measurements(part: str, setting: Setting, device: str) -> Iterator[tuple[list[Record], Curves]]:
    """What tells curves from others, and how they are measured; a network is built when it is needed."""
    for seed in setting.seeds:
        for network in [NETWORKS[name] for name in setting.networks]:
            for column in network.columns:
                key: Record = {"part": part, "network": network.name, "column": column, "seed": seed}
                made = cache(partial(Start.made, network, column, seed, num=setting.batch, device=device))
                if part == "zone":
                    yield [{**key, "row": "temperature"}], partial(_along_temperature, made, setting)
                    rows: list[Record] = [{**key, "row": row} for row in scale_rows(column)]
                    yield rows, partial(_along_scale, made, setting)
                elif part == "logits" and column in NORMED:
                    yield [key], partial(_logits, made, setting)
        if part == "course":
            for column, network in TRAINED.items():
                for at in TEMPERATURES:
                    key = {"part": part, "network": network.name, "column": column, "seed": seed}
                    yield (
                        [{**key, "temperature": at}],
                        partial(_course, network, column, at, seed, setting, device),
                    )


def _along_temperature(made: Callable[[], Start], setting: Setting) -> list[dict[str, Any]]:
    return [temperature_curve(made(), setting)]


def _along_scale(made: Callable[[], Start], setting: Setting) -> list[dict[str, Any]]:
    return list(scale_curves(made(), setting).values())


def _logits(made: Callable[[], Start], setting: Setting) -> list[dict[str, Any]]:
    return [logit_curve(made(), setting)]


def _course(*arguments: Any) -> list[dict[str, Any]]:
    return [course(*arguments)]
