"""The driver makes what is missing, writes down what comes, and says what came of it."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor

from theodolite import Size, UseError
from theodolite.fleet import driver
from theodolite.fleet.driver import RunListener, RunReport, check_engine, choose, conduct
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.ledger import Ledger, LedgerError
from theodolite.fleet.run import Outcome, Run
from theodolite.present.bar import Bar

from . import tiny

RUNS = [tiny.run(seed=seed, steps=3) for seed in range(4)]


class Notes(RunListener):
    """Everything the driver tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def opened(self, runs, before) -> None:
        self.lines.append(f"{len(runs)} to make, {before} before")

    def begun(self, run) -> None:
        self.lines.append(f"begun {run.seed}")

    def ended(self, outcome) -> None:
        self.lines.append(f"ended {outcome.run.seed}")

    def said(self, line) -> None:
        self.lines.append(line)

    def closed(self) -> None:
        self.lines.append("closed")


def test_only_what_is_missing_is_made_and_each_run_once(tmp_path: Path) -> None:
    notes = Notes()
    with Ledger.open(tmp_path, name="tiny", spec={}) as ledger:
        first = conduct(RUNS[:2], ledger, engine="serial")
        again = conduct([*RUNS, *RUNS], ledger, engine="serial", listener=notes)
        third = conduct(RUNS, ledger, engine="serial")
        assert len(ledger.rows()) == 4
        for run in RUNS:
            (alone,) = serial([run], Resources())
            assert ledger.metrics(run.identity)["loss"] == list(alone.metrics["loss"])
    assert (first.total, first.before, first.finished) == (2, 0, 2)
    assert (again.total, again.before, again.finished) == (4, 2, 2)
    assert (third.total, third.before, third.finished) == (4, 4, 0)
    assert first.ok
    assert third.ok
    assert notes.lines == ["2 to make, 2 before", "begun 2", "ended 2", "begun 3", "ended 3", "closed"]


@pytest.mark.parametrize("text", ["\udc80", "\0", "\n", "", "x" * 2_000_000])
def test_no_text_of_an_error_stops_the_others(tmp_path: Path, text: str) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            return text

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        if seed == 1:
            raise Odd
        return tiny.batch(seed, step)

    odd = dataclasses.replace(tiny.plain, batch=batch)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # strict, as Python opens its own
    with Ledger.open(tmp_path, name="odd", spec={}) as ledger:
        resources = Resources(workloads={RUNS[0].workload: odd})
        progress = Bar(Console(file=terminal))
        report = conduct(RUNS, ledger, engine="serial", resources=resources, progress=progress)
        print(report, file=terminal)
        assert (report.finished, len(report.failed)) == (3, 1)
        assert [row["status"] for row in ledger.rows()] == ["finished", "failed", "finished", "finished"]


def test_what_failed_is_told_and_tried_again() -> None:
    shelf = tiny.Shelf()
    runs = [tiny.run("faulty", seed) for seed in (0, 3, 4, 5)]
    report = conduct(runs, shelf, engine="serial")
    assert (report.finished, report.diverged) == (1, 1)
    assert report.failed == (
        (runs[2], "ArithmeticError: the fourth seed is bad"),
        (runs[3], "SystemExit: enough"),
    )
    assert not report.ok
    assert "4 runs: 1 finished, 1 diverged, 2 failed, in " in str(report)
    assert str(report).endswith("seed 5: SystemExit: enough\nThe same command again runs only these")
    again = conduct(runs, shelf, engine="serial")
    assert (again.before, len(again.failed)) == (2, 2)


class Engine:
    """An engine that is interrupted before its third outcome, and notes that it was closed."""

    closed = False

    def __call__(self, runs, resources) -> Iterator[Outcome]:
        try:
            for number, outcome in enumerate(serial(runs, resources)):
                if number == 2:
                    raise KeyboardInterrupt
                yield outcome
        finally:
            self.closed = True


def test_an_interrupt_ends_the_work_and_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, shelf, notes = Engine(), tiny.Shelf(), Notes()
    conduct(RUNS[:1], shelf, engine="serial")
    monkeypatch.setitem(driver.ENGINES, "serial", engine)
    report = conduct(RUNS, shelf, engine="serial", listener=notes)
    assert report.stopped
    assert not report.ok
    assert len(shelf.outcomes) == 3
    assert "Stopped with 1 run to go; the same command again continues here" in str(report)
    assert notes.lines[-1] == "closed"
    monkeypatch.undo()
    assert (conduct(RUNS, shelf, engine="serial").before, len(shelf.outcomes)) == (3, 4)


def test_a_ledger_that_cannot_be_written_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(tiny.Shelf):
        def append(self, outcome) -> None:
            raise LedgerError("the disk is full")

    engine, notes = Engine(), Notes()
    monkeypatch.setitem(driver.ENGINES, "serial", engine)
    with pytest.raises(LedgerError, match="the disk is full") as raised:
        conduct(RUNS, Full(), engine="serial", listener=notes)
    assert raised.tb is not None  # which holds what could be collected, and is closed nevertheless
    assert engine.closed
    assert notes.lines.count("begun 1") == 0
    assert notes.lines[-1] == "closed"


def test_checkpoints_go_once_the_outcome_is_safe(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    there: list[bool] = []

    class Watching(tiny.Shelf):
        def append(self, outcome) -> None:
            there.append(resources.checkpoint(outcome.run).path.exists())
            super().append(outcome)

    resources = Resources(checkpoints=folder, checkpoint_seconds=0)
    bad = tiny.run("faulty", 4)
    conduct([RUNS[0], bad], Watching(), engine="serial", resources=resources)
    assert there == [True, True]
    assert list(folder.iterdir()) == [resources.checkpoint(bad).path]  # it may be tried again
    conduct(
        [RUNS[1]],
        Watching(),
        engine="serial",
        resources=dataclasses.replace(resources, checkpoints=tmp_path / "c"),
    )
    assert not (tmp_path / "c").exists()


def test_no_runs_and_unknown_engines_are_refused() -> None:
    with pytest.raises(UseError, match="there are no runs"):
        conduct([], tiny.Shelf())
    with pytest.raises(UseError, match=r"engine is 'rai'\. Did you mean 'ray'"):
        conduct(RUNS, tiny.Shelf(), engine="rai")


def test_many_failures_are_not_all_listed() -> None:
    failed = tuple((run, "no") for run in [tiny.run(seed=seed) for seed in range(9)])
    report = RunReport(9, 0, 0, 0, failed, False, 1.0, "serial")
    assert str(report).count("failed: ") == 5
    assert "and 4 more" in str(report)


LONG = [
    Run("mlp-mixture", Size(256, 8), 0.1, parameterization="standard", seed=s, steps=500) for s in range(4)
]


def test_the_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert [*choose("auto", LONG, Resources(jobs=2))] == ["processes"]
    assert [*choose("auto", LONG, Resources(jobs=1))] == ["serial"]
    assert [*choose("auto", LONG[:1], Resources(jobs=2))] == ["serial"]
    assert [*choose("auto", RUNS, Resources(jobs=2))] == ["serial"]  # over before a process has begun
    assert [*choose("auto", LONG, Resources(jobs=2, address="ray://there:10001"))] == ["ray"]
    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    assert [*choose("auto", RUNS, Resources(jobs=2))] == ["ray"]


def test_a_workload_that_cannot_travel_stays_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    mine = dataclasses.replace(tiny.plain, loss=lambda logits, targets: logits.sum())
    runs = [dataclasses.replace(run, workload="mine") for run in LONG]
    said: list[str] = []
    assert [*choose("auto", runs, Resources({"mine": mine}, jobs=2, said=said.append))] == ["serial"]
    assert "workload 'mine' cannot be sent to another process" in said[0]


def test_on_a_card_what_cannot_be_made_together_is_made_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(driver, "why_not", lambda run, resources: "because" if run.size.width == 32 else None)
    runs = [tiny.run(seed=seed, width=width) for width in (16, 32) for seed in range(2)]
    said: list[str] = []
    resources = Resources(device="cuda", jobs=1, said=said.append)
    assert list(choose("auto", runs, resources).items()) == [("vectorised", runs[:2]), ("serial", runs[2:])]
    assert said == [f"2 runs like {runs[2]} are made one by one: because"]
    assert [*choose("auto", runs[:2], resources)] == ["vectorised"]
    assert [*choose("auto", runs[2:], resources)] == ["serial"]


def test_engines_follow_each_other_and_the_report_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = tiny.Shelf()
    monkeypatch.setattr(driver, "choose", lambda *given: {"vectorised": RUNS[2:], "serial": RUNS[:2]})
    report = conduct(RUNS, shelf)
    assert report.engine == "vectorised, then serial"
    assert [(outcome.run.seed, outcome.engine) for outcome in shelf.outcomes] == [
        (2, "vectorised"),
        (3, "vectorised"),
        (0, "serial"),
        (1, "serial"),
    ]


def test_a_time_limit_is_for_runs_in_processes() -> None:
    assert [*choose("auto", RUNS[:1], Resources(timeout=60, jobs=1))] == ["processes"]
    assert [*choose("processes", RUNS[:1], Resources(timeout=0.5))] == ["processes"]
    for engine in ("serial", "vectorised", "ray"):
        with pytest.raises(UseError, match=f"timeout is 60 s, and the engine '{engine}' cannot end a run"):
            check_engine(engine, Resources(timeout=60))
    with pytest.raises(UseError, match="the engine 'ray' cannot end a run"):
        check_engine("auto", Resources(timeout=60, address="head:6379"))
    given = {"mine": dataclasses.replace(tiny.plain, loss=lambda logits, targets: logits.sum())}
    with pytest.raises(UseError, match=r"timeout is 60 s, which needs .* workload 'mine' cannot be sent"):
        choose("auto", [dataclasses.replace(RUNS[0], workload="mine")], Resources(given, timeout=60))
    for wrong in (0, -1, float("nan"), float("inf"), True):
        with pytest.raises(UseError, match="give the seconds that a run may take, such as 600"):
            check_engine("auto", Resources(timeout=wrong))


def test_a_workload_whose_file_has_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    """Two versions of a file are two workloads, whatever they are called."""
    from theodolite.fleet import provenance

    file = tmp_path / "mine.py"
    file.write_text(tiny.FILE.read_text())
    runs = [dataclasses.replace(run, workload=f"{file}:plain") for run in RUNS]
    with Ledger.open(tmp_path / "out", name="tiny", spec={}) as ledger:
        assert conduct(runs[:1], ledger, engine="serial").ok
        before = Resources(checkpoints=tmp_path).checkpoint(runs[0]).path
        file.write_text(tiny.FILE.read_text() + "# another version\n")
        provenance.environment.cache_clear()
        with pytest.raises(UseError, match=r"mine\.py:plain has changed since runs in this ledger were made"):
            conduct(runs, ledger, engine="serial")
        assert Resources(checkpoints=tmp_path).checkpoint(runs[0]).path != before
        assert conduct(runs[:1], ledger, engine="serial").before == 1  # there is nothing left to make


def test_a_checkpoint_that_a_killed_driver_left_of_a_settled_run_goes(tmp_path: Path) -> None:
    resources, shelf = Resources(checkpoints=tmp_path / "checkpoints"), tiny.Shelf()
    conduct(RUNS[:1], shelf, engine="serial", resources=resources)
    left = resources.checkpoint(RUNS[0]).path
    left.parent.mkdir()
    left.write_text("its driver was killed before it could go")
    assert conduct(RUNS[:1], shelf, engine="serial", resources=resources).before == 1
    assert not left.parent.exists()


HELPED = """
import helper
import theodolite as th
from torch import nn

def batch(seed, step):
    from package.inner import shifted
    return shifted(seed, step)

workload = th.Workload("helped", helper.build, batch, nn.functional.cross_entropy)
"""


@pytest.mark.parametrize(
    "edited", ["mine.py", "helper.py", "package/inner.py", "package/deep.py", "package/__init__.py"]
)
def test_modules_beside_a_workload_count_as_its_source(tmp_path: Path, edited: str) -> None:
    from theodolite.fleet import provenance

    (tmp_path / "package").mkdir()
    (tmp_path / "mine.py").write_text(HELPED)
    (tmp_path / "helper.py").write_text(tiny.FILE.read_text())
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "inner.py").write_text("from .deep import *\nfrom . import deep\n")
    (tmp_path / "package" / "deep.py").write_text("from helper import batch as shifted\n")
    (tmp_path / "unused.py").write_text("a = 1\n")
    run = dataclasses.replace(RUNS[0], workload=f"{tmp_path}/mine.py:workload", steps=1)
    runs = [run, dataclasses.replace(run, seed=5)]
    with Ledger.open(tmp_path / "out", name="helped", spec={}) as ledger:
        assert conduct(runs[:1], ledger, engine="serial").ok
        (tmp_path / "unused.py").write_text("a = 2\n")
        provenance.environment.cache_clear()
        assert provenance.environment(run.workload)["workload_source"] in ledger.sources()[run.workload]
        with (tmp_path / edited).open("a") as file:
            file.write("# another version\n")
        provenance.environment.cache_clear()
        with pytest.raises(UseError, match=r"its file or a module beside it is another"):
            conduct(runs, ledger, engine="serial")
