"""SafeStep and probes under DDP, run as rank 0 and rank 1."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from theodolite import UseError, probes
from theodolite.controllers import SafeStep

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

generator = torch.Generator().manual_seed(1)
inputs, targets = torch.randn(8, 6, generator=generator).double(), torch.arange(8) % 3
inputs[1] *= 3  # so that the worst row is in the first half
mine = inputs[4 * rank : 4 * rank + 4], targets[4 * rank : 4 * rank + 4]


def trained(wrap: Callable[[torch.nn.Module], torch.nn.Module], batch: Any) -> tuple[Any, torch.Tensor]:
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

# What one rank refuses all do, at once, and they go on together.


class Fragile(torch.nn.Linear):
    fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("out of memory, as said")
        return super().forward(inputs)


def total(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, targets, reduction="sum")


def fragile() -> tuple[Any, SafeStep]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Fragile(6, 3).double())
    safe = SafeStep(torch.optim.Adam(model.parameters(), lr=1.0), model, total)
    return model, safe


def refused(act: Callable[[], Any], mine: str, elsewhere: str) -> None:
    with pytest.raises((torch.OutOfMemoryError, UseError), match=re.escape(mine if rank == 1 else elsewhere)):
        act()


def failing() -> None:
    model.module.fails = rank == 1
    safe.step(mine)


ELSEWHERE = "rank 1 failed, so all ranks stop: "
wrong: Any = mine if rank == 0 else 3
ignored = mine[0], torch.full_like(mine[1], -100) if rank == 1 else mine[1]
model, safe = fragile()
total(model(mine[0]), mine[1]).backward()
refused(lambda: safe.step(ignored), "is not a cross-entropy", ELSEWHERE)
refused(lambda: probes.radius(model, total, ignored), "is not a cross-entropy", ELSEWHERE)
refused(lambda: probes.radius(model, total, ignored, safe.optimizer), "is not a cross-entropy", ELSEWHERE)
refused(lambda: safe.step(wrong), "the batches are the int 3", ELSEWHERE)
refused(lambda: probes.profile(model, total, wrong), "the batches are the int 3", ELSEWHERE)
safe.step(mine)
before = [tensor.detach().clone() for tensor in model.parameters()]
refused(failing, "out of memory", ELSEWHERE)
refused(lambda: probes.hessian(model, total, mine).gradient, "out of memory", ELSEWHERE)
model.module.fails = False
assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
assert all(state["step"] == 1 for state in safe.state.values())
safe.step(mine)

plain, other = fragile()
total(plain(mine[0]), mine[1]).backward()
for _ in range(2):
    other.step(mine)
assert all(torch.equal(now, then) for now, then in zip(model.parameters(), plain.parameters(), strict=True))
assert other.report == safe.report
dist.destroy_process_group()
print("done")
