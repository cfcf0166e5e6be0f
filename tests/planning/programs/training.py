"""DDP and FSDP2 train by a plan as one process does; a sharded run is resumed."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import theodolite as th

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

TOKENS = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(1))


def build(width: int, depth: int) -> Any:
    return th.models.GPT(width, depth, vocab=17, context=8, head_dim=8, tied=True, experts=2, active=2)


def fresh() -> Any:
    torch.manual_seed(0)
    return build(16, 2)


def train(model: Any, optimizer: Any, mine: slice, start: int = 0, steps: int = 3) -> None:
    for step in range(start, start + steps):
        tokens = (TOKENS[mine] + step) % 17
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: Any) -> list[torch.Tensor]:
    return [
        (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
        for param in model.parameters()
    ]


def sharded() -> Any:
    model = fresh()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


ALL, MINE = slice(None), slice(2 * rank, 2 * rank + 2)
WRAPS = {
    "ddp": lambda: DistributedDataParallel(fresh()),
    "ddp of a compiled one": lambda: DistributedDataParallel(torch.compile(fresh(), backend="eager")),
    "fsdp": sharded,
}
for rule in ("adamw", "muon-kimi"):
    base, size = th.Size(8, 1), th.Size(16, 2)
    plan = th.plan(build, TOKENS[:, :-1], base=base, size=size, optimizer=rule, lr=3e-3, weight_decay=0.1)
    alone = fresh()
    train(alone, plan.optimizer(alone), ALL)
    expected = whole(alone)
    assert max((a - b).abs().max().item() for a, b in zip(expected, whole(fresh()), strict=True)) > 3e-3
    for name, wrap in WRAPS.items():
        model = wrap()
        optimizer = plan.optimizer(model)
        train(model, optimizer, MINE)
        apart = max((a - b).abs().max().item() for a, b in zip(whole(model), expected, strict=True))
        assert apart < 1e-6, f"{rule} under {name} is off by {apart}"
        print(rule, name, apart)

    # A checkpoint of a sharded run, halfway.
    model = sharded()
    optimizer = plan.optimizer(model)
    train(model, optimizer, MINE, steps=2)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    resumed = plan.optimizer(model)
    set_optimizer_state_dict(model, resumed, saved)
    train(model, resumed, MINE, start=2, steps=1)
    apart = max((a - b).abs().max().item() for a, b in zip(whole(model), expected, strict=True))
    assert apart < 1e-6, f"{rule} resumed under fsdp is off by {apart}"
dist.destroy_process_group()
print("done")
