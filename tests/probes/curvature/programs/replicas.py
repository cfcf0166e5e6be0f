"""Run as ranks 0 and 1: under DDP probes measure the whole batch, under FSDP2 models are refused.

One program for all of it: to start two processes with torch costs more than what they do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import theodolite as th
from theodolite import probes
from theodolite.probes.curvature.tracking import Tracking

PARTS = ("hessian", "gauss_newton", "residual")
TOKENS = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(1))
GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(16, 6, generator=GENERATOR), torch.randint(3, (16,), generator=GENERATOR)


def main(folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    products_are_averaged(rank)
    traces_are_exact(rank)
    shards_are_refused(rank)
    all_track_at_the_same_steps(rank)
    landscapes_are_averaged(rank)
    dist.destroy_process_group()
    print("done")


def batch(which: Any) -> tuple[Tensor, Tensor]:
    return TOKENS[which][:, :-1], TOKENS[which][:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return th.models.GPT(4, 1, vocab=7, context=5, head_dim=2, norm="layer", bias=True).double()


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def apart(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def products_are_averaged(rank: int) -> None:
    mine, alone, everything = batch(slice(2 * rank, 2 * rank + 2)), gpt(), batch(slice(None))
    whole = probes.hessian(alone, loss, everything)
    vectors = torch.randn(whole.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    half = probes.hessian(alone, loss, mine)
    assert apart(half @ vectors, whole @ vectors) > 0.1, "both halves are alike, so the mean proves nothing"
    expected = probes.curvature(alone, loss, everything, directions=6)
    smaller = probes.along_scale(alone, loss, everything, [0.5], directions=6)[0]
    truth = probes.eigenvalues(whole, k=2, rtol=1e-8)
    wraps: dict[str, Callable[[], Any]] = {
        "ddp": lambda: DistributedDataParallel(gpt()),
        "ddp of a compiled one": lambda: DistributedDataParallel(torch.compile(gpt(), backend="eager")),
        "compiled ddp": lambda: torch.compile(DistributedDataParallel(gpt()), backend="eager"),
    }
    for name, wrap in wraps.items():
        model = wrap()
        found = probes.hessian(model, loss, mine)
        assert found.names == whole.names, name
        for part in PARTS:
            one, other = (each if part == "hessian" else getattr(each, part) for each in (found, whole))
            assert apart(one @ vectors, other @ vectors) < 1e-12, (name, part)
        assert apart(found.gradient, whole.gradient) < 1e-12, name
        assert abs(found.loss - whole.loss) < 1e-12, name
        listed = probes.hessian(model, loss, [batch([2 * rank]), batch([2 * rank + 1])])
        assert apart(listed @ vectors, whole @ vectors) < 1e-12, name

        reading = probes.curvature(model, loss, mine, directions=6)
        assert abs(reading.loss - expected.loss) < 1e-12, name
        for part in PARTS:
            one, other = getattr(reading, part), getattr(expected, part)
            assert apart(one.matrix, other.matrix) < 1e-12, (name, part)
            assert abs(one.trace.value - other.trace.value) < 1e-9 * abs(other.trace.value), (name, part)
        some = probes.along_scale(model, loss, mine, [0.5], directions=6)[0]
        assert apart(some.hessian.matrix, smaller.hessian.matrix) < 1e-12, name

        top = probes.eigenvalues(model, loss, mine, k=2, rtol=1e-8)
        assert apart(top.values, truth.values) < 1e-7, name
        assert all(one.grad is None for one in model.parameters()), name
        print(name)


def traces_are_exact(rank: int) -> None:
    images = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).double(), torch.arange(8) % 3
    relu = th.models.LeNet300(6, inputs=6, outputs=3).double()
    for tensor in relu.parameters():
        dist.broadcast(tensor.data, 0)
    mine = images[0][4 * rank : 4 * rank + 4], images[1][4 * rank : 4 * rank + 4]
    found = probes.curvature(DistributedDataParallel(relu), F.cross_entropy, mine, directions=6).trace
    assert found.exact
    expected = probes.curvature(relu, F.cross_entropy, images, directions=6).trace
    assert abs(found.value - expected.value) < 1e-10


def shards_are_refused(rank: int) -> None:
    model: Any = gpt()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for probe in (probes.hessian, probes.curvature, probes.eigenvalues):
        with pytest.raises(th.UseError, match=r"(?s)sharded.*full_state_dict"):
            probe(model, loss, batch(slice(2 * rank, 2 * rank + 2)))


def train(model: Any, part: slice, *, steps: int = 6, wait: float = 0.0, **options: Any) -> Tracking:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given: dict[str, Any] = {"every": 2, "measure": ["loss", "gradient_norm", "sharpness"]} | options
    with probes.track(model, F.cross_entropy, (X[part], Y[part]), optimizer, **given) as tracking:
        for _ in range(steps):
            time.sleep(wait)
            optimizer.zero_grad()
            F.cross_entropy(model(X[part]), Y[part]).backward()
            optimizer.step()
    return tracking


def all_track_at_the_same_steps(rank: int) -> None:
    mine, alone = slice(8 * rank, 8 * rank + 8), train(perceptron(), slice(None))
    compiled: Any = torch.compile(DistributedDataParallel(perceptron()), backend="aot_eager")
    for name, model in {"ddp": DistributedDataParallel(perceptron()), "compiled ddp": compiled}.items():
        both = train(model, mine)
        for measure in alone.names:
            for one, other in zip(both.values(measure), alone.values(measure), strict=True):
                assert abs(one - other) < 1e-3 * abs(other), (name, measure, one, other)

    # Ranks of different speed agree on what to skip; own functions may call the model.
    def own(model: Any, loss: Any, batch: Any) -> Any:
        time.sleep(0.01 if rank else 0.002)
        return loss(model(batch[0]), batch[1])

    options = {"every": 1, "most_share": 0.3, "measure": {"own": own}}
    both = train(DistributedDataParallel(perceptron()), mine, steps=60, wait=0.002, **options)
    steps: list[Any] = [None, None]
    dist.all_gather_object(steps, [row.step for row in both.rows])
    assert steps[0] == steps[1], steps
    assert both.left_out > 0, both
    assert len(both.rows) > 2, both


def landscapes_are_averaged(rank: int) -> None:
    mine = slice(8 * rank, 8 * rank + 8)
    model = DistributedDataParallel(perceptron())
    plane = probes.landscape(model, F.cross_entropy, (X[mine], Y[mine]), num=3)
    whole = probes.landscape(perceptron(), F.cross_entropy, (X, Y), num=3)
    assert abs(plane.values - whole.values).max() < 1e-5
    assert abs(plane.slices[0].exact - whole.slices[0].exact) < 1e-4


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
