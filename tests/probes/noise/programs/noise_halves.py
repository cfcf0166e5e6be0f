"""Run as ranks 0 and 1: each process brings a part of the examples, and both measure the whole."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from theodolite import UseError, probes

INPUTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.arange(20) % 3


def main(folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    replicas = DistributedDataParallel(model)
    mine = slice(0, 14) if rank == 0 else slice(14, 20)
    for microbatch in (1, 2):
        whole = probes.noise(model, F.cross_entropy, (INPUTS, LABELS), microbatch=microbatch)
        found = probes.noise(replicas, F.cross_entropy, (INPUTS[mine], LABELS[mine]), microbatch=microbatch)
        assert (found.units, found.examples) == (whole.units, whole.examples) == (20 // microbatch, 20)
        for one, other in zip((found.whole, *found.tensors), (whole.whole, *whole.tensors), strict=True):
            assert one.name == other.name
            for which in ("noise", "signal"):
                assert getattr(one, which) == pytest.approx(getattr(other, which), rel=1e-9), one.name
    labels = LABELS[mine] if rank else LABELS[mine].float()
    with pytest.raises((UseError, RuntimeError), match="rank 0 failed" if rank else "."):
        probes.noise(replicas, F.cross_entropy, (INPUTS[mine], labels))
    del replicas  # if they free the group last, torch waits for a thread of gloo that waits for Python
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
