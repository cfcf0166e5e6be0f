"""Two drivers on one ledger: the second is refused, as long as the first lives and no longer."""

from __future__ import annotations

import re
import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from theodolite.errors import UseError
from theodolite.fleet.ledger import Ledger

from .driving import Driver, checked, open_ledger, outcome


def test_a_second_process_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with Driver(tmp_path, "loop") as first:
        first.next()
        begun = time.monotonic()
        holder = f"process {first.process.pid} on {re.escape(socket.gethostname())}"
        with pytest.raises(UseError, match=f"ledger.sqlite is being written by {holder} since"):
            open_ledger(tmp_path)
        assert time.monotonic() - begun < 2
    with open_ledger(tmp_path) as ledger:
        checked(ledger)


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
        time.sleep(0.2)
    with open_ledger(tmp_path) as ledger:
        assert checked(ledger) == 1


def test_readers_read_while_a_driver_writes(tmp_path: Path) -> None:
    counts = []
    with Driver(tmp_path, "loop") as driver:
        driver.next()
        for _ in range(20):
            with Ledger.read(tmp_path) as ledger:
                counts.append(checked(ledger))
                time.sleep(0.01)
                assert len(ledger.rows()) >= counts[-1]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0] >= 1


def test_a_reader_who_takes_his_time_delays_no_record(tmp_path: Path) -> None:
    with open_ledger(tmp_path) as ledger:
        ledger.append(outcome(0))
        with closing(sqlite3.connect(ledger.path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT COUNT(*) FROM results").fetchone() == (1,)
            for number in range(1, 4):
                begun = time.monotonic()
                ledger.append(outcome(number))
                assert time.monotonic() - begun < 2
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
