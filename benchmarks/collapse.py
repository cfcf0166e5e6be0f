"""Neural collapse along a network: time in forward passes and memory, against keeping features and D×D sums.

    python benchmarks/collapse.py        one thread; about five minutes on one core, Linux

An MLP of width 512 with 6 blocks and 10 or 100 classes, and a ResNet of width 16 with 9 blocks, on random
examples in batches of 128. A *forward* is one pass over all batches without gradients. `stored` keeps the
features of every place, in float64, from one pass with hooks. `covariances` takes three passes with hooks,
for class means, for S_W as a matrix D×D, and for the nearest class mean. Both compute the two forms of NC1,
CDNV and NC2 from matrices.

Contenders take turns, and medians are compared. Memory is what all batches take at the peak beyond what the
process held after eight of them: what grows with the number of examples, without imports and matrices of
constant size. All contenders have to give the same numbers.
"""

from __future__ import annotations

import math
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.core.batches import Batch

ROUNDS, BATCHES, NUM = 3, 64, 128
TARGET = {"MLP, 10 classes": 6.0, "MLP, 100 classes": 8.0, "ResNet, 10 classes": 8.0}
"""Forward passes that the probe may take, and …"""
MEBIBYTES = 64.0
"""… its memory."""


@dataclass(frozen=True)
class Task:
    """A classifier, the modules whose outputs are features, and its batches."""

    model: nn.Module
    places: list[nn.Module]
    batches: list[Batch]
    classes: int


Numbers = list[tuple[float, float, float, float]]
"""By place: NC1 as a quotient and with the pseudo-inverse, CDNV, NC2."""


def mlp(classes: int) -> Task:
    torch.manual_seed(0)
    model = th.models.ResidualMLP(512, 6, inputs=32, outputs=classes)
    return Task(model, [model.embed, *model.blocks], list(examples(classes, (32,))), classes)


def resnet() -> Task:
    torch.manual_seed(0)
    model = th.models.ResNet(16, 3).eval()  # its convolutions run without oneDNN in the probe
    return Task(model, list(model.blocks), list(examples(10, (3, 16, 16))), 10)


def examples(classes: int, shape: tuple[int, ...]) -> Iterator[Batch]:
    for _ in range(BATCHES):
        yield torch.randn(NUM, *shape), torch.randint(classes, (NUM,))


TASKS: dict[str, Callable[[], Task]] = {
    "MLP, 10 classes": lambda: mlp(10),
    "MLP, 100 classes": lambda: mlp(100),
    "ResNet, 10 classes": resnet,
}


@torch.no_grad()
def forward(task: Task) -> Numbers:
    for inputs, _ in task.batches:
        task.model(inputs)
    return []


def probe(task: Task) -> Numbers:
    found = th.probes.collapse(task.model, F.cross_entropy, task.batches)
    geometry = [place.geometry for place in found.places if place.block is not None][-len(task.places) :]
    return [(one.quotient, one.pinv, one.cdnv, one.nc2) for one in geometry]


def stored(task: Task) -> Numbers:
    kept: list[list[Tensor]] = [[] for _ in task.places]
    for rows, _ in passes(task):
        for some, one in zip(kept, rows, strict=True):
            some.append(one)
    labels = torch.cat([targets for _, targets in task.batches])
    numbers = []
    for some in kept:
        rows = torch.cat(some)
        means = torch.stack([rows[labels == one].mean(0) for one in range(task.classes)])
        away = rows - means[labels]
        spread = torch.stack([away[labels == one].square().sum(1).mean() for one in range(task.classes)])
        numbers.append(from_matrices(means, away.T @ away / len(rows), spread))
        torch.cdist(rows, means).argmin(1)
    return numbers


def covariances(task: Task) -> Numbers:
    labels = torch.cat([targets for _, targets in task.batches])
    counts = labels.bincount(minlength=task.classes)[:, None]
    sums: list[Tensor] = []
    for rows, targets in passes(task):
        sums = sums or [torch.zeros(task.classes, one.shape[1], dtype=torch.float64) for one in rows]
        for some, one in zip(sums, rows, strict=True):
            some.index_add_(0, targets, one)
    means = [some / counts for some in sums]
    within = [torch.zeros(some.shape[1], some.shape[1], dtype=torch.float64) for some in means]
    spread = [torch.zeros(task.classes, dtype=torch.float64) for _ in means]
    for rows, targets in passes(task):
        for at, one in enumerate(rows):
            away = one - means[at][targets]
            within[at] += away.T @ away
            spread[at].index_add_(0, targets, away.square().sum(1))
    for rows, _ in passes(task):
        for at, one in enumerate(rows):
            torch.cdist(one, means[at]).argmin(1)
    found = zip(means, within, spread, strict=True)
    return [from_matrices(some, one / len(labels), each / counts[:, 0]) for some, one, each in found]


@torch.no_grad()
def passes(task: Task) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Features of each batch, as rows in float64, and its targets."""
    rows: list[Tensor] = []

    def keep(module: nn.Module, given: object, output: Tensor) -> None:
        rows.append(output.flatten(2).mean(2).double() if output.ndim > 2 else output.double())

    handles = [module.register_forward_hook(keep) for module in task.places]
    for inputs, targets in task.batches:
        rows.clear()
        task.model(inputs)
        yield [*rows], targets
    for handle in handles:
        handle.remove()


def from_matrices(means: Tensor, within: Tensor, spread: Tensor) -> tuple[float, float, float, float]:
    classes = len(means)
    centred = means - means.mean(0)
    between, gram = centred.T @ centred / classes, centred @ centred.T
    distances = torch.cdist(means, means).square()
    others = ~torch.eye(classes, dtype=torch.bool)
    simplex = (torch.eye(classes, dtype=torch.float64) - 1 / classes) / math.sqrt(classes - 1)
    return (
        float(within.trace() / between.trace()),
        float((within @ torch.linalg.pinv(between, rtol=1e-8, hermitian=True)).trace() / classes),
        float(((spread[:, None] + spread)[others] / (2 * distances[others])).mean()),
        float(torch.linalg.norm(gram / torch.linalg.norm(gram) - simplex)),
    )


CONTENDERS = {"forward": forward, "probe": probe, "stored": stored, "covariances": covariances}


def held() -> dict[str, float]:
    """What the process holds, and its peak, in MiB."""
    lines = Path("/proc/self/status").read_text()
    return {name: int(kilo) / 1024 for name, kilo in re.findall(r"^(VmRSS|VmHWM):\s+(\d+)", lines, re.M)}


def extra(name: str, contender: str) -> float:
    """The peak above what was held after eight batches, in MiB. Runs in a process of its own."""
    torch.set_num_threads(1)
    task = TASKS[name]()
    CONTENDERS[contender](replace(task, batches=task.batches[:8]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = held()["VmRSS"]
    CONTENDERS[contender](task)
    return held()["VmHWM"] - before


def main() -> None:
    torch.set_num_threads(1)
    failed = []
    for name, make in TASKS.items():
        task = make()
        seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        numbers: dict[str, Numbers] = {}
        for _ in range(ROUNDS + 1):  # the first is not counted
            for contender, work in CONTENDERS.items():
                start = time.process_time()
                numbers[contender] = work(task)
                seconds[contender].append(time.process_time() - start)
        medians = {contender: statistics.median(each[1:]) for contender, each in seconds.items()}
        apart = max(
            abs(mine - other) / abs(other)
            for contender in ("stored", "covariances")
            for ours, theirs in zip(numbers["probe"], numbers[contender], strict=True)
            for mine, other in zip(ours, theirs, strict=True)
        )
        print(f"{name}, {len(task.places)} places, {BATCHES * NUM} examples; a forward takes "
              f"{medians['forward']:.2f} s; numbers differ by {apart:.0e}")  # fmt: skip
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            memory = dict(
                zip(CONTENDERS, pool.starmap(extra, [(name, one) for one in CONTENDERS], 1), strict=True)
            )
        for contender in CONTENDERS:
            forwards = medians[contender] / medians["forward"]
            print(f"    {contender:12} {forwards:5.1f} forwards  {memory[contender]:5.0f} MiB", flush=True)
        ours = medians["probe"] / medians["forward"]
        if ours > TARGET[name] or memory["probe"] > MEBIBYTES or apart > 1e-4:
            failed.append(name)
    raise SystemExit(f"missed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
