"""What the noise of gradients costs, beside the gradients it is measured on.

    python benchmarks/noise.py        one thread, and two processes of one thread each; about four minutes

`probe`: `th.probes.noise` on 32 microbatches, against `loss.backward()` for each of the same microbatches.
`meter`: a training loop with AdamW and two accumulated microbatches, with a `NoiseMeter` and without.
`replicas`: the same in two processes with DistributedDataParallel (gloo) and no accumulation.

Contenders take turns, in a process for each network, and ratios of medians are printed. The target is 1.2 at
most, for the probe and for the meter in one process. The meter in the coordinates of AdamW is printed beside
it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import theodolite as th
from theodolite.core.batches import Batch
from theodolite.core.calling import Loss

ROUNDS, MICROBATCHES, STEPS = 7, 32, 8
TARGET = 1.2


@dataclass(frozen=True)
class Task:
    """A network and its microbatches."""

    model: nn.Module
    loss: Loss
    microbatches: list[Batch]


def gpt() -> Task:
    """0.85 million parameters, four sequences of 128 tokens."""
    workload = th.workload("gpt-sotu")
    batches = [workload.batch(0, step) for step in range(MICROBATCHES)]
    return Task(workload.build(128, 4), workload.loss, [(x[:4], y[:4]) for x, y in batches])


def mlp(rows: int) -> Task:
    """3.2 million parameters, and rows of 32 numbers: little work for each parameter."""
    model = th.models.ResidualMLP(512, 6, inputs=32, outputs=10)
    batches: list[Batch] = [(torch.randn(rows, 32), torch.randint(10, (rows,))) for _ in range(MICROBATCHES)]
    return Task(model, F.cross_entropy, batches)


def resnet() -> Task:
    """Convolutions: 8 images of 32 × 32."""
    model = th.models.ResNet(16, 3).eval()
    batches: list[Batch] = [(torch.randn(8, 3, 32, 32), torch.randint(10, (8,))) for _ in range(MICROBATCHES)]
    return Task(model, F.cross_entropy, batches)


TASKS: dict[str, Callable[[], Task]] = {
    "GPT 128 × 4": gpt,
    "MLP 512 × 6": lambda: mlp(128),
    "ResNet 16 × 3": resnet,
    "MLP, 32 rows": lambda: mlp(32),
}
HARD = "MLP, 32 rows"
"""Without a target: its gradients take hardly more work than reading them does."""


def gradients(task: Task) -> None:
    """The accumulated gradient, and nothing else."""
    for inputs, targets in task.microbatches:
        (task.loss(task.model(inputs), targets) / MICROBATCHES).backward()
    task.model.zero_grad()


def probe(task: Task) -> None:
    """The same gradients, and their noise."""
    size = len(task.microbatches[0][1])
    th.probes.noise(task.model, task.loss, task.microbatches, microbatch=size)


@dataclass
class Loop:
    """A plain training loop."""

    task: Task
    accumulated: int
    meter: th.probes.NoiseMeter | None = None

    def __post_init__(self) -> None:
        # Steps that hardly move the network, so that all loops do the same work.
        self.optimizer = torch.optim.AdamW(self.task.model.parameters(), lr=1e-8)

    def run(self) -> None:
        """Some steps."""
        at = 0
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            for _ in range(self.accumulated):
                inputs, targets = self.task.microbatches[at % MICROBATCHES]
                at += 1
                (self.task.loss(self.task.model(inputs), targets) / self.accumulated).backward()
            if self.meter is not None:
                self.meter.step()
            self.optimizer.step()


def loops(
    make: Callable[[], Task], accumulated: int, wrap: Callable[[nn.Module], nn.Module]
) -> dict[str, float]:
    """Median seconds of a loop without a meter, with one, and with one in AdamW's coordinates."""

    def loop(kind: str) -> Loop:
        torch.manual_seed(0)
        task = make()
        made = Loop(Task(wrap(task.model), task.loss, task.microbatches), accumulated)
        made.run()  # AdamW makes its state
        if kind != "loop":
            examples = len(task.microbatches[0][1])
            optimizer = made.optimizer if kind == "AdamW" else None
            made.meter = th.probes.NoiseMeter(made.task.model, examples=examples, optimizer=optimizer)
        return made

    return timed({kind: loop(kind).run for kind in ("loop", "meter", "AdamW")}, time.perf_counter)


def timed(contenders: dict[str, Callable[[], None]], clock: Callable[[], float]) -> dict[str, float]:
    """Medians of seconds; contenders take turns, and the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS + 1):
        for name, act in contenders.items():
            start = clock()
            act()
            seconds[name].append(clock() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def replicas(rank: int, folder: str) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for name, make in TASKS.items():
        found = loops(make, 1, DistributedDataParallel)
        if rank == 0:
            show("replicas", name, found)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def show(what: str, name: str, found: dict[str, float]) -> list[float]:
    """Print the ratios to the first contender."""
    (first, base), *others = found.items()
    ratios = [seconds / base for _, seconds in others]
    said = ", ".join(f"{kind} {ratio:.2f}" for (kind, _), ratio in zip(others, ratios, strict=True))
    print(f"{what:9} {name:14} {first} {base:.2f} s, times that: {said}", flush=True)
    return ratios


def probed(name: str) -> float:
    """The ratio of the probe, in a process of its own: nothing else has shaped its memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = TASKS[name]()
    contenders = {"gradients": lambda: gradients(task), "probe": lambda: probe(task)}
    return show("probe", name, timed(contenders, time.process_time))[0]


def metered(name: str) -> float:
    """The ratio of the meter, in a process of its own."""
    torch.set_num_threads(1)
    return show("meter", name, loops(TASKS[name], 2, lambda model: model))[0]


def main() -> None:
    missed = []
    for measure in (probed, metered):
        for name in TASKS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                ratio = pool.apply(measure, (name,))
            if ratio > TARGET and name != HARD:
                missed.append(f"{measure.__name__}, {name}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(replicas, (folder,), nprocs=2)  # type: ignore[attr-defined]
    sys.exit(f"missed: {'; '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
