"""Run as ranks 0 and 1: each process brings half of the examples, and all measure the whole."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from theodolite import UseError, probes

LABELS = torch.tensor([0, 1] * 5 + [2, 0] * 5)
"""Of class 1 only the first half has samples, of class 2 only the second."""
INPUTS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(4)[LABELS]


def main(folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    mine = slice(10 * rank, 10 * rank + 10)
    whole = probes.collapse(model, F.cross_entropy, (INPUTS.double(), LABELS))
    replicas = DistributedDataParallel(model)
    found = probes.collapse(replicas, F.cross_entropy, (INPUTS.double()[mine], LABELS[mine]))
    assert found.classes == whole.classes
    assert found.samples == whole.samples == 20
    for name in ("quotient", "pinv", "cdnv", "nc2", "equinorm", "equiangle", "nearest"):
        mine_is, all_is = (getattr(one.places[0].geometry, name) for one in (found, whole))
        assert mine_is == pytest.approx(all_is, rel=1e-9), name
    for name in ("loss", "accuracy", "nc3", "nc4"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-9), name
    labels = LABELS[mine] if rank else LABELS[mine].float()
    with pytest.raises(UseError, match="rank 0 failed" if rank else "one integer, the class"):
        probes.collapse(replicas, F.cross_entropy, (INPUTS.double()[mine], labels))
    del replicas  # if they free the group last, torch waits for a thread of gloo that waits for Python
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
