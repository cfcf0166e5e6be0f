"""The file or SQLite's log beside it is cut short: at most the last record is lost. See attack_kills.py."""

from __future__ import annotations

import random
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from theodolite.fleet.ledger import Ledger, LedgerError

from .driving import (
    PAGE,
    Driver,
    State,
    assert_whole,
    checked,
    halted_states,
    open_ledger,
    reopened,
    state_of,
    wait_until_stopped,
)


@pytest.fixture(scope="module")
def halted(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """Of 24 records: when each is committed to the log, when the log was copied, when it was moved."""
    return halted_states(tmp_path_factory.mktemp("halted"), 24)


@pytest.fixture(scope="module")
def at_random(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """Random moments of a driver that appends all the time, until it had something in the log at three."""
    path = tmp_path_factory.mktemp("random") / "ledger.sqlite"
    chance = random.Random(9)
    states: list[State] = []
    with Driver(path, "loop") as driver:
        select.select([driver.out.fileno()], [], [])  # until the first is safe
        safe = 0
        while sum(bool(state.log) for state in states) < 3:
            time.sleep(chance.uniform(0.001, 0.012))
            driver.process.send_signal(signal.SIGSTOP)
            wait_until_stopped(driver)
            states.append(state_of(driver, path, safe))
            safe = states[-1].safe
            driver.process.send_signal(signal.SIGCONT)
    return states


def cuts_of(size: int, *, number: int) -> Iterator[int]:
    chance = random.Random(size)
    yield from sorted({0, 1, 31, 32, 33, size - 1, *(chance.randrange(size) for _ in range(number))})


def test_a_log_that_is_cut_at_a_random_moment_loses_at_most_the_last_record(
    tmp_path: Path, at_random: list[State]
) -> None:
    logs = [state for state in at_random if state.log]
    for state in logs:
        for length in cuts_of(len(state.log), number=2):
            assert state.safe <= reopened(state.cut(log=length).put(tmp_path / "cut")) <= state.safe + 1


def test_half_moved_pages_whose_log_is_gone_are_mended_from_its_copy(
    tmp_path: Path, halted: list[State]
) -> None:
    for number in (7, 17):
        before, after = halted[3 * number + 1 : 3 * number + 3]
        for moved in range(0, len(after.file) // PAGE + 1, 8):
            pages = after.file[: moved * PAGE] + before.file[moved * PAGE :]
            path = replace(before, file=pages).put(tmp_path / "gone")
            Path(f"{path}-wal").unlink()
            assert reopened(path) == before.safe + 1
            assert not Path(f"{path}-spare").exists()


def test_an_older_copy_of_the_log_undoes_nothing(tmp_path: Path, halted: list[State]) -> None:
    """As when its driver was killed before it dropped it, and another program has moved what came later."""
    for number in (7, 17, 20):
        old, later = halted[3 * number + 1], halted[3 * number + 8]
        for log in (b"", None):
            path = replace(later, spare=old.spare).put(tmp_path / "old")
            assert later.log == b""
            if log is None:
                Path(f"{path}-wal").unlink()
            assert reopened(path) == later.safe + 1  # it stopped before it could say so


def test_the_log_is_empty_when_a_record_is_safe(halted: list[State]) -> None:
    assert [(len(state.log), state.spare) for state in halted[2::3]] == [(0, None)] * 24


def test_the_last_page_can_be_cut_anywhere_at_any_time(
    tmp_path: Path, halted: list[State], at_random: list[State]
) -> None:
    for number, state in enumerate([*halted[::12], *halted[2::9], *at_random]):
        cuts = [1, PAGE] if number % 8 else [1, 2, 100, 511, 512, 513, 2048, 4000, 4095, PAGE]
        for cut in cuts:
            path = state.cut(file=-cut).put(tmp_path / "cut")
            assert state.safe <= reopened(path) <= state.safe + 1


def test_a_reader_reads_a_file_that_was_cut(tmp_path: Path, halted: list[State]) -> None:
    state = halted[32]
    path = state.cut(file=-PAGE).put(tmp_path / "cut")
    with Ledger.read(path) as ledger:
        assert checked(ledger) == state.safe + 1  # it stopped before it could say so


def test_a_file_cut_by_half_is_refused_and_what_is_whole_is_salvaged(
    tmp_path: Path, halted: list[State]
) -> None:
    state = halted[-1]
    path = state.cut(file=len(state.file) // 2).put(tmp_path / "half")
    Path(f"{path}-lock").unlink()  # its driver had ended well
    for use in (Ledger.read, open_ledger, open_ledger):
        with pytest.raises(LedgerError, match=r"is damaged .*theodolite ledger salvage .* NEW"):
            use(path)
    with Ledger.salvage(path, tmp_path / "new") as ledger:
        assert_whole(ledger)
        assert 5 <= len(ledger.rows()) < 24


def test_any_sqlite_reads_the_file_as_it_lies(tmp_path: Path, halted: list[State]) -> None:
    path = halted[-1].put(tmp_path / "as it is")
    shell = shutil.which("sqlite3")
    if shell is None:
        pytest.skip("there is no sqlite3 here")
    query = "SELECT COUNT(*), SUM(attempts) FROM results; PRAGMA integrity_check"
    said = subprocess.run([shell, path, query], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["24|24", "ok"]
