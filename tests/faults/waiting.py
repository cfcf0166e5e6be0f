"""Wait for what has to happen, not for a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LAST_RESORT = 300.0
"""Seconds after which nothing is expected to happen any more, on the slowest of machines."""


def wait_until(has_happened: Callable[[], bool]) -> None:
    end = time.monotonic() + LAST_RESORT
    while not has_happened():
        assert time.monotonic() < end, f"it has not happened in {LAST_RESORT:.0f} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()  # a zombie has ended, and nobody has asked
    except FileNotFoundError:
        return not Path("/proc/self/status").exists()  # it has ended just now, or there is no /proc
