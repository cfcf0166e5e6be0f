"""Make the runs of a sweep: all of a grid, or those that a search asks for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from theodolite.core.size import Size
from theodolite.fleet.driver import RunListener, RunReport, conduct
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Grid, Run
from theodolite.sweeping.searching import Settings, Space, search

AROUND = (0.5, 1.0, 2.0)
"""Times the learning rate that a search has found: what is tried at every size."""


@dataclass
class Maker:
    """Makes runs that the ledger does not have, and keeps the reports."""

    ledger: Ledger
    engine: str
    resources: Resources
    listener: RunListener
    asked: dict[str, Run] = field(default_factory=dict)
    """By identity, all runs that were asked for."""
    reports: list[RunReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before = set(self.ledger.settled())

    @property
    def report(self) -> RunReport:
        """All that was made, as one. A run that was asked for several times is one."""
        first = self.reports[0]
        settled = self.ledger.settled()
        failed = {run.identity: (run, error) for report in self.reports for run, error in report.failed}
        worked = [report.engine for report in self.reports if report.finished or report.diverged]
        return RunReport(
            total=len(self.asked),
            before=len(self._before & self.asked.keys()),
            finished=sum(report.finished for report in self.reports),
            diverged=sum(report.diverged for report in self.reports),
            failed=tuple(one for identity, one in failed.items() if identity not in settled),
            stopped=any(report.stopped for report in self.reports),
            seconds=sum(report.seconds for report in self.reports),
            engine=worked[0] if worked else first.engine,
        )

    def tell(self, runs: Sequence[Run]) -> None:
        """How much there is to do."""
        settled = self.ledger.settled()
        waiting = [run for run in runs if run.identity not in settled]
        before = f" ({len(runs) - len(waiting)} of them are there)" if len(waiting) < len(runs) else ""
        sizes = sorted({run.size for run in runs})
        listed = ", ".join(map(str, sizes))
        if len(sizes) > 8:
            listed = f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"
        counts = ", ".join(
            f"{len({*values})} {name}{'' if len({*values}) == 1 else 's'}"
            for name, values in (
                ("optimizer", [run.optimizer for run in runs]),
                ("parameterization", [run.parameterization for run in runs]),
                ("learning rate", [run.lr for run in runs]),
                ("seed", [run.seed for run in runs]),
            )
        )
        self.listener.said(f"{len(runs)} runs{before} of {_steps_text(runs)} steps: {listed}; {counts}")

    def make(self, runs: Sequence[Run]) -> None:
        """Make those that the ledger does not have."""
        self.asked |= {run.identity: run for run in runs}
        report = conduct(
            runs, self.ledger, engine=self.engine, resources=self.resources, listener=self.listener
        )
        self.reports.append(report)
        if report.stopped:
            raise Stopped

    def search(self, space: Space, grid: Grid, base: Size, trials: int) -> None:
        """Search the base for each optimizer and parameterization; try around what was found at all sizes."""
        for optimizer, parameterization in itertools.product(
            grid.axes["optimizer"], grid.axes["parameterization"]
        ):
            kind = {"optimizer": [optimizer], "parameterization": [parameterization]}
            name = f"{optimizer}, {parameterization}"
            self.listener.said(
                f"{name}: a search at {base}, {trials} trials of {len(grid.axes['seed'])} seeds"
            )

            def losses(asked: Sequence[Settings], kind: Mapping[str, Any] = kind) -> list[float]:
                made = [_with(grid, {**kind, "size": [base]}, settings) for settings in asked]
                self.make([run for runs in made for run in runs])
                rows = {row["identity"]: row for row in self.ledger.rows()}
                return [_mean_loss(runs, rows) for runs in made]

            found, loss = min(search(space, losses, trials=trials), key=lambda trial: trial[1])
            if not math.isfinite(loss):
                self.listener.said(f"{name}: no trial at {base} ended with a finite loss. Try smaller rates")
                continue
            around = [{**found, "lr": found["lr"] * factor} for factor in AROUND]
            runs = [run for settings in around for run in _with(grid, kind, settings)]
            self.tell(runs)
            self.make(runs)


class Stopped(Exception):
    """The user has had enough: nothing more is run, and what is there is analysed."""


def _steps_text(runs: Sequence[Run]) -> str:
    """`20`, or `20 to 80` where the runs differ in it."""
    steps = [run.steps for run in runs]
    least, most = min(steps), max(steps)
    return f"{least}" if least == most else f"{least} to {most}"


def _with(grid: Grid, kind: Mapping[str, Sequence[Any]], settings: Settings) -> tuple[Run, ...]:
    """The runs of the grid with one value each of what is searched."""
    one_each = {name: [value] for name, value in settings.items()}
    return Grid({**grid.axes, **kind, **one_each}, grid.fixed).runs


def _mean_loss(runs: Sequence[Run], rows: Mapping[str, Mapping[str, Any]]) -> float:
    """Over the seeds; infinite where one diverged or failed: neither has a loss."""
    losses = [rows[run.identity]["held_out"] for run in runs]
    return math.inf if None in losses else math.fsum(losses) / len(losses)
