"""Weights that are sharded or replicated start as those of a whole network."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import theodolite as th

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
tokens = torch.zeros(1, 8, dtype=torch.long)
# An odd vocabulary: the two parts of the table are not equal.
build = partial(th.models.GPT, vocab=61, tied=True)
plan = th.plan(build, tokens, size=th.Size(64, 2), base=th.Size(32, 1), lr=1e-3)
whole = plan.build(seed=4)
torch.manual_seed(rank)
model: Any = build(64, 2)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
plan.initialize(model, seed=4)
for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
    assert not torch.equal(torch.tensor(ours.to_local().shape), torch.tensor(theirs.shape)), name
    assert torch.equal(ours.full_tensor(), theirs), name
inputs = torch.arange(8)[None]
assert torch.allclose(model(inputs), whole(inputs), atol=1e-6)
assert plan.multipliers == {"readout": 0.5}
replica = plan.initialize(torch.nn.parallel.DistributedDataParallel(build(64, 2)), seed=4)
assert torch.equal(replica(inputs), whole(inputs))
print("done")
