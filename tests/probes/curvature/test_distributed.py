"""On two processes: under DDP products are those of the whole batch, under FSDP2 they are refused.

One program for all of it: to start two processes with torch costs more than what they do.
"""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = """
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import theodolite as th
from theodolite import probes
from theodolite.probes.curvature.landscape import landscape
from theodolite.probes.curvature.tracking import track

torch.set_num_threads(1)
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

TOKENS = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(1))
MINE = slice(2 * rank, 2 * rank + 2)


def batch(which):
    return TOKENS[which][:, :-1], TOKENS[which][:, 1:]


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fresh():
    torch.manual_seed(0)
    return th.models.GPT(4, 1, vocab=7, context=5, head_dim=2, norm="layer", bias=True).double()


def apart(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


alone = fresh()
whole = probes.hessian(alone, loss, batch(slice(None)))
vectors = torch.randn(whole.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
half = probes.hessian(alone, loss, batch(MINE))
assert apart(half @ vectors, whole @ vectors) > 0.1, "both halves are alike, so the mean proves nothing"

wraps = {
    "ddp": lambda: DistributedDataParallel(fresh()),
    "ddp of a compiled one": lambda: DistributedDataParallel(torch.compile(fresh(), backend="eager")),
    "compiled ddp": lambda: torch.compile(DistributedDataParallel(fresh()), backend="eager"),
}
for name, wrap in wraps.items():
    model = wrap()
    found = probes.hessian(model, loss, batch(MINE))
    assert found.names == whole.names, name
    for part in ("hessian", "gauss_newton", "residual"):
        one, other = (each if part == "hessian" else getattr(each, part) for each in (found, whole))
        assert apart(one @ vectors, other @ vectors) < 1e-12, (name, part)
    assert apart(found.gradient, whole.gradient) < 1e-12, name
    assert abs(found.loss - whole.loss) < 1e-12, name
    listed = probes.hessian(model, loss, [batch([2 * rank]), batch([2 * rank + 1])])
    assert apart(listed @ vectors, whole @ vectors) < 1e-12, name

    reading = probes.curvature(model, loss, batch(MINE), directions=6)
    expected = probes.curvature(alone, loss, batch(slice(None)), directions=6)
    assert abs(reading.loss - expected.loss) < 1e-12, name
    for part in ("hessian", "gauss_newton", "residual"):
        one, other = getattr(reading, part), getattr(expected, part)
        assert apart(one.matrix, other.matrix) < 1e-12, (name, part)
        assert abs(one.trace.value - other.trace.value) < 1e-9 * abs(other.trace.value), (name, part)
    some = probes.along_scale(model, loss, batch(MINE), [0.5], directions=6)[0]
    other = probes.along_scale(alone, loss, batch(slice(None)), [0.5], directions=6)[0]
    assert apart(some.hessian.matrix, other.hessian.matrix) < 1e-12, name

    top = probes.eigenvalues(model, loss, batch(MINE), k=2, rtol=1e-8)
    truth = probes.eigenvalues(alone, loss, batch(slice(None)), k=2, rtol=1e-8)
    assert apart(top.values, truth.values) < 1e-7, name
    assert all(one.grad is None for one in model.parameters()), name
    print(name)

# Images on a network of ReLUs, whose trace is exact.
images = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).double(), torch.arange(8) % 3
relu = th.models.LeNet300(6, inputs=6, outputs=3).double()
for tensor in relu.parameters():
    dist.broadcast(tensor.data, 0)
mine = tuple(each[4 * rank : 4 * rank + 4] for each in images)
exact = probes.curvature(DistributedDataParallel(relu), F.cross_entropy, mine, directions=6).trace
assert exact.exact
assert abs(exact.value - probes.curvature(relu, F.cross_entropy, images, directions=6).trace.value) < 1e-10

model = fresh()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
for probe in (probes.hessian, probes.curvature, probes.eigenvalues):
    try:
        probe(model, loss, batch(MINE))
    except th.UseError as error:
        assert "sharded" in str(error) and "full_state_dict" in str(error), error
    else:
        raise AssertionError("a sharded model was accepted")

# Tracked: all measure at the same steps, and the whole batch.
generator = torch.Generator().manual_seed(1)
X, Y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
MINE = slice(8 * rank, 8 * rank + 8)


def small():
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


alone = train(small(), slice(None))
for name, wrap in {
    "ddp": DistributedDataParallel,
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager"),
}.items():
    both = train(wrap(small()), MINE)
    for measure in alone.names:
        for one, other in zip(both.values(measure), alone.values(measure), strict=True):
            assert abs(one - other) < 1e-3 * abs(other), (name, measure, one, other)

# Ranks of different speed agree on what to leave out; own functions may call the model.
def own(model, loss, batch):
    time.sleep(0.01 if rank else 0.002)
    return loss(model(batch[0]), batch[1])

model = DistributedDataParallel(small())
both = train(model, MINE, every=1, steps=60, wait=0.002, most_share=0.3, measure={"own": own})
steps = [None, None]
dist.all_gather_object(steps, [row.step for row in both.rows])
assert steps[0] == steps[1], steps
assert both.left_out > 0 and len(both.rows) > 2, (both.left_out, len(both.rows))

plane = landscape(DistributedDataParallel(small()), F.cross_entropy, (X[MINE], Y[MINE]), num=3)
whole = landscape(small(), F.cross_entropy, (X, Y), num=3)
assert abs(plane.values - whole.values).max() < 1e-5
assert abs(plane.slices[0].exact - whole.slices[0].exact) < 1e-4
dist.destroy_process_group()
print("done")
"""


def test_two_processes_measure_as_one_does_and_at_the_same_steps(
    in_two_processes: Callable[[str], None],
) -> None:
    in_two_processes(PROGRAM)
