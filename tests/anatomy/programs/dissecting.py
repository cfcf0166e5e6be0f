"""Wrapped and sharded modules on two processes have the anatomy of the bare one, also if only rank 0 asks."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import theodolite as th

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

TOKENS = torch.arange(8).reshape(1, 8)


def fresh() -> Any:
    torch.manual_seed(0)
    return th.models.GPT(32, 2, vocab=61, context=16, head_dim=8, qk_norm=True, tied=True, experts=3)


def on_meta() -> Any:
    with torch.device("meta"):
        return fresh()


def sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def emptied() -> Any:
    model = sharded(on_meta())
    model.to_empty(device="cpu")
    return model


def unsharded() -> Any:
    model = sharded(fresh(), reshard_after_forward=False)
    model(TOKENS)
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


WRAPS = {
    "ddp": lambda: DistributedDataParallel(fresh()),
    "fsdp": lambda: sharded(fresh()),
    "fsdp in bfloat16": lambda: sharded(fresh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    "fsdp on meta": lambda: sharded(on_meta()),
    "fsdp on meta, emptied": emptied,
    "fsdp, unsharded by a forward pass": unsharded,
    "compiled fsdp": lambda: compiled(sharded(fresh())),
    "fsdp of a compiled one": lambda: sharded(compiled(fresh())),
}


def state(model: nn.Module) -> Any:
    """What a call must leave as it was."""
    tensors = {
        name: (id(one), type(one), one.shape, one.requires_grad) for name, one in model.named_parameters()
    }
    hooks = {
        name: (list(one._forward_pre_hooks.values()), list(one._forward_hooks.values()))
        for name, one in model.named_modules()
    }
    return tensors, hooks


def check(name: str, model: nn.Module, inputs: torch.Tensor, expected: Any) -> None:
    before = state(model)
    if rank == 0:  # with a collective, it would wait here for ever
        assert dict(th.dissect(model, inputs)) == expected, f"{name}, rank 0 only"
    dist.barrier()
    assert dict(th.dissect(model, inputs)) == expected, name
    assert state(model) == before, name


bare = dict(th.dissect(fresh(), TOKENS))
for name, wrap in WRAPS.items():
    model = wrap()
    check(name, model, TOKENS, bare)
    if "meta" not in name:
        model(TOKENS).logsumexp(-1).sum().backward()
        assert all(one.grad is not None for one in model.parameters()), name


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 3))


mesh = init_device_mesh("cpu", (2,))
data = torch.ones(2, 6)
parallel = parallelize_module(layers(), mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
check("tensor parallel", parallel, data, dict(th.dissect(layers(), data)))
assert torch.allclose(parallel(data), layers()(data), atol=1e-6)
dist.destroy_process_group()
print("done")
