"""A function over items in other processes: every item has its result or the reason why not."""

from __future__ import annotations

import importlib
import math
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from theodolite import UseError
from theodolite.fleet.pool import Failure, _Worker, pooled

from ..faults.waiting import is_alive, wait_until
from ..forking import start_script

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def errands(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that workers can import."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("errands")


def test_results_come_back_and_exceptions_as_what_they_say(errands: ModuleType) -> None:
    begun: list[str] = []
    results = pooled(
        errands.answer,
        ["3", "x", "exit", "function", "process 1", "process 2", "threads", "5"],
        1,
        begun=begun.append,
    )
    found = dict(results)
    assert (found["3"], found["5"]) == (3, 5)
    assert found["x"].reason == "ValueError: invalid literal for int() with base 10: 'x'"
    assert "in answer" in found["x"].trace
    assert found["exit"].reason == "SystemExit: 3"
    assert isinstance(found["function"], Failure)
    assert "local object" in found["function"].reason  # pickle, in the words of every version of Python
    assert found["process 1"] == found["process 2"] != os.getpid()
    assert found["threads"] == 1
    assert begun == list(found)


def test_a_worker_that_is_spent_is_not_used_again(errands: ModuleType) -> None:
    found = dict(pooled(errands.answer, ["process 1", "process 2"], 1, spent=lambda result: True))
    assert found["process 1"] != found["process 2"]


def test_closing_kills_the_workers(tmp_path: Path, errands: ModuleType) -> None:
    sleep, watch = (errands.sleep_long, tmp_path), (errands.sleepers, tmp_path)
    results = pooled(errands.call, [sleep, sleep, watch], 3)
    _, workers = next(results)
    results.close()
    assert len(workers) == 2
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_a_worker_whose_time_is_over_is_killed_and_another_goes_on(
    tmp_path: Path, errands: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"

    def is_late(worker: _Worker[str], timeout: float) -> bool:
        """Not by the clock, which may be slow: once it hangs, its time is over."""
        hangs = worker.task is not None and worker.task.item.startswith("hang")
        return hangs and note.exists() and note.read_text() != ""  # the file is there before its text

    monkeypatch.setattr(_Worker, "is_late", is_late)
    found = dict(pooled(errands.answer, [f"hang {note}", "process 1"], 1, timeout=0.01))
    assert found[f"hang {note}"] == Failure("it was ended after 0.01 s, the time limit", "")
    hung = int(note.read_text())
    assert found["process 1"] != hung
    assert not is_alive(hung)


def test_the_time_limit_is_that_of_the_clock() -> None:
    worker: _Worker[str] = _Worker(None, None)  # type: ignore[arg-type]
    assert not worker.is_late(0.0)  # it has nothing to do
    worker.since = -math.inf
    assert not worker.is_late(None)
    assert worker.is_late(1e9)
    worker.since = math.inf
    assert not worker.is_late(1e9)


def test_a_worker_that_is_still_importing_ends_with_its_driver(tmp_path: Path) -> None:
    script = shutil.copy(PROGRAMS / "slow_to_import.py", tmp_path)  # in whose folder it writes
    driver = start_script(Path(script), [], tmp_path / "printed")
    wait_until((tmp_path / "worker").exists)
    worker = int((tmp_path / "worker").read_text())
    assert is_alive(worker)
    driver.kill()
    driver.join()
    wait_until(lambda: not is_alive(worker))


def test_what_does_not_pickle_is_refused_before_any_process_is_started() -> None:
    with pytest.raises(UseError, match=r"cannot be sent to another process: .*pickle"):
        next(pooled(lambda item: item, [1], 1))


def test_a_script_that_would_start_itself_again_is_told_how_not_to(tmp_path: Path) -> None:
    driver = start_script(PROGRAMS / "unguarded.py", [], tmp_path / "printed")
    driver.join()
    assert driver.exitcode == 1
    last = (tmp_path / "printed").read_text().splitlines()[-1]
    assert "start runs under `if __name__ == '__main__':`" in last
