"""On two processes: `programs/replicas.py` says what has to hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_two_processes_measure_as_one_does_and_at_the_same_steps(
    in_two_processes: Callable[[Path], None],
) -> None:
    in_two_processes(Path(__file__).with_name("programs") / "replicas.py")
