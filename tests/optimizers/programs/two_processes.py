"""Matrix optimizers in two processes, against one: replicas, shards, and a gradient that one process refuses.

Run as ranks 0 and 1, with a folder and the rank as arguments.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.optimizers import OPTIMIZERS, NonFiniteError, matrix_step

# Rows that two processes cannot share evenly, one that leaves a process without any, a stack and a kernel.
SHAPES = {"even": (6, 4), "odd": (5, 8), "one": (1, 3), "fused": (9, 3), "experts": (3, 4, 6)}
SHAPES["kernel"] = (7, 2, 3, 3)
GROUPS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("even", "odd", "one", "kernel"), {}),
    (("fused",), {"rows": (((0, 2), (5, 7)), ((2, 5), (7, 9)))}),  # interleaved
    (("experts",), {"axes": ((2,), (1,))}),
)


class Net(nn.Module):
    """One parameter of each shape."""

    def __init__(self) -> None:
        super().__init__()
        for place, (name, shape) in enumerate(SHAPES.items()):
            generator = torch.Generator().manual_seed(place)
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(param * x).sum() for param in self.parameters()]).sum()


class Counted(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def made(rule: str, model: nn.Module, **options: Any) -> Any:
    """An optimizer of all parameters."""
    spec = OPTIMIZERS[rule]
    named = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    groups = []
    for names, own in GROUPS:
        taken = {key: value for key, value in own.items() if key in spec.layout}
        groups.append({"params": [named[name] for name in names], "param_names": [*names], **taken})
    decay = {"weight_decay": 0.2} if spec.decays else {}
    optimizer: Any = spec.implementation
    return optimizer(groups, lr=0.1, **decay, **spec.fixed, **options)


def train(model: nn.Module, optimizer: Any) -> tuple[Counter[str], list[Tensor]]:
    """The collectives of the last of three steps, and the parameters after it."""
    for step in range(3):
        for place, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + place)
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            sharded: Any = param
            if hasattr(param, "full_tensor"):
                grad = distribute_tensor(grad, sharded.device_mesh, sharded.placements)
            param.grad = grad
        with Counted() as counted:
            optimizer.step()
    return counted.calls, [whole(param) for param in model.parameters()]


def whole(param: Any) -> Tensor:
    found: Tensor = (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()
    return found


def compare(rule: str) -> None:
    """Replicas, shards and shards along another dimension end where one process does."""
    spec = OPTIMIZERS[rule]
    _, expected = train(alone := Net(), made(rule, alone))

    def check(found: list[Tensor], what: str) -> None:
        error = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
        assert error < 1e-12, (rule, what, error)

    if spec.shares_work:
        WORKED.clear()
        replica = DistributedDataParallel(Net())
        calls, found = train(replica, made(rule, replica, shared_over=replica))
        assert calls == {"_allgather_base_": 1, "allreduce_": 1}, calls
        assert all(0 < count < len(SHAPES) for count in WORKED), WORKED
        check(found, "replicas")
        for tensor in found:
            other = tensor.clone()
            dist.broadcast(other, 0)
            assert torch.equal(tensor, other), "replicas differ"
    WORKED.clear()
    sharded: Any = fully_shard(Net())
    calls, found = train(sharded, made(rule, sharded))
    if rule.startswith("muon-"):
        assert calls == {"alltoall_base_": 2, "allreduce_": 1}, calls
    if spec.shares_work:
        assert len(WORKED) == 3, WORKED
        assert all(0 < count < len(SHAPES) for count in WORKED), WORKED
    check(found, "shards")
    across: Any = fully_shard(
        Net(), shard_placement_fn=lambda param: Shard(1) if param.shape[1] % 2 == 0 else None
    )
    check(train(across, made(rule, across))[1], "columns")
    refuse_together(rule, sharded)


def refuse_together(rule: str, sharded: Any) -> None:
    """A gradient that is bad in one process is refused in both, and nothing moves."""
    before = [param.to_local().clone() for param in sharded.parameters()]
    if dist.get_rank() == 1:
        sharded.odd.grad.to_local()[0, 0] = float("nan")
    said = "odd is nan in 1 of" if dist.get_rank() == 1 else "in another process"
    with pytest.raises(NonFiniteError, match=said):
        made(rule, sharded).step()
    assert all(torch.equal(a, b.to_local()) for a, b in zip(before, sharded.parameters(), strict=True))


WORKED: list[int] = []
"""How many matrices this process has orthogonalised, at each step."""


def main(folder: str, rank: int) -> None:
    """All of them."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    plain = matrix_step._worked

    def worked(how: Any, places: list[int], wholes: list[Tensor]) -> list[Tensor]:
        WORKED.append(len(places))
        return plain(how, places, wholes)

    matrix_step._worked = worked
    classes = {
        spec.class_name: name
        for name, spec in OPTIMIZERS.items()
        if "axes" in spec.layout and (spec.class_name != "Muon" or name == "muon-spectral")
    }
    for rule in classes.values():
        compare(rule)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
