"""On two processes under DDP: the worst row of both counts, and both make the same step or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_the_worst_row_of_all_ranks_counts_and_what_one_refuses_all_do(
    in_two_processes: Callable[[Path], None],
) -> None:
    in_two_processes(Path(__file__).parent / "programs" / "safe_step_on_two_ranks.py")
