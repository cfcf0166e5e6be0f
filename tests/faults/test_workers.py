"""Workers that are killed, and drivers: nothing is lost but time, and no process is left."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from theodolite.fleet.driver import RunListener, RunReport, conduct
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Outcome, Run

from ..fleet import tiny
from ..forking import start_script
from .waiting import LAST_RESORT, is_alive, wait_until

DRIVER = Path(__file__).parent / "programs" / "gated_driver.py"


class Faults(NamedTuple):
    report: RunReport
    outcomes: dict[int, Outcome]
    said: list[str]
    folder: Path


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Seven runs, six of which go wrong in different ways."""
    folder = tmp_path_factory.mktemp("faults")
    said: list[str] = []

    class Listening(RunListener):
        def said(self, line: str) -> None:
            said.append(line)

    shelf = tiny.Shelf()
    runs = [tiny.run("faulty", seed) for seed in range(7)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_FOLDER", str(folder))
        report = conduct(runs, shelf, engine="processes", resources=Resources(jobs=1), listener=Listening())
    return Faults(report, {outcome.run.seed: outcome for outcome in shelf.outcomes}, said, folder)


def test_a_run_whose_worker_was_killed_is_made_again(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_FOLDER", str(faults.folder))  # it was killed once, so now it is not
    assert (faults.folder / "killed 1").exists()
    for seed in (0, 1):
        (alone,) = serial([tiny.run("faulty", seed)], Resources())
        assert tiny.numbers(faults.outcomes[seed]) == tiny.numbers(alone)
        assert alone.status == "finished"
    assert sum("seed 1: its worker was killed by SIGKILL" in line for line in faults.said) == 1


def test_a_run_whose_worker_is_always_killed_fails_and_names_the_signal(faults: Faults) -> None:
    outcome = faults.outcomes[2]
    assert outcome.status == "failed"
    assert "killed by SIGKILL" in outcome.error
    assert "3 times" in outcome.error
    assert len((faults.folder / "killed 2").read_text().split()) == 3
    assert outcome.seconds > 0


def test_a_run_that_ends_its_worker_by_itself_is_not_tried_again(faults: Faults) -> None:
    outcome = faults.outcomes[6]
    assert outcome.status == "failed"
    assert outcome.error == "its worker ended itself with exit code 7"
    assert len((faults.folder / "exited").read_text().split()) == 1


def test_runs_whose_workers_were_killed_are_tried_again_after_all_others(faults: Faults) -> None:
    assert [*faults.outcomes] == [0, 3, 4, 5, 6, 1, 2]


def test_a_loss_that_is_not_a_number_is_a_divergence_at_its_step(faults: Faults) -> None:
    outcome = faults.outcomes[3]
    assert (outcome.status, outcome.step, outcome.held_out) == ("diverged", 5, None)
    assert [step for step, _ in outcome.metrics["loss"]] == [0, 1, 2, 3, 4]


def test_an_exception_is_kept_with_its_traceback(faults: Faults) -> None:
    outcome = faults.outcomes[4]
    assert outcome.status == "failed"
    assert 'tiny.py", line ' in outcome.error
    assert outcome.error.endswith("ArithmeticError: the fourth seed is bad\n")
    assert faults.outcomes[5].error.endswith("SystemExit: enough\n")


def test_the_rest_is_finished_and_the_report_says_what_is_not(faults: Faults) -> None:
    report = faults.report
    assert (report.total, report.finished, report.diverged) == (7, 2, 1)
    assert sorted(run.seed for run, _ in report.failed) == [2, 4, 5, 6]
    assert "The same command again runs only these" in str(report)


class Session(NamedTuple):
    """One life of the driver, and of what it started."""

    done: set[int]
    drawn: Counter[tuple[int, int]]
    """How often a seed and a step."""
    output: str
    code: int


def session(folder: Path, end: signal.Signals, open_to: Iterable[int]) -> Session:
    """Until both workers wait at the gate; then the driver is ended."""
    notes = _new_notes(folder, open_to)
    printed = notes / "output"
    driver = start_script(DRIVER, [str(folder)], printed, {"TINY_FOLDER": str(notes)})
    assert driver.pid is not None
    wait_until(lambda: not driver.is_alive() or len(_at_the_gate(notes)) == 2)
    if end == signal.SIGKILL:
        driver.kill()
    else:
        os.killpg(driver.pid, end)  # as a terminal does on Ctrl-C
    driver.join(LAST_RESORT)
    assert driver.exitcode is not None
    workers = [int(file.name.split()[1]) for file in notes.glob("worker *")]
    assert workers
    wait_until(lambda: not any(is_alive(worker) for worker in workers))
    lines = printed.read_text()
    done = {int(line) for line in lines.splitlines() if line.isdigit()}
    return Session(done, _counted(notes), lines, driver.exitcode)


def last_session(folder: Path) -> Session:
    """The same runs again, in this process and to their end."""
    notes = _new_notes(folder, range(8))
    done: set[int] = set()

    class Told(RunListener):
        def ended(self, outcome: Outcome) -> None:
            done.add(outcome.run.seed)

    resources = Resources(jobs=2, checkpoints=folder / "checkpoints", checkpoint_seconds=0)
    with (
        pytest.MonkeyPatch.context() as patch,
        Ledger.open(folder, name="gated", spec={}) as ledger,
    ):
        patch.setenv("TINY_FOLDER", str(notes))
        report = conduct(gated_runs(), ledger, engine="processes", resources=resources, listener=Told())
    return Session(done, _counted(notes), str(report), int(report.stopped))


def gated_runs() -> list[Run]:
    return [tiny.run("gated", seed, steps=40, optimizer="adamw") for seed in range(8)]


def _new_notes(folder: Path, open_to: Iterable[int]) -> Path:
    notes = folder / f"notes {len([*folder.glob('notes *')])}"
    notes.mkdir()
    (notes / "open").write_text(" ".join(map(str, open_to)))
    return notes


def _counted(notes: Path) -> Counter[tuple[int, int]]:
    return Counter((seed, step) for seed, step in _drawn(notes) if seed < 8)


def _drawn(notes: Path) -> list[tuple[int, int]]:
    lines = [line for file in notes.glob("worker *") for line in file.read_text().splitlines()]
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


def _at_the_gate(notes: Path) -> set[int]:
    """The seeds that wait there."""
    allowed = {int(seed) for seed in (notes / "open").read_text().split()}
    return {seed for seed, step in _drawn(notes) if step == tiny.GATE} - allowed


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Session, Session, Session]:
    """A study whose driver is killed, then interrupted, then left alone; no worker is alive after any."""
    folder = tmp_path_factory.mktemp("sessions")
    return (
        folder,
        session(folder, signal.SIGKILL, [0]),
        session(folder, signal.SIGINT, [1]),
        last_session(folder),
    )


def test_an_interrupt_ends_in_words_not_in_tracebacks(sessions) -> None:
    _, killed, interrupted, _ = sessions
    assert killed.code == -signal.SIGKILL
    assert interrupted.code == 130
    assert "Traceback" not in interrupted.output
    assert "the same command again continues here" in interrupted.output


def test_what_was_finished_is_not_run_again_and_what_was_begun_goes_on(sessions) -> None:
    _, killed, interrupted, left_alone = sessions
    assert (killed.done, interrupted.done, left_alone.done) == ({0}, {1}, {*range(2, 8)})
    assert left_alone.code == 0
    # Seeds 1 and 2 waited at the gate when the driver was killed, 2 and 3 when it was interrupted.
    assert {seed for seed, step in killed.drawn if step > 0} == {0, 1, 2}
    assert {seed for seed, step in interrupted.drawn if step > 0} == {1, 2, 3}
    together = killed.drawn + interrupted.drawn + left_alone.drawn
    again = {1: 1, 2: 2, 3: 1}
    for seed in range(8):
        for step in range(1, 40):
            # Only the step in which it was stopped is made again.
            assert together[seed, step] == 1 + (again.get(seed, 0) if step == tiny.GATE else 0)


def test_all_sessions_together_give_what_one_would_have_given(sessions) -> None:
    folder, *_ = sessions
    runs = gated_runs()
    with Ledger.read(folder) as ledger:
        rows = {row["identity"]: row for row in ledger.rows()}
        assert len(rows) == 8
        for outcome in serial(runs, Resources()):
            row = rows[outcome.run.identity]
            assert (row["status"], row["step"], row["held_out"]) == ("finished", 40, outcome.held_out)
            assert ledger.metrics(outcome.run.identity)["loss"] == list(outcome.metrics["loss"])
    assert not (folder / "checkpoints").exists()
