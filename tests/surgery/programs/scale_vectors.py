"""Replicas and shards of a network with scale vectors train as one process does."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import theodolite as th

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
tokens = torch.randint(64, (4, 6), generator=torch.Generator().manual_seed(0))


def build() -> Any:
    torch.manual_seed(0)
    model = th.models.GPT(32, 1, vocab=64, head_dim=16, norm="layer", bias=True, gated=True).double()
    return th.surgery.convert(model, tokens)


def step(model: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(-1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    named = {name.removeprefix("module."): one for name, one in model.named_parameters()}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in named.items()}


alone = step(build(), tokens)
replica = DistributedDataParallel(build())
sharded = build()
for block in sharded.blocks:
    fully_shard(block)
fully_shard(sharded)
mine = tokens[2 * rank : 2 * rank + 2]
for model in (replica, sharded):
    found = step(model, mine)
    assert found.keys() == alone.keys()
    for name, one in found.items():
        assert torch.allclose(one, alone[name], rtol=1e-6, atol=1e-8), name

with pytest.raises(th.UseError, match="is sharded: operate on the network before fully_shard"):
    th.surgery.fold(sharded, tokens)
with pytest.raises(th.UseError, match="operate on the network first, then wrap it"):
    th.surgery.fold(replica, tokens)
before = replica(tokens).detach()
th.surgery.fold(replica.module, tokens)
assert torch.allclose(replica.module(tokens), before, rtol=1e-10, atol=1e-12)
print("done")
