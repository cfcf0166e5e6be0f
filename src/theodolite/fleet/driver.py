"""Make the runs that the ledger does not have yet, and write down what came of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from theodolite.core.errors import UseError
from theodolite.fleet.checkpoint import clear
from theodolite.fleet.choosing import choose
from theodolite.fleet.engine import Engine, Means
from theodolite.fleet.environment import environment
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.outcome import Outcome
from theodolite.fleet.progress import Progress, duration
from theodolite.fleet.run import Run


@dataclass(frozen=True)
class Report:
    """What came of many runs."""

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

    def __str__(self) -> str:
        made = f"{self.finished} finished, {self.diverged} diverged, {len(self.failed)} failed"
        before = f"{self.before} were there before, " if self.before else ""
        lines = [f"{_runs(self.total)}: {before}{made}, in {duration(self.seconds)} ({self.engine})"]
        lines += [f"  failed: {run}: {error}" for run, error in self.failed[:SHOWN]]
        if len(self.failed) > SHOWN:
            lines.append(f"  and {len(self.failed) - SHOWN} more; the ledger has all their tracebacks")
        left = self.total - self.before - self.finished - self.diverged - len(self.failed)
        if self.stopped:
            lines.append(f"Stopped with {_runs(left)} to go; the same command again goes on from here")
        elif self.failed:
            lines.append("The same command again runs only these")
        return "\n".join(lines)


SHOWN = 5
"""How many failures are listed."""


def conduct(
    runs: Sequence[Run],
    ledger: Ledger,
    *,
    engine: str = "auto",
    means: Means | None = None,
    progress: Progress | None = None,
) -> Report:
    """Make the runs that the ledger has no result of, and append each outcome as it comes.

    Nothing that is finished or has diverged is run again; what failed is. A Ctrl-C ends the work and is told
    in the report. If the ledger cannot be written, everything ends and its error is raised.

    Args:
        runs: those that come twice are made once.
        ledger: only this process writes to it.
        engine: a name in `theodolite.fleet.choosing.ENGINES`.
        means: devices, processes, folders.
        progress: told what happens.
    """
    distinct = {run.identity: run for run in runs}
    if not distinct:
        raise UseError("there are no runs: give at least one")
    means, progress = means or Means(), progress or Progress()
    means = dataclasses.replace(means, begun=progress.begun, said=progress.said)
    start = time.monotonic()
    settled = ledger.settled()
    waiting = [run for identity, run in distinct.items() if identity not in settled]
    _refuse_changed(waiting, ledger.sources())
    for identity in distinct.keys() & settled:  # a driver may have been killed between the two
        _forget(distinct[identity], means)
    outcomes: list[Outcome] = []
    name, stopped = "nothing to do", False
    progress.opened(waiting, before=len(distinct) - len(waiting))
    try:
        if waiting:
            name, chosen = choose(engine, waiting, means)
            progress.working(name, means.jobs)
            with _closing(chosen, waiting, means) as coming:
                for outcome in coming:
                    ledger.append(outcome)
                    outcomes.append(outcome)
                    if outcome.settled:
                        _forget(outcome.run, means)
                    progress.ended(outcome)
    except KeyboardInterrupt:
        stopped = True
    finally:
        if means.checkpoints is not None:  # now that no worker is left
            clear(means.checkpoints)
        progress.closed()
    statuses = [outcome.status for outcome in outcomes]
    return Report(
        total=len(distinct),
        before=len(distinct) - len(waiting),
        finished=statuses.count("finished"),
        diverged=statuses.count("diverged"),
        failed=tuple((each.run, each.reason) for each in outcomes if each.status == "failed"),
        stopped=stopped,
        seconds=time.monotonic() - start,
        engine=name,
    )


def _refuse_changed(runs: Sequence[Run], sources: Mapping[str, set[str]]) -> None:
    """Runs of two versions of a file are not to be compared, least of all without a word."""
    for workload in dict.fromkeys(run.workload for run in runs):
        now = environment(workload)["workload_source"]
        if now is not None and sources.get(workload, set()) - {now}:
            raise UseError(
                f"{workload} has changed since runs in this ledger were made with it: its file or a module "
                "beside it is another. Undo the change to go on, or give another folder for the new version"
            )


@contextmanager
def _closing(engine: Engine, runs: Sequence[Run], means: Means) -> Iterator[Iterator[Outcome]]:
    outcomes = engine(runs, means)
    try:
        yield outcomes
    finally:
        close = getattr(outcomes, "close", None)  # a generator has it, a plain iterator has nothing to end
        if close is not None:
            close()


def _forget(run: Run, means: Means) -> None:
    """Once the outcome is safe, what was kept on the way can go."""
    checkpoint = means.checkpoint(run)
    if checkpoint is not None:
        checkpoint.forget()


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
