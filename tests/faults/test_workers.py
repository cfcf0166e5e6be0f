"""Workers that are killed, and drivers: nothing is lost but time, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from theodolite.fleet.driver import Report, conduct
from theodolite.fleet.engine import Means, serial
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.outcome import Outcome
from theodolite.fleet.progress import Progress

from ..fleet import tiny


class Faults(NamedTuple):
    report: Report
    outcomes: dict[int, Outcome]
    said: list[str]
    folder: Path


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Six runs, five of which go wrong in different ways."""
    folder = tmp_path_factory.mktemp("faults")
    said: list[str] = []

    class Listening(Progress):
        def said(self, line: str) -> None:
            said.append(line)

    shelf = tiny.Shelf()
    runs = [tiny.run("faulty", seed) for seed in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_FOLDER", str(folder))
        report = conduct(runs, shelf, engine="processes", means=Means(jobs=1), progress=Listening())
    return Faults(report, {outcome.run.seed: outcome for outcome in shelf.outcomes}, said, folder)


def test_a_run_whose_worker_was_killed_is_made_again(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_FOLDER", str(faults.folder))  # it was killed once, so now it is not
    assert (faults.folder / "killed 1").exists()
    for seed in (0, 1):
        (alone,) = serial([tiny.run("faulty", seed)], Means())
        assert tiny.numbers(faults.outcomes[seed]) == tiny.numbers(alone)
        assert alone.status == "finished"
    assert sum("seed 1: its worker was killed by SIGKILL" in line for line in faults.said) == 1


def test_a_run_whose_worker_is_always_killed_fails_and_names_the_signal(faults: Faults) -> None:
    outcome = faults.outcomes[2]
    assert outcome.status == "failed"
    assert "killed by SIGKILL" in outcome.error
    assert "3 times" in outcome.error
    assert len((faults.folder / "killed 2").read_text().split()) == 3
    assert 0 < outcome.seconds < 60


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
    assert (report.total, report.finished, report.diverged) == (6, 2, 1)
    assert sorted(run.seed for run, _ in report.failed) == [2, 4, 5]
    assert "The same command again runs only these" in str(report)


DRIVER = f"""
import sys
sys.path.insert(0, {str(tiny.FILE.parent)!r})
import tiny
from theodolite.fleet.driver import conduct
from theodolite.fleet.engine import Means
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.progress import Progress

class Told(Progress):
    def ended(self, outcome):
        print(outcome.run.seed, flush=True)

if __name__ == "__main__":
    folder = sys.argv[1]
    runs = [tiny.run("slow", seed, steps=40, optimizer="adamw") for seed in range(8)]
    means = Means(jobs=2, checkpoints=tiny.Path(folder, "checkpoints"), checkpoint_seconds=0)
    with Ledger.open(folder, name="slow", spec={{}}) as ledger:
        report = conduct(runs, ledger, engine="processes", means=means, progress=Told())
    print(report)
    sys.exit(130 if report.stopped else 0)
"""


class Session(NamedTuple):
    """One life of the driver, and of what it started."""

    done: set[int]
    drawn: Counter[tuple[int, int]]
    """How often a seed and a step."""
    alive_after: list[int]
    output: str
    code: int


def session(folder: Path, end: signal.Signals | None) -> Session:
    notes = folder / f"notes {time.monotonic()}"
    notes.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "driver.py", str(folder)],
        cwd=folder,
        env={**os.environ, "TINY_FOLDER": str(notes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    head = ""
    if end is not None:
        head = driver.stdout.readline()
        if end == signal.SIGKILL:
            driver.kill()
        else:
            os.killpg(driver.pid, end)  # as a terminal does on Ctrl-C
    output = head + driver.communicate(timeout=60)[0]
    workers = [int(file.name.split()[1]) for file in notes.iterdir()]
    assert workers
    until = time.monotonic() + 2
    while (alive := [worker for worker in workers if _is_alive(worker)]) and time.monotonic() < until:
        time.sleep(0.02)
    pairs = [line.split() for file in notes.iterdir() for line in file.read_text().splitlines()]
    drawn = Counter((int(seed), int(step)) for seed, step in pairs if int(seed) < 8)
    done = {int(line) for line in output.splitlines() if line.isdigit()}
    return Session(done, drawn, alive, output, driver.returncode)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Session, Session, Session]:
    """A study whose driver is killed, then interrupted, then left alone."""
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "driver.py").write_text(DRIVER)
    return folder, session(folder, signal.SIGKILL), session(folder, signal.SIGINT), session(folder, None)


def test_no_worker_outlives_a_driver_that_is_killed_or_interrupted(sessions) -> None:
    _, killed, interrupted, left_alone = sessions
    assert killed.code == -signal.SIGKILL
    assert killed.alive_after == interrupted.alive_after == left_alone.alive_after == []


def test_an_interrupt_ends_in_words_not_in_tracebacks(sessions) -> None:
    _, _, interrupted, _ = sessions
    assert interrupted.code == 130
    assert "Traceback" not in interrupted.output
    assert "the same command again goes on from here" in interrupted.output


def test_what_was_finished_is_not_run_again_and_what_was_begun_goes_on(sessions) -> None:
    _, killed, interrupted, left_alone = sessions
    assert killed.done
    assert interrupted.done
    assert not interrupted.done & killed.done
    assert not left_alone.done & (killed.done | interrupted.done)
    for seed in killed.done:
        assert not any(step > 0 for drawn, step in interrupted.drawn if drawn == seed)
    together = killed.drawn + interrupted.drawn + left_alone.drawn
    steps = [(seed, step) for seed in range(8) for step in range(1, 40)]
    assert all(together[each] >= 1 for each in steps)
    # At most the step in which it was stopped is made again.
    assert all(sum(together[seed, step] - 1 for step in range(1, 40)) <= 2 for seed in range(8))
    begun = {seed for seed, step in killed.drawn if step > 1} - killed.done
    assert begun
    assert left_alone.code == 0


def test_all_sessions_together_give_what_one_would_have_given(sessions) -> None:
    folder, *_ = sessions
    runs = [tiny.run("slow", seed, steps=40, optimizer="adamw") for seed in range(8)]
    with Ledger.read(folder) as ledger:
        rows = {row["identity"]: row for row in ledger.rows()}
        assert len(rows) == 8
        for outcome in serial(runs, Means()):
            row = rows[outcome.run.identity]
            assert (row["status"], row["step"], row["held_out"]) == ("finished", 40, outcome.held_out)
            assert ledger.metrics(outcome.run.identity)["loss"] == list(outcome.metrics["loss"])
    assert not (folder / "checkpoints").exists()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())  # ended, and nobody has asked
