"""Muon on two processes: replicas share the work out, shards go to one owner, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.optimizers import Muon
from theodolite.optimizers.sharding import shared_out

PROGRAM = """
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.optimizers import Muon, matrix_step as moving
from theodolite.optimizers.step_checks import NonFiniteError

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

# Rows that two processes cannot share evenly, one that leaves a process without any, a stack and a kernel.
SHAPES = {"even": (6, 4), "odd": (5, 8), "one": (1, 3), "fused": (9, 3), "experts": (3, 4, 6)}
SHAPES["kernel"] = (7, 2, 3, 3)
GROUPS = (
    (("even", "odd", "one", "kernel"), {}),
    (("fused",), {"rows": (((0, 2), (5, 7)), ((2, 5), (7, 9)))}),  # interleaved
    (("experts",), {"axes": ((2,), (1,))}),
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for place, (name, shape) in enumerate(SHAPES.items()):
            generator = torch.Generator().manual_seed(place)
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, x):
        return sum((param * x).sum() for param in self.parameters())


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def muon(model, **options):
    named = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    groups = [
        {"params": [named[name] for name in names], "param_names": [*names], **own} for names, own in GROUPS
    ]
    return Muon(groups, lr=0.1, weight_decay=0.2, momentum=0.9, scale="spectral", **options)


def cut(whole, param):
    if not hasattr(param, "full_tensor"):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements)


def whole(param):
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()


def train(model, optimizer):
    for step in range(3):
        for place, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + place)
            param.grad = cut(torch.randn(param.shape, generator=generator, dtype=torch.float64), param)
        with Counted() as counted:
            optimizer.step()
    return counted.calls, [whole(param) for param in model.parameters()]


_, expected = train(alone := Net(), muon(alone))
worked, plain = [], moving._worked
moving._worked = lambda how, places, wholes: worked.append(len(places)) or plain(how, places, wholes)

replica = DistributedDataParallel(Net())
calls, found = train(replica, muon(replica, shared_over=replica))
assert calls == {"_allgather_base_": 1, "allreduce_": 1}, calls
assert all(0 < count < len(SHAPES) for count in worked), worked
assert max((a - b).abs().max().item() for a, b in zip(found, expected)) < 1e-12, "replicas"
others = [torch.empty_like(tensor) for tensor in found]
for tensor, other in zip(found, others):
    other.copy_(tensor)
    dist.broadcast(other, 0)
assert all(torch.equal(a, b) for a, b in zip(found, others)), "replicas differ"

sharded = fully_shard(Net())
calls, found = train(sharded, muon(sharded))
assert calls == {"alltoall_base_": 2, "allreduce_": 1}, calls
assert len(worked) == 6 and all(0 < count < len(SHAPES) for count in worked), worked
assert max((a - b).abs().max().item() for a, b in zip(found, expected)) < 1e-12, "shards"

# Cut along another dimension.
across = fully_shard(Net(), shard_placement_fn=lambda param: Shard(1) if param.shape[1] % 2 == 0 else None)
_, found = train(across, muon(across))
assert max((a - b).abs().max().item() for a, b in zip(found, expected)) < 1e-12, "columns"

# A gradient that is bad in one process is refused in both, and nothing moves.
before = [param.to_local().clone() for param in sharded.parameters()]
if rank == 1:
    sharded.odd.grad.to_local()[0, 0] = float("nan")
try:
    muon(sharded).step()
    raise AssertionError("a step was made")
except NonFiniteError as error:
    assert ("odd is nan in 1 of" in str(error)) == (rank == 1), error
assert all(torch.equal(a, b.to_local()) for a, b in zip(before, sharded.parameters()))
dist.destroy_process_group()
print("done")
"""


def test_two_processes_move_as_one_does_with_few_collectives(in_two_processes: Callable[[str], None]) -> None:
    in_two_processes(PROGRAM)


def test_work_is_shared_out_so_that_nobody_has_much_more() -> None:
    owners = shared_out([8.0, 7.0, 6.0, 5.0, 4.0, 1.0], 3)
    loads = [sum(c for c, o in zip([8.0, 7, 6, 5, 4, 1], owners, strict=True) if o == r) for r in range(3)]
    assert sorted(loads) == [9.0, 11.0, 11.0]


def test_what_is_no_replica_is_refused() -> None:
    with pytest.raises(UseError, match="shared_over is a Linear: give the DistributedDataParallel model"):
        Muon([nn.Parameter(torch.eye(2))], shared_over=nn.Linear(2, 2))
