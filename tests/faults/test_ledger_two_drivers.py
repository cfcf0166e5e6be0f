"""Two drivers on one ledger: the second is refused, as long as the first lives and no longer."""

from __future__ import annotations

import contextlib
import re
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from theodolite.core.errors import UseError
from theodolite.fleet.ledger import Ledger

from .driving import Driver, checked, open_ledger, outcome


def test_a_second_process_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with Driver(tmp_path, "loop") as first:
        first.next()
        holder = f"process {first.process.pid} on {re.escape(socket.gethostname())}"
        with pytest.raises(UseError, match=f"ledger.sqlite is being written by {holder} since"):
            open_ledger(tmp_path)
    with open_ledger(tmp_path) as ledger:
        checked(ledger)


WANTS_IT_ALONE = """
import sqlite3, sys
sqlite3.connect(sys.argv[1], timeout=0).execute("PRAGMA journal_mode = DELETE")
"""


@pytest.mark.parametrize("is_in_this_process", [False, True])
@pytest.mark.parametrize("way", ["symlink", "hard link", "no lock file", "hard link, no lock file"])
def test_a_second_one_that_goes_another_way_is_refused(
    tmp_path: Path, way: str, is_in_this_process: bool
) -> None:
    path = tmp_path / "ledger.sqlite"
    other = tmp_path / "elsewhere" / "other.db" if "link" in way else path
    (tmp_path / "elsewhere").mkdir()
    with contextlib.ExitStack() as stack:
        if is_in_this_process:
            first = stack.enter_context(open_ledger(path))
            first.append(outcome(0))
        else:
            driver = stack.enter_context(Driver(path, "loop"))
            driver.next()
        if way == "symlink":
            other.symlink_to(path)
        elif "hard link" in way:
            other.hardlink_to(path)
        if "no lock file" in way:
            Path(f"{path}-lock").unlink()
        with pytest.raises(UseError, match=r"is being written by|has 2 names \(hard links\)"):
            open_ledger(other)
        if is_in_this_process:
            # Nor has it ended SQLite's own locks: another process cannot have the file for itself.
            command = [sys.executable, "-c", WANTS_IT_ALONE, path]
            ended = subprocess.run(command, capture_output=True, text=True)
            assert ended.stderr.endswith("database is locked\n")
            first.append(outcome(1))
            assert checked(first) == 2
    if "hard link" in way:
        other.unlink()
        assert list(other.parent.iterdir()) == []
    with open_ledger(path) as ledger:
        assert checked(ledger) >= 1


def test_a_ledger_that_a_link_leads_to_has_its_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "there" / "ledger.sqlite")
    with open_ledger(tmp_path / "link.db") as ledger:
        ledger.append(outcome(0))
        assert ledger.path == tmp_path / "there" / "ledger.sqlite"
    with Ledger.read(tmp_path / "there") as ledger:
        assert checked(ledger) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.db", "there"]


def test_a_second_one_in_the_same_process_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as first:
        first.append(outcome(0))
        with pytest.raises(UseError, match="is being written by process"):
            open_ledger(tmp_path)
        # Nor has it ended the first one's locks: another process that wants the file for itself has to wait.
        with Driver(tmp_path, "loop") as second:
            assert second.next().startswith("refused: UseError")
        first.append(outcome(1))
        assert checked(first) == 2
    with open_ledger(tmp_path) as again:
        assert checked(again) == 2


def test_a_process_that_the_driver_has_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    with Driver(tmp_path, "fork") as driver:
        driver.next()
        assert driver.next() == "forked\n"
        driver.process.kill()
        driver.process.wait()
        with open_ledger(tmp_path) as ledger:
            assert checked(ledger) == 1


def test_readers_read_while_a_driver_writes(tmp_path: Path) -> None:
    counts = []
    with Driver(tmp_path, "loop") as driver:
        for _ in range(10):
            driver.next()
            with Ledger.read(tmp_path) as ledger:
                counts.append(checked(ledger))
                driver.next()
                assert len(ledger.rows()) >= counts[-1]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0] >= 1


def test_a_reader_who_takes_his_time_delays_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("theodolite.fleet.opening.PATIENCE", 2**31 - 1)
    with open_ledger(tmp_path) as ledger:
        ledger.append(outcome(0))
        with closing(sqlite3.connect(ledger.path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT COUNT(*) FROM results").fetchone() == (1,)
            for number in range(1, 4):
                ledger.append(outcome(number))  # which would wait for ever
            assert reader.execute("SELECT COUNT(*) FROM results").fetchone() == (1,)  # as he saw it first
        ledger.append(outcome(4))
        assert Path(f"{ledger.path}-wal").stat().st_size == 0
        assert checked(ledger) == 5
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_another_program_that_writes_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("theodolite.fleet.opening.PATIENCE", 50)
    with open_ledger(tmp_path) as ledger, closing(sqlite3.connect(ledger.path)) as shell:
        shell.isolation_level = None
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(UseError, match="is locked by another program"):
            ledger.append(outcome(0))
        shell.execute("ROLLBACK")
        ledger.append(outcome(0))
        assert checked(ledger) == 1
