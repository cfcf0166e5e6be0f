"""The driver is killed at any moment: what it was told is safe is there, and nothing twice."""

from __future__ import annotations

import random
import time
from pathlib import Path

from .driving import Driver, checked, is_sound, open_ledger, outcome

KILLS = 50


def test_fifty_kills_lose_nothing_that_was_said_to_be_safe(tmp_path: Path) -> None:
    chance = random.Random(4)
    known = 0
    path = tmp_path / "ledger.sqlite"
    for kill in range(KILLS):
        with Driver(path, "loop") as driver:
            # Every fifth is killed while it starts.
            printed = [driver.next()] if kill % 5 else []
            time.sleep(chance.uniform(0, 0.08))
            printed += driver.kill()
        safe = [line.strip() for line in printed if line.endswith("\n")]
        assert safe == [outcome(known + i).run.identity for i in range(len(safe))]
        with open_ledger(path) as ledger:
            there = checked(ledger)
        # One more may be there: killed after it was safe, before it said so.
        assert known + len(safe) <= there <= known + len(safe) + 1
        known = there
        assert is_sound(path)
    assert known > KILLS


def test_the_ledger_goes_on_after_a_kill_without_a_trace_beside_it(tmp_path: Path) -> None:
    with Driver(tmp_path, "loop") as driver:
        driver.next()
    with open_ledger(tmp_path) as ledger:
        there = checked(ledger)
        ledger.append(outcome(there))
        assert checked(ledger) == there + 1
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.sqlite"]
