"""On two processes under DDP: the worst row of both counts, and both make the same step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch.distributed without gloo"
)

PROGRAM = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from theodolite import probes
from theodolite.stepping import SafeStep

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))

generator = torch.Generator().manual_seed(1)
inputs, targets = torch.randn(8, 6, generator=generator).double(), torch.arange(8) % 3
inputs[1] *= 3  # so that the worst row is in the first half
mine = inputs[4 * rank : 4 * rank + 4], targets[4 * rank : 4 * rank + 4]


def trained(wrap, batch):
    torch.manual_seed(0)
    inside = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    model = wrap(inside)
    safe = SafeStep(torch.optim.SGD(model.parameters(), lr=100.0), model, cross_entropy)
    cross_entropy(model(batch[0]), batch[1]).backward()
    found = probes.radius(model, cross_entropy, batch, safe.optimizer)
    safe.step(batch)
    assert safe.report.acted == 1
    return found, torch.nn.utils.parameters_to_vector(inside.parameters()).detach()


expected, alone = trained(lambda inside: inside, (inputs, targets))
found, shared = trained(DistributedDataParallel, mine)
assert expected.worst == 1
assert abs(found.value / expected.value - 1) < 1e-9, (found.value, expected.value)
assert abs(found.slope / expected.slope - 1) < 1e-9
assert abs(found.curvature / expected.curvature - 1) < 1e-9
assert (rank == 0) == bool(found.rows.min() < 1.001 * found.value)
torch.testing.assert_close(shared, alone)
dist.destroy_process_group()
"""


def test_the_worst_row_of_all_ranks_counts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
