"""The driver: choose an engine, make the runs that the ledger does not have, report progress and results."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from theodolite.core.arguments import one_of, positive
from theodolite.core.batches import targets_in
from theodolite.core.building import check_device
from theodolite.core.errors import UseError
from theodolite.core.progress import Progress
from theodolite.fleet.checkpoint import clear
from theodolite.fleet.engine import Engine, Resources, cost, processes, serial, why_not_sent
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.provenance import environment
from theodolite.fleet.ray_tasks import ray_tasks
from theodolite.fleet.run import Outcome, Run
from theodolite.fleet.stack import families_of
from theodolite.fleet.training import conditions, workload_for
from theodolite.fleet.trunks import sharing
from theodolite.fleet.vectorised import vectorised, why_not
from theodolite.present.bar import Bar
from theodolite.present.result import Result
from theodolite.present.text import counted, duration

ENGINES: Mapping[str, Engine] = {
    "serial": serial,
    "processes": processes,
    "vectorised": vectorised,
    "ray": ray_tasks,
}
PROCESS_START = 4.0
"""Seconds until a new process has begun to work."""
MOST_SHOWN = 5
"""How many failures a report lists."""


@dataclass(frozen=True)
class RunReport(Result):
    """How many runs finished, diverged and failed, and how long it took."""

    kind = "run report"

    total: int
    before: int
    """How many the ledger had already."""
    finished: int
    diverged: int
    failed: tuple[tuple[Run, str], ...]
    """Each with the last line of its error."""
    stopped: bool
    """Was it interrupted?"""
    seconds: float
    engine: str

    @property
    def ok(self) -> bool:
        """Has every run a result?"""
        return not self.stopped and not self.failed

    def blocks(self) -> Iterator[str]:
        """Counts, then the failures."""
        yield str(self)

    def __str__(self) -> str:  # a line for each failure, however long
        made = f"{self.finished} finished, {self.diverged} diverged, {len(self.failed)} failed"
        before = f"{self.before} were there before, " if self.before else ""
        lines = [f"{counted(self.total, 'run')}: {before}{made}, in {duration(self.seconds)} ({self.engine})"]
        lines += [f"  failed: {run}: {error}" for run, error in self.failed[:MOST_SHOWN]]
        if len(self.failed) > MOST_SHOWN:
            lines.append(f"  and {len(self.failed) - MOST_SHOWN} more; the ledger has all their tracebacks")
        left = self.total - self.before - self.finished - self.diverged - len(self.failed)
        if self.stopped:
            lines.append(f"Stopped with {counted(left, 'run')} to go; the same command again continues here")
        elif self.failed:
            lines.append("The same command again runs only these")
        return "\n".join(lines)


class RunListener:
    """What the driver calls while it works; subclasses override what they need."""

    def opened(self, runs: Sequence[Run], before: int) -> None:
        """These runs are to be made; `before` others are in the ledger."""

    def working(self, engine: str, jobs: int) -> None:
        """The engine that was chosen, and how many processes it may use."""

    def begun(self, run: Run) -> None:
        """Work on a run has begun, for the first time or again."""

    def ended(self, outcome: Outcome) -> None:
        """An outcome is in the ledger."""

    def said(self, line: str) -> None:
        """A message, such as that a worker was lost."""

    def closed(self) -> None:
        """The work is over."""


class ProgressListener(RunListener):
    """Counts runs and estimates the time left, for a `Progress`.

    The cost of a run is known before it is made; the time of a unit of cost is measured on ended runs. If it
    is a `Bar`, messages, failures and the totals are printed above it.
    """

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._bar = progress if isinstance(progress, Bar) else None
        self._engine, self._workers = "", 1
        self.opened((), 0)

    def opened(self, runs: Sequence[Run], before: int) -> None:
        """Begin to count."""
        self._start, self._total, self._before = self._clock(), len(runs), before
        self._running: dict[str, tuple[float, float]] = {}
        self._counts = {"finished": 0, "diverged": 0, "failed": 0}
        self._total_cost, self._done_cost = sum(map(cost, runs)), 0.0
        self._seconds, self._measured_cost = 0.0, 0.0

    def working(self, engine: str, jobs: int) -> None:
        """Only processes and Ray tasks share the work; the models of a vectorised engine end together."""
        self._workers = jobs if engine in ("processes", "ray") else 1
        if engine != self._engine:
            self._engine = engine
            self.said(f"Engine: {engine}")

    def begun(self, run: Run) -> None:
        """One more is running."""
        self._running[run.identity] = cost(run), self._clock()
        self._tell()

    def ended(self, outcome: Outcome) -> None:
        """One less is running. A failure is told at once."""
        run = outcome.run
        self._running.pop(run.identity, None)
        self._counts[outcome.status] += 1
        self._done_cost += cost(run)
        self._seconds += outcome.seconds
        self._measured_cost += cost(run) * outcome.step / run.steps
        if outcome.error:
            self.said(f"failed: {run}: {outcome.reason}")
        self._tell()

    def said(self, line: str) -> None:
        """Print a line above the bar, if there is one."""
        if self._bar:
            self._bar.say(line)

    def closed(self) -> None:
        """Leave the totals."""
        if self._bar:
            self._bar.close()
        if self._total:
            self.said(self.line(is_over=True))

    def seconds_left(self) -> float | None:
        """An estimate; None until a step was made by a run that is over."""
        if not self._measured_cost:
            return None
        pace = self._seconds / self._measured_cost
        work = pace * (self._total_cost - self._done_cost)
        now, running = self._clock(), list(self._running.values())
        longest = sorted((now - start for _, start in running), reverse=True)[: self._workers]
        work -= min(sum(longest), sum(pace * each for each, _ in running))
        waiting = self._total - sum(self._counts.values())
        return max(work, 0.0) / max(min(self._workers, waiting), 1)

    def line(self, *, is_over: bool = False) -> str:
        """Counts, and the time left, or at the end the time taken."""
        counts = self._counts
        parts = [f"{self._before + sum(counts.values())} of {self._before + self._total} runs done"]
        if self._running and not is_over:
            parts.append(f"{len(self._running)} running")
        parts += [f"{counts[name]} {name}" for name in ("diverged", "failed") if counts[name]]
        if is_over:
            parts.append(f"{duration(self._clock() - self._start)} taken")
        elif (left := self.seconds_left()) is not None:
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts)

    def _tell(self) -> None:
        done = self._done_cost / (self._total_cost or 1)
        if self._bar:
            self._bar.follow(lambda: (self.line(), done))
        else:
            self._progress(self.line(), done)


def conduct(
    runs: Sequence[Run],
    ledger: Ledger,
    *,
    engine: str = "auto",
    resources: Resources | None = None,
    progress: Progress | None = None,
    listener: RunListener | None = None,
) -> RunReport:
    """Make the runs that the ledger has no result of, and append each outcome as it comes.

    Runs that finished or diverged are not run again; those that failed are. Ctrl-C stops the work, and the
    report says so. If the ledger cannot be written, everything stops and its error is raised.

    Args:
        runs: equal ones are made once.
        ledger: only this process writes to it.
        engine: `auto`, `serial`, `processes`, `vectorised` or `ray`.
        resources: devices, processes, folders.
        progress: called with counts and the fraction done; `theodolite.present.bar.Bar()` draws a bar.
        listener: told of every run, in place of `progress`.
    """
    distinct = {run.identity: run for run in runs}
    if not distinct:
        raise UseError("there are no runs: give at least one")
    if listener is None:
        listener = RunListener() if progress is None else ProgressListener(progress)
    resources = dataclasses.replace(resources or Resources(), begun=listener.begun, said=listener.said)
    start = time.monotonic()
    settled = ledger.settled()
    waiting = [run for identity, run in distinct.items() if identity not in settled]
    before = len(distinct) - len(waiting)
    _refuse_changed(waiting, ledger.sources())
    if waiting:
        check_engine(engine, resources)
    for identity in distinct.keys() & settled:  # a driver may have been killed between the two
        resources.forget(distinct[identity])
    outcomes: list[Outcome] = []
    chosen: Mapping[str, Sequence[Run]] = {}
    stopped = False
    listener.opened(waiting, before=before)
    try:
        chosen = choose(engine, waiting, resources) if waiting else {}
        for name, some in chosen.items():
            listener.working(name, resources.jobs)
            for part, kept in _in_order(name, some, resources):
                with closing(ENGINES[name](part, kept)) as coming:
                    for outcome in coming:
                        ledger.append(outcome)
                        outcomes.append(outcome)
                        if outcome.settled:
                            resources.forget(outcome.run)
                        listener.ended(outcome)
    except KeyboardInterrupt:
        stopped = True
    finally:
        if resources.checkpoints is not None:  # now that no worker is left
            clear(resources.checkpoints)
        listener.closed()
    statuses = [outcome.status for outcome in outcomes]
    return RunReport(
        total=len(distinct),
        before=before,
        finished=statuses.count("finished"),
        diverged=statuses.count("diverged"),
        failed=tuple((each.run, each.reason) for each in outcomes if each.status == "failed"),
        stopped=stopped,
        seconds=time.monotonic() - start,
        engine=", then ".join(chosen) or "nothing to do",
    )


def _in_order(
    engine: str, runs: Sequence[Run], resources: Resources
) -> Iterator[tuple[Sequence[Run], Resources]]:
    """The runs, those first with which shorter ones share their beginning."""
    if engine == "vectorised" or resources.checkpoints is None:
        yield runs, resources
        return
    found = sharing(runs)
    if found.later:
        resources.said(
            f"{counted(len(found.later), 'run')} make only their last steps: they begin as longer ones do"
        )
    for part in (found.first, found.later):
        if part:
            yield part, dataclasses.replace(resources, leave=found.leave)


def _refuse_changed(runs: Sequence[Run], sources: Mapping[str, set[str]]) -> None:
    """Refuse to add runs of a changed workload file."""
    for workload in dict.fromkeys(run.workload for run in runs):
        now = environment(workload)["workload_source"]
        if now is not None and sources.get(workload, set()) - {now}:
            raise UseError(
                f"{workload} has changed since runs in this ledger were made with it: its file or a module "
                "beside it is another. Undo the change to go on, or give another folder for the new version"
            )


def check_engine(engine: str, resources: Resources) -> None:
    """Validate the engine's name, its options and the device before the first run.

    >>> check_engine("procesess", Resources())
    Traceback (most recent call last):
    theodolite.UseError: engine is 'procesess'. Did you mean 'processes'? It is one of auto, serial, ...
    """
    one_of("engine", engine, ("auto", *ENGINES))
    for name, value in (("address", resources.address), ("per_run", resources.per_run)):
        if value and engine not in ("ray", "auto"):
            raise UseError(
                f"{name} is {value!r}, which is for a Ray cluster, and the engine is {engine}: "
                "take engine ray, or leave it out"
            )
    limit = resources.timeout
    if limit is not None:
        positive("timeout", limit, wanted="give the seconds that a run may take, such as 600")
        if engine not in ("auto", "processes") or resources.address:
            other = "ray" if engine == "auto" else engine
            raise UseError(
                f"timeout is {limit:g} s, and the engine {other!r} cannot end a run that takes longer: take "
                "engine 'processes', or leave the timeout out"
            )
    # What GPUs a cluster has cannot be seen from here.
    elsewhere = _is_on_ray(engine, resources) and resources.device.partition(":")[0] == "cuda"
    check_device("cpu" if elsewhere else resources.device)


def choose(engine: str, runs: Sequence[Run], resources: Resources) -> dict[str, Sequence[Run]]:
    """By name of an engine, the runs that it makes, one engine after the other.

    `auto` is Ray where a cluster was named or this process is connected to one. Otherwise on a GPU it is
    `vectorised`, with processes for the runs that it cannot do; on a CPU it is processes, or `serial` where
    starting them would take longer than they save. With a time limit it is processes, as only they can be
    ended.
    """
    if resources.timeout is not None:
        if (reason := why_not_sent(runs, resources)) is not None:
            limit = f"timeout is {resources.timeout:g} s"
            raise UseError(f"{limit}, which needs runs in processes of their own: {reason}")
        return {"processes": runs}
    if engine != "auto":
        return {engine: runs}
    if _is_on_ray(engine, resources):
        return {"ray": runs}
    together: list[Run] = []
    others = list(runs)
    if torch.device(resources.device).type == "cuda":
        families, failures = families_of(runs, resources.workloads)
        others = [run for run, _ in failures]  # the runs themselves will say what is wrong
        for family in families:
            reason = why_not(family[0], resources)
            if reason is not None:
                resources.said(f"{len(family)} runs like {family[0]} are made one by one: {reason}")
            (together if reason is None else others).extend(family)
    chosen = {"vectorised": together, _one_by_one(others, resources): others}
    return {name: some for name, some in chosen.items() if some}


def _is_on_ray(engine: str, resources: Resources) -> bool:
    if engine != "auto" or resources.timeout is not None:
        return engine == "ray"
    ray = sys.modules.get("ray")
    is_connected = ray is not None and bool(ray.is_initialized())
    return bool(resources.address or os.environ.get("RAY_ADDRESS")) or is_connected


def _one_by_one(runs: Sequence[Run], resources: Resources) -> str:
    """Processes, if they save more than they cost and the workloads can be sent to them."""
    workers = min(resources.jobs, len(runs))
    if workers < 2 or sum(_seconds(run, resources) for run in runs) * (1 - 1 / workers) < PROCESS_START:
        return "serial"
    reason = why_not_sent(runs, resources)
    if reason is not None:
        resources.said(f"One run after the other: {reason}")
    return "serial" if reason else "processes"


def _seconds(run: Run, resources: Resources) -> float:
    """About how long a run takes on one core, within a factor of a few.

    Each block has some 12·width² weights, each weight takes six operations for each target, a core makes
    2·10¹⁰ of them in a second, and calling them takes half a millisecond a block.
    """
    try:
        with conditions(run.workload, resources.workloads):
            targets = targets_in(workload_for(run, resources.workloads).draw(run.seed, 0))
    except Exception:  # whatever it is, the run itself will say it
        return 0.0
    return run.steps * run.size.depth * (6 * 12 * run.size.width**2 * targets / 2e10 + 5e-4)
