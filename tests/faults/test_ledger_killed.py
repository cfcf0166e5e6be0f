"""The driver is killed, and the next one goes on. attack_kills.py kills it at any moment."""

from __future__ import annotations

from pathlib import Path

from .driving import Driver, checked, open_ledger, outcome


def test_the_ledger_goes_on_after_a_kill_without_a_trace_beside_it(tmp_path: Path) -> None:
    with Driver(tmp_path, "loop") as driver:
        driver.next()
    with open_ledger(tmp_path) as ledger:
        there = checked(ledger)
        ledger.append(outcome(there))
        assert checked(ledger) == there + 1
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.sqlite"]
