"""Ready modules on two processes: DDP, FSDP2 and tensor parallelism change nothing, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "dissecting.py"


def test_modules_of_two_processes_have_the_anatomy_of_the_bare_one(
    in_two_processes: Callable[[Path], None],
) -> None:
    in_two_processes(PROGRAM)
