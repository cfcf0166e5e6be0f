"""Plans on two processes: DDP and FSDP2 train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "training.py"


def test_two_processes_train_as_one_does(in_two_processes: Callable[[Path], None]) -> None:
    in_two_processes(PROGRAM)
