"""Runs in processes of their own, which share the machine's cores or its card."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch

from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.fleet.engine import Means, attempt_in_worker, cost
from theodolite.fleet.outcome import Outcome
from theodolite.fleet.pool import Failure, pooled
from theodolite.fleet.run import Run
from theodolite.fleet.training import failed
from theodolite.workloads import Workload


def processes(runs: Sequence[Run], means: Means) -> Iterator[Outcome]:
    """`means.jobs` runs at a time, the longest first, each in a process with one thread.

    A worker that is killed loses only its run, which is tried again after the others. Workloads that were
    handed over as objects have to pickle; those with a name are looked up in the worker.
    """
    begun: dict[str, float] = {}

    def note_begun(run: Run) -> None:
        begun[run.identity] = time.monotonic()
        means.begun(run)

    results = pooled(
        partial(_attempt, _parcels(runs, means), means.for_worker()),
        sorted(runs, key=cost, reverse=True),
        max(means.jobs, 1),
        begun=note_begun,
        said=means.said,
        timeout=means.timeout,
        spent=_broken if torch.device(means.device).type == "cuda" else lambda result: False,
    )
    with closing(results):
        for run, result in results:
            if isinstance(result, Failure):
                seconds = time.monotonic() - begun[run.identity]
                yield failed(run, result.trace or result.reason, seconds, means.device, "processes")
                continue
            outcome, lines = result
            for line in lines:
                means.said(line)
            yield outcome


def why_not(runs: Sequence[Run], means: Means) -> str | None:
    """Why the workloads cannot be sent to other processes; None if they can."""
    try:
        pickle.dumps(_parcels(runs, means))
    except UseError as error:
        return str(error)
    return None


def _parcels(runs: Sequence[Run], means: Means) -> list[_Parcel]:
    used = {run.workload for run in runs}
    return [_Parcel(name, workload) for name, workload in means.workloads.items() if name in used]


def _attempt(parcels: Sequence[_Parcel], means: Means, run: Run) -> tuple[Outcome, tuple[str, ...]]:
    workloads = {parcel.name: parcel.workload for parcel in parcels}
    return attempt_in_worker(run, workloads, means, "processes")


def _broken(result: tuple[Outcome, tuple[str, ...]] | Failure) -> bool:
    """After an error on the card, everything else in the same process may fail too."""
    return isinstance(result, Failure) or not result[0].settled


class _Parcel:
    """A workload on its way to another process, which is named if it does not arrive."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload = name, workload

    def __getstate__(self) -> dict[str, Any]:
        try:
            data = pickle.dumps(self.workload)
        except Exception as error:
            raise UseError(_undelivered(self.name, in_one_line(error))) from error
        if b"__main__" in data and not hasattr(sys.modules["__main__"], "__file__"):
            raise UseError(_undelivered(self.name, "it was made in a notebook or at a prompt"))
        return {"name": self.name, "data": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            self.name, self.workload = state["name"], pickle.loads(state["data"])
        except Exception as error:
            raise UseError(_undelivered(state["name"], in_one_line(error))) from error


def _undelivered(name: str, reason: str) -> str:
    return (
        f"workload {name!r} cannot be sent to another process: {reason}. Put it into a file and "
        "give path/to/file.py:name, or take the engine 'serial'"
    )
