"""Matrix optimizers on two processes: replicas share work, shards go to one owner, nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.optimizers import Muon
from theodolite.optimizers.sharding import shared_out


def test_two_processes_move_as_one_does_with_few_collectives(
    in_two_processes: Callable[[Path], None],
) -> None:
    in_two_processes(Path(__file__).with_name("programs") / "two_processes.py")


def test_work_is_shared_out_so_that_nobody_has_much_more() -> None:
    costs = [8.0, 7.0, 6.0, 5.0, 4.0, 1.0]
    owned = shared_out(costs, 3)
    assert sorted(sum(costs[place] for place in places) for places in owned) == [9.0, 11.0, 11.0]
    assert sorted(place for places in owned for place in places) == list(range(6))


def test_what_is_no_replica_is_refused() -> None:
    with pytest.raises(UseError, match="shared_over is a Linear: give the DistributedDataParallel model"):
        Muon([nn.Parameter(torch.eye(2))], shared_over=nn.Linear(2, 2))
