"""On two processes: `programs/halves.py` says what has to hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_two_processes_with_half_of_the_examples_measure_all_of_them(
    in_two_processes: Callable[[Path], None],
) -> None:
    in_two_processes(Path(__file__).with_name("programs") / "halves.py")
