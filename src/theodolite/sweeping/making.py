"""Make the runs of a sweep: all of a grid, or those that a search asks for."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from theodolite.core.optional import needed
from theodolite.core.size import Size
from theodolite.fleet.driver import RunListener, RunReport, conduct
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import OWN, Grid, Run
from theodolite.present.text import counted
from theodolite.sweeping.curves import LOSS, Criterion, labels
from theodolite.sweeping.families import kind_of
from theodolite.sweeping.ranges import Range

Settings = dict[str, Any]
"""By axis, one value of each."""
Space = Mapping[str, Sequence[Any] | Range]
"""By axis, a range, or values to choose from."""

AROUND = (0.5, 1.0, 2.0)
"""Factors on the learning rate that a search has found: what is tried at every size."""
NUM_ASKS = 5
"""Settings that are asked for at a time, so that an engine runs them together. A part of what a search is:
another number would give other settings."""


class Stopped(Exception):
    """Ctrl-C: nothing more is run, and what is there is analysed."""


class Maker:
    """Makes runs that the ledger does not have, and keeps the reports."""

    def __init__(self, ledger: Ledger, engine: str, resources: Resources, listener: RunListener) -> None:
        self.ledger, self.engine, self.resources, self.listener = ledger, engine, resources, listener
        self.asked: set[str] = set()
        """The identities of all runs that were asked for."""
        self.reports: list[RunReport] = []
        self._before = set(ledger.settled())

    @property
    def report(self) -> RunReport:
        """All that was made, as one. A run that was asked for several times counts once."""
        settled = self.ledger.settled()
        failed = {run.identity: (run, error) for report in self.reports for run, error in report.failed}
        worked = [report.engine for report in self.reports if report.finished or report.diverged]
        return RunReport(
            total=len(self.asked),
            before=len(self._before & self.asked),
            finished=sum(report.finished for report in self.reports),
            diverged=sum(report.diverged for report in self.reports),
            failed=tuple(one for identity, one in failed.items() if identity not in settled),
            stopped=any(report.stopped for report in self.reports),
            seconds=sum(report.seconds for report in self.reports),
            engine=[*worked, self.reports[0].engine][0],
        )

    def make(self, runs: Sequence[Run], *, told: bool = True) -> None:
        """Make those that the ledger does not have; say first how much there is to do, if `told`."""
        if told:
            self.listener.said(_summary(runs, self.ledger.settled()))
        self.asked |= {run.identity for run in runs}
        report = conduct(
            runs, self.ledger, engine=self.engine, resources=self.resources, listener=self.listener
        )
        self.reports.append(report)
        if report.stopped:
            raise Stopped

    def search(self, space: Space, grid: Grid, base: Size, trials: int, criterion: Criterion = LOSS) -> None:
        """Search the base for each optimizer and parameterization; try around what was found at all sizes."""
        pairs = itertools.product(grid.axes["optimizer"], grid.axes["parameterization"])
        kinds = dict.fromkeys((OWN, how) if how == OWN else (optimizer, how) for optimizer, how in pairs)
        for optimizer, how in kinds:
            kind = {"optimizer": [optimizer], "parameterization": [how]}
            name, num = kind_of(optimizer, how), len(grid.axes["seed"])
            self.listener.said(f"{name}: a search at {base}, {trials} trials of {counted(num, 'seed')}")

            def losses(asked: Sequence[Settings], kind: Mapping[str, Any] = kind) -> list[float]:
                made = [_with(grid, {**kind, "size": [base]}, settings) for settings in asked]
                self.make([run for runs in made for run in runs], told=False)
                rows = {row["identity"]: row for row in self.ledger.rows()}
                return [_mean(criterion, [rows[run.identity] for run in runs]) for runs in made]

            found, loss = min(search(space, losses, trials=trials), key=lambda trial: trial[1])
            if not math.isfinite(loss):
                self.listener.said(
                    f"{name}: no trial at {base} ended with a finite {criterion.noun}. Try smaller rates"
                )
                continue
            around = [{**found, "lr": found["lr"] * factor} for factor in AROUND]
            self.make([run for settings in around for run in _with(grid, kind, settings)])


def search(
    space: Space, evaluate: Callable[[Sequence[Settings]], Sequence[float]], *, trials: int, seed: int = 0
) -> list[tuple[Settings, float]]:
    """Settings with their losses, in the order of asking, by a tree-structured Parzen estimator (TPE).

    The same space, seed and losses give the same settings. So a search that was stopped is resumed by doing
    it again, if `evaluate` knows the losses of what was run before.

    Args:
        space: what to choose from.
        evaluate: the loss of each of a few settings; infinite where it diverged or failed, so that
            such settings are avoided.
        trials: how many settings to try.
        seed: of the sampler.
    """
    optuna = needed("optuna", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Settings that are still being run count as bad ones, so that those asked for together differ.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    tried: list[tuple[Settings, float]] = []
    while len(tried) < trials:
        asked = [study.ask() for _ in range(min(NUM_ASKS, trials - len(tried)))]
        settings = [{name: _suggest(trial, name, among) for name, among in space.items()} for trial in asked]
        for trial, chosen, loss in zip(asked, settings, evaluate(settings), strict=True):
            tried.append((chosen, loss))
            study.tell(trial, loss)
    return tried


def _suggest(trial: Any, name: str, among: Sequence[Any] | Range) -> Any:
    if isinstance(among, Range):
        return trial.suggest_float(name, among.low, among.high, log=among.log)
    return among[trial.suggest_categorical(name, list(range(len(among))))]


def _with(grid: Grid, kind: Mapping[str, Sequence[Any]], settings: Settings) -> tuple[Run, ...]:
    """The runs of the grid with one value each of what is searched."""
    one_each = {name: [value] for name, value in settings.items()}
    return Grid({**grid.axes, **kind, **one_each}, grid.fixed, grid.of_size).runs


def _mean(criterion: Criterion, rows: Sequence[Mapping[str, Any]]) -> float:
    """Over the seeds; infinite where one diverged or failed: neither has a loss."""
    return math.fsum(map(criterion.of, rows)) / len(rows)


def _summary(runs: Sequence[Run], settled: set[str]) -> str:
    """How many runs there are, of how many steps, and in what they differ."""
    there = sum(run.identity in settled for run in runs)
    before = f" ({there} of them are there)" if there else ""
    steps = sorted({run.steps for run in runs})
    lengths = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    sizes = sorted({run.size for run in runs})
    listed = f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"
    if len(sizes) <= 8:
        listed = ", ".join(labels(sizes).values())
    axes = {"optimizer": "optimizer", "parameterization": "parameterization", "lr": "learning rate"}
    axes["seed"] = "seed"
    there_are = {name: {getattr(run, name) for run in runs} for name in axes}
    there_are["optimizer"] -= {OWN} if len(there_are["optimizer"]) > 1 else set()
    counts = [counted(len(there_are[name]), noun) for name, noun in axes.items()]
    return f"{counted(len(runs), 'run')}{before} of {lengths} steps: {listed}; {', '.join(counts)}"
