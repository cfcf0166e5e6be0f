"""Run as ranks 0 and 1: what replicas measure is what one process with all microbatches does."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from theodolite.probes import Noise, NoiseMeter

STEPS, B = 12, 3


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(B, 4, generator=generator).double(), torch.randint(3, (B,), generator=generator)


def trained(rank: int, accumulated: int, *, replicated: bool, adam: bool) -> Noise:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    replicas = DistributedDataParallel(plain) if replicated else None
    model = replicas or plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with NoiseMeter(model, examples=B, optimizer=optimizer if adam else None) as meter:
        for step in range(STEPS):
            parts = range(2 * accumulated)
            mine = [part for part in parts if not replicated or part % 2 == rank]
            for part in mine:
                last = part == mine[-1]
                waiting = contextlib.nullcontext() if replicas is None or last else replicas.no_sync()
                inputs, targets = batch(step, part)
                with waiting:
                    (F.cross_entropy(model(inputs), targets) / len(mine)).backward()
            meter.step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        return meter.result()


def main(folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for accumulated in (1, 2):
        for adam in (False, True):
            found = trained(rank, accumulated, replicated=True, adam=adam)
            alone = trained(rank, accumulated, replicated=False, adam=adam)
            assert (found.units, found.batch, found.examples) == (alone.units, alone.batch, alone.examples)
            for one, other in zip((found.whole, *found.tensors), (alone.whole, *alone.tensors), strict=True):
                assert one.name == other.name
                for which in ("noise", "signal", "low"):
                    assert getattr(one, which) == pytest.approx(getattr(other, which), rel=1e-6), one.name
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
