"""Two processes under DistributedDataParallel: they measure at the same steps, and the whole batch."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = """
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from theodolite.probes.second_order.landscape import landscape
from theodolite.probes.second_order.tracking import track

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))

generator = torch.Generator().manual_seed(1)
X, Y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
MINE = slice(8 * rank, 8 * rank + 8)


def fresh():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, part, *, every=2, steps=6, wait=0.0, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"every": every, "measure": ["loss", "gradient_norm", "sharpness"]} | options
    with track(model, F.cross_entropy, (X[part], Y[part]), optimizer, **options) as tracking:
        for _ in range(steps):
            time.sleep(wait)
            optimizer.zero_grad()
            F.cross_entropy(model(X[part]), Y[part]).backward()
            optimizer.step()
    return tracking


alone = train(fresh(), slice(None))
for name, wrap in {
    "ddp": DistributedDataParallel,
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager"),
}.items():
    both = train(wrap(fresh()), MINE)
    for measure in alone.names:
        for one, other in zip(both.values(measure), alone.values(measure), strict=True):
            assert abs(one - other) < 1e-3 * abs(other), (name, measure, one, other)

# Ranks of different speed agree on what to leave out; own functions may call the model.
def own(model, loss, batch):
    time.sleep(0.01 if rank else 0.002)
    return loss(model(batch[0]), batch[1])

model = DistributedDataParallel(fresh())
both = train(model, MINE, every=1, steps=60, wait=0.002, most_share=0.3, measure={"own": own})
steps = [None, None]
dist.all_gather_object(steps, [row.step for row in both.rows])
assert steps[0] == steps[1], steps
assert both.left_out > 0 and len(both.rows) > 2, (both.left_out, len(both.rows))

plane = landscape(DistributedDataParallel(fresh()), F.cross_entropy, (X[MINE], Y[MINE]), num=3)
whole = landscape(fresh(), F.cross_entropy, (X, Y), num=3)
assert abs(plane.values - whole.values).max() < 1e-5
assert abs(plane.slices[0].exact - whole.slices[0].exact) < 1e-4
dist.destroy_process_group()
print("done")
"""


def test_two_processes_measure_the_same_at_the_same_steps(in_two_processes: Callable[[str], None]) -> None:
    in_two_processes(PROGRAM)
