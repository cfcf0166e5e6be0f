"""Cells run in processes of their own; one that fails stops no other, and none outlives the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from theodolite.studies.processes import run_cells

DRIVER = """
import os, sys, time
from pathlib import Path
from theodolite.studies.processes import run_cells

def work(folder):
    Path(folder, "worker").write_text(str(os.getpid()))
    time.sleep(300)

if __name__ == "__main__":
    list(run_cells(work, [sys.argv[1]], jobs=2))
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_cell_has_its_result_or_the_reason_why_not(jobs: int) -> None:
    found = dict(run_cells(int, ["3", "x", "5"], jobs))
    assert (found["3"], found["5"]) == (3, 5)
    assert found["x"] == "ValueError: invalid literal for int() with base 10: 'x'"


def test_workers_end_when_the_driver_is_killed(tmp_path: Path) -> None:
    script, note = tmp_path / "driver.py", tmp_path / "worker"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    assert _soon(lambda: note.exists() and note.read_text() != "")
    worker = int(note.read_text())
    assert _alive(worker)
    driver.kill()
    driver.wait()
    assert _soon(lambda: not _alive(worker))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())  # ended, and nobody has asked


def _soon(happened, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if happened():
            return True
        time.sleep(0.05)
    return False
