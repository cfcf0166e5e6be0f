"""What no run of a sweep could be made of is refused before the first one, and before there is a ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.opening import SUFFIXES, file_of
from theodolite.fleet.run import Run
from theodolite.fleet.training import planned
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.schedule import LRFactor
from theodolite.workloads import Workload

FILES = (*SUFFIXES, ".html", ".json", ".csv", ".parquet")
"""Endings that no folder has."""


def check_folder(out: str | Path) -> Path:
    """The absolute path of the folder: workers on a cluster start in folders of their own."""
    folder = Path(out).expanduser()
    if folder.is_file() or (folder.suffix.lower() in FILES and not folder.is_dir()):
        raise UseError(
            f"out is {out}, a file: it is the folder of the ledger and the page. Give one such as sweep"
        )
    return folder.absolute()


def check_runs(runs: Sequence[Run], workload: Workload, folder: Path) -> None:
    """Can each size be planned, with each optimizer and parameterization? No network is built for it.

    Runs that the ledger in the folder has a result of are not asked.
    """
    settled = _settled(folder)
    waiting = [run for run in runs if run.identity not in settled]
    for timing in dict.fromkeys((run.schedule, run.steps, run.warmup, run.final) for run in waiting):
        LRFactor(*timing)
    for run in {(run.size, run.optimizer, run.parameterization): run for run in waiting}.values():
        plan = planned(run, workload)
        for rule in {row.rule for row in plan.trained}:
            options: Mapping[str, Any] = plan.options if rule == plan.optimizer_name else plan.vector_options
            OPTIMIZERS[rule].maker(options)


def _settled(folder: Path) -> set[str]:
    if not file_of(folder).is_file():
        return set()
    with Ledger.read(folder) as ledger:
        return set(ledger.settled())
