"""One of two processes that hold replicas of a model and measure together.

    python ranks.py FOLDER RANK TRIES

In each try one of them fails in its own way. Both write what came of it, one line of JSON for each try.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from theodolite import probes
from theodolite.controllers import DriftAdjusted, NormalizedSmoothness, SafeStep
from theodolite.optimizers import Muon, SpectralSphere
from theodolite.optimizers.sharding import local

PATIENCE = timedelta(seconds=60)
"""After which an exchange counts as one that nobody answers. Nothing waits so long unless it hangs."""

TEXT = "as was said"
Batch = tuple[Tensor, Tensor]


class Fragile(nn.Module):
    """A network whose forward pass can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.fails = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError(TEXT)
        found: Tensor = self.layers(inputs)
        return found


class Loss:
    """A cross-entropy that fails at one of its calls, from 0, or gives nan from then on."""

    def __init__(self, at: int | None = None, *, nan: bool = False) -> None:
        self.calls, self.at, self.nan = 0, at, nan

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.at is not None and self.calls > self.at:
            if not self.nan:
                raise RuntimeError(TEXT)
            return cross_entropy(logits, targets) * torch.nan
        return cross_entropy(logits, targets)


def drawn(rank: int, num: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(num, 5, 4, generator=generator, dtype=torch.float64)
    return [(one, torch.arange(5) % 3) for one in inputs]


def step_safely(model: nn.Module, loss: Any, batch: Any) -> object:
    safe = SafeStep(torch.optim.SGD(model.parameters(), lr=0.1), model, loss)
    (inputs, targets), *_ = drawn(dist.get_rank())
    cross_entropy(model.module.layers(inputs), targets).backward()  # type: ignore[operator, union-attr]
    safe.step(batch)
    return safe.report.measured


def adjust(model: nn.Module, loss: Any, batch: Any) -> object:
    adjusted = DriftAdjusted(torch.optim.SGD(model.parameters(), lr=0.1), model, loss)
    adjusted.step(batch)
    return adjusted.lr


def follow(model: nn.Module, loss: Any, batch: Any) -> object:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    measure = {
        "loss": "loss",
        "t": "t",
        "own": lambda model, loss, _: loss(torch.zeros(1, 3), torch.tensor([0])),
    }
    with probes.track(model, loss, batch, optimizer, measure=measure, every=1, most_share=0.9) as tracking:
        for _ in range(2):
            optimizer.step()
    return len(tracking.rows)


def step_matrices(model: nn.Module, loss: Loss, batch: Any, *, kind: type, sharded: bool) -> object:
    """One step of a matrix optimizer; what fails is this rank's gradient (nan), or its learning rate."""
    layers: Any = copy.deepcopy(model.module.layers)  # type: ignore[union-attr]
    if sharded:
        fully_shard(layers)
    weights = [layers[0].weight, layers[2].weight]
    options = {} if sharded else {"shared_over": dist.group.WORLD}
    optimizer = kind([{"params": weights, "param_names": ["first", "second"]}], lr=0.1, **options)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    before = [local(weight).detach().clone() for weight in weights]
    if loss.at is not None and loss.nan:
        local(weights[0].grad).fill_(torch.nan)
    elif loss.at is not None:
        optimizer.param_groups[0]["lr"] = torch.nan
    try:
        optimizer.step()
        return "moved"
    except Exception as error:
        if not all(map(torch.equal, before, [local(weight).detach() for weight in weights])):
            raise AssertionError("weights have moved, and then the step was refused") from error
        raise


PROBES: dict[str, Callable[[nn.Module, Any, Any], object]] = {
    "curvature": lambda *given: probes.curvature(*given, directions=4).loss,
    "landscape": lambda *given: probes.landscape(*given, num=3).loss,
    "NormalizedSmoothness": lambda model, loss, batch: NormalizedSmoothness(model, loss).step(batch).loss,
    "track": follow,
    "hessian": lambda *given: float((h := probes.hessian(*given)).gradient @ (h @ h.gradient)),
    "along_scale": lambda *given: probes.along_scale(*given, [0.5, 2.0], directions=4)[1].loss,
    "along_temperature": lambda *given: probes.along_temperature(*given, [0.5, 2.0], directions=4)[1].loss,
    "density": lambda *given: probes.density(*given, probes=2, steps=4).largest,
    "eigenvalues": lambda *given: float(probes.eigenvalues(*given, k=1).values[0]),
    "outliers": lambda *given: len(probes.outliers(*given).values),
    "sharpness": lambda *given: probes.sharpness(*given).value,
    "trace": lambda *given: probes.trace(*given).value,
    "radius": lambda *given: probes.radius(*given, sharpness=True).value,
    "profile": lambda *given: probes.profile(*given, lengths=[0.1, 1.0]).lowest,
    "noise": lambda *given: probes.noise(*given, microbatch=2).whole.noise,
    "SafeStep": step_safely,
    "DriftAdjusted": adjust,
}

OPTIMIZERS: dict[str, Callable[[nn.Module, Any, Any], object]] = {
    "Muon of replicas": functools.partial(step_matrices, kind=Muon, sharded=False),
    "Muon of shards": functools.partial(step_matrices, kind=Muon, sharded=True),
    "SpectralSphere of shards": functools.partial(step_matrices, kind=SpectralSphere, sharded=True),
}

FAILURES = ("loss", "batch", "later loss", "memory", "nan", "fewer batches", "last loss", "later nan")

TRIES = [
    (probe, failure, bad)
    for bad in (1, 0)
    for some, failures in ((OPTIMIZERS, ("loss", "nan")), (PROBES, FAILURES))
    for failure, probe in itertools.product(failures, some)
]
"""What is measured, what fails, and the rank that it fails on."""

MAY_END_WELL = ("nan", "later nan", "fewer batches", "later loss", "last loss")
"""A probe may have nothing more to ask by then, or nan among its results: then it ends well on both."""


def attempt(model: nn.Module, probe: str, failure: str, bad: bool) -> dict[str, Any]:
    """What came of one try on this rank: a value, or an error."""
    several = failure in ("fewer batches", "later loss", "last loss", "later nan")
    batch: Any = drawn(dist.get_rank(), 2) if several else drawn(dist.get_rank())[0]
    loss = Loss()
    if bad:
        kinds = {"loss": (0, False), "later loss": (3, False), "last loss": (40, False), "nan": (0, True)}
        at, nan = {**kinds, "later nan": (5, True)}.get(failure, (None, False))
        loss = Loss(at, nan=nan)
        batch = {"batch": TEXT, "fewer batches": batch[:1]}.get(failure, batch)
        model.module.fails = failure == "memory"  # type: ignore[union-attr]
    try:
        return {"value": repr({**PROBES, **OPTIMIZERS}[probe](model, loss, batch))}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        model.module.fails = False  # type: ignore[union-attr]
        model.zero_grad()


def judged(probe: str, failure: str, bad: int, ranks: list[dict[str, Any]]) -> str | None:
    """What is wrong with what both ranks say, if anything."""
    said = f"{probe}, {failure} on rank {bad}"
    errors = [one.get("error") for one in ranks]
    if errors == [None, None]:
        if failure not in MAY_END_WELL:
            return f"{said}: nothing was raised"
        return None if ranks[0] == ranks[1] else f"{said}: {ranks[0]['value']} and {ranks[1]['value']}"
    if None in errors:
        return f"{said}: only rank {1 - errors.index(None)} has left with an error, {errors}"
    here, there = str(errors[bad]), str(errors[1 - bad])
    if here == there:  # an average that both refuse
        return None
    if probe in OPTIMIZERS:
        good = "no step was made" in here and "another process" not in here and "another process" in there
        return None if good else f"{said}: rank {bad} says {here!r} and the other {there!r}"
    if here.startswith("OtherRank") or f"Error: rank {bad} failed" not in there or here[:60] not in there:
        return f"{said}: rank {bad} says {here[:200]!r} and the other {there[:200]!r}"
    return None


def main(folder: Path, rank: int, count: int) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    torch.manual_seed(0)
    model = DistributedDataParallel(Fragile())
    for number, (probe, failure, bad) in enumerate(itertools.islice(itertools.cycle(TRIES), count)):
        found = attempt(model, probe, failure, rank == bad)
        # Are both at the same exchange, and is the group of any use?
        check = torch.tensor([float(number)])
        dist.all_reduce(check)
        yield {**found, "in step": float(check) == 2 * number}


if __name__ == "__main__":
    place, own_rank = Path(sys.argv[1]), int(sys.argv[2])
    with (place / f"rank {own_rank}").open("w", encoding="utf-8") as lines:
        for line in main(place, own_rank, int(sys.argv[3])):
            lines.write(json.dumps(line) + "\n")
            lines.flush()
    import os

    os._exit(0)  # torch's own teardown after DDP now and then aborts
