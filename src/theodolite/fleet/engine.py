"""Engines: functions from runs to outcomes; the resources they use; `serial` and `processes`."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.fleet.checkpoint import RunCheckpoint
from theodolite.fleet.isolation import OwnSettings
from theodolite.fleet.pool import Failure, pooled
from theodolite.fleet.provenance import environment
from theodolite.fleet.run import Outcome, Run
from theodolite.fleet.training import Workloads, attempt, failed
from theodolite.fleet.trunks import branch_step, trunk_of


def _unheard(_: object) -> None:
    pass


@dataclass(frozen=True)
class Resources:
    """Devices, processes and folders for runs; nothing here changes their results.

    Args:
        workloads: by name, those that are given as objects.
        device: `cpu`, `cuda` or `cuda:1`.
        jobs: processes at a time; Ray tasks too, unless the cluster has room for more.
        chunk: most models in one program of the vectorised engine; None for as many as memory holds.
        checkpoints: the folder in which long runs keep their state; None for no checkpoints.
        checkpoint_seconds: between two of them.
        address: of a Ray cluster; None for one on this machine, or the one Ray finds.
        per_run: what one run takes on a Ray cluster, such as {"CPU": 1, "GPU": 0.1}.
        timeout: seconds that a run may take; one that takes longer has failed. Only processes can be ended.
        leave: by identity of a run, steps after which its state is kept for shorter ones (`trunks`).
        begun: called when work on a run begins.
        said: called with a message, such as that a worker was lost.
    """

    workloads: Workloads = field(default_factory=dict)
    device: str = "cpu"
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    chunk: int | None = None
    checkpoints: Path | None = None
    checkpoint_seconds: float = 60.0
    address: str | None = None
    per_run: Mapping[str, float] = field(default_factory=dict)
    timeout: float | None = None
    leave: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    begun: Callable[[Run], None] = _unheard
    said: Callable[[str], None] = _unheard

    def checkpoint(self, run: Run) -> RunCheckpoint | None:
        """The checkpoint of a run; another file if the workload's source is another."""
        if self.checkpoints is None:
            return None
        source = environment(run.workload)["workload_source"]
        ending = f"{f'-{source}' if source else ''}.safetensors"
        folder, trunk = self.checkpoints.absolute(), trunk_of(run)
        return RunCheckpoint(
            folder / f"{run.identity}{ending}",
            self.checkpoint_seconds,
            self.said,
            enters=None if trunk is None else folder / f"{trunk}-{branch_step(run)}{ending}",
            leaves={step: folder / f"{trunk}-{step}{ending}" for step in self.leave.get(run.identity, ())},
        )

    def forget(self, run: Run) -> None:
        """Remove the checkpoint of a run that has a result."""
        if checkpoint := self.checkpoint(run):
            checkpoint.forget()

    def for_worker(self) -> Resources:
        """Without workloads, which are sent apart, and callbacks."""
        return dataclasses.replace(self, workloads={}, begun=_unheard, said=_unheard)


Outcomes = Generator[Outcome, None, None]
Engine = Callable[[Sequence[Run], Resources], Outcomes]
"""Outcomes in any order, one for each run. Closing the generator stops all work and leaves no process."""
FromWorker = tuple[Outcome, tuple[str, ...]]
"""An outcome, and messages for the driver."""

_NARROW = 64
"""Below about this width the time of a step is that of launching its operations."""


def cost(run: Run) -> float:
    """About how long a run takes, in no unit: steps × batch × depth × width², with a floor for width.

    >>> from theodolite import Size
    >>> a, b = (Run("gpt-sotu", Size(width, 4), 0.1, parameterization="standard") for width in (512, 1024))
    >>> round(cost(b) / cost(a), 2)
    3.95
    """
    return run.steps * (run.size.batch or 1) * run.size.depth * (run.size.width**2 + _NARROW**2)


def serial(runs: Sequence[Run], resources: Resources) -> Outcomes:
    """One run after the other, in this process."""
    for run in runs:
        resources.begun(run)
        yield attempt(run, resources.workloads, device=resources.device, checkpoint=resources.checkpoint(run))


def processes(runs: Sequence[Run], resources: Resources) -> Outcomes:
    """`resources.jobs` runs at a time, the longest first, each in a process with one thread.

    If a worker is killed, its run is tried again after the others. Workloads that are given as objects have
    to pickle; others are looked up by name in the worker.
    """
    begun: dict[str, float] = {}

    def note_begun(run: Run) -> None:
        begun[run.identity] = time.monotonic()
        resources.begun(run)

    results = pooled(
        _Parcel(runs, resources),
        sorted(runs, key=cost, reverse=True),
        max(resources.jobs, 1),
        begun=note_begun,
        said=resources.said,
        timeout=resources.timeout,
        spent=_broken if torch.device(resources.device).type == "cuda" else lambda result: False,
    )
    with closing(results):
        for run, result in results:
            if isinstance(result, Failure):
                seconds = time.monotonic() - begun[run.identity]
                yield failed(run, result.trace or result.reason, seconds, resources.device, "processes")
                continue
            outcome, lines = result
            for line in lines:
                resources.said(line)
            yield outcome


def attempt_in_worker(
    run: Run, workloads: Workloads, resources: Resources, engine: str, settings: OwnSettings | None = None
) -> FromWorker:
    """Make a run in a worker of an engine; messages are collected for the driver."""
    lines: list[str] = []
    checkpoint = dataclasses.replace(resources, said=lines.append).checkpoint(run)
    outcome = attempt(
        run, workloads, device=resources.device, engine=engine, checkpoint=checkpoint, settings=settings
    )
    return outcome, tuple(lines)


def why_not_sent(runs: Sequence[Run], resources: Resources) -> str | None:
    """Why the workloads cannot be sent to other processes; None if they can."""
    try:
        pickle.dumps(_Parcel(runs, resources))
    except UseError as error:
        return str(error)
    return None


class _Parcel:
    """A function on its way to another process, with the workloads that the runs name; errors name them."""

    def __init__(self, runs: Sequence[Run], resources: Resources) -> None:
        used = {run.workload for run in runs}
        self.resources = resources.for_worker()
        self.workloads = {name: each for name, each in resources.workloads.items() if name in used}

    def __call__(self, run: Run) -> FromWorker:
        return attempt_in_worker(run, self.workloads, self.resources, "processes")

    def __getstate__(self) -> dict[str, Any]:
        packed = {}
        for name, workload in self.workloads.items():
            with _delivering(name):
                packed[name] = pickle.dumps(workload)
                if b"__main__" in packed[name] and not hasattr(sys.modules["__main__"], "__file__"):
                    raise UseError("it was made in a notebook or at a prompt")
        return {"resources": self.resources, "packed": packed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.resources, self.workloads = state["resources"], {}
        for name, data in state["packed"].items():
            with _delivering(name):
                self.workloads[name] = pickle.loads(data)


@contextmanager
def _delivering(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, UseError) else in_one_line(error)
        raise UseError(
            f"workload {name!r} cannot be sent to another process: {reason}. Put it into a file and give "
            "path/to/file.py:name, or take the engine 'serial'"
        ) from error


def _broken(result: FromWorker | Failure) -> bool:
    """After an error on a GPU, everything else in the same process may fail too."""
    return isinstance(result, Failure) or not result[0].settled
