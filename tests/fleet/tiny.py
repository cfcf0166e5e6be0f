"""Networks that train in no time, on batches that never repeat, and what can go wrong with them.

Workers look these up by `tiny.py:name`, so the file stands alone.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.fleet.run import Run

FILE = Path(__file__)


def build(width: int, depth: int) -> nn.Module:
    # Dropout, so that a run that goes on with other random numbers is seen.
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(8, width), *hidden, nn.Linear(width, 2))


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def faulty_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Seed 1 is killed at step 3, once; 2 whenever it comes there; 3 is nan at 5; 4 raises; 5 and 6 exit."""
    inputs, targets = batch(seed, step)
    if step == 3 and seed in (1, 2):
        note = Path(os.environ["TINY_FOLDER"], f"killed {seed}")
        if seed == 2 or not note.exists():
            with note.open("a") as file:
                file.write(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGKILL)
    if step == 5 and seed == 3:
        targets = torch.full_like(targets, -100)  # the mean over no target
    if step == 3 and seed == 4:
        raise ArithmeticError("the fourth seed is bad")
    if step == 3 and seed == 5:
        raise SystemExit("enough")
    if step == 3 and seed == 6:
        with Path(os.environ["TINY_FOLDER"], "exited").open("a") as file:
            file.write(f"{os.getpid()}\n")
        os._exit(7)
    return inputs, targets


def noted_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Each worker notes what it draws."""
    if "TINY_FOLDER" in os.environ:
        with Path(os.environ["TINY_FOLDER"], f"worker {os.getpid()}").open("a") as file:
            file.write(f"{seed} {step}\n")
    return batch(seed, step)


def slow_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """As above, and takes its time."""
    if "TINY_FOLDER" in os.environ:
        time.sleep(0.02)
    return noted_batch(seed, step)


GATE = 20


def gated_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """As `noted_batch`. At the gate it waits, unless the file `open` lists its seed."""
    drawn = noted_batch(seed, step)
    if "TINY_FOLDER" in os.environ:
        folder = Path(os.environ["TINY_FOLDER"])
        while step == GATE and str(seed) not in (folder / "open").read_text().split():
            time.sleep(0.01)
    return drawn


def _workload(name: str, batch: object) -> th.Workload:
    return th.Workload(
        name,
        build,
        batch,
        nn.functional.cross_entropy,
        size=th.Size(16, 2),
        held_out=held_out,
        metrics={"largest weight": largest_weight, "steps to learn": TO_LEARN},
    )


def largest_weight(model: nn.Module) -> float:
    return max(weight.abs().max().item() for weight in model.parameters())


TO_LEARN = th.workloads.StepsTo("held-out loss", at_most=0.6, every=4)


def held_out(seed: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(2**31 - 1, step)


plain = _workload("plain", batch)
faulty = _workload("faulty", faulty_batch)
slow = _workload("slow", slow_batch)
noted = _workload("noted", noted_batch)
gated = _workload("gated", gated_batch)


def authored_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two, with a state each; the rates of the first one's groups differ."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    first = [{"params": matrices[:-1], "lr": 0.02}, {"params": matrices[-1:], "weight_decay": 0.5}]
    return [torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)]


authored = dataclasses.replace(plain, name="authored", optimizer=authored_optimizers)


def run(name: str = "plain", seed: int = 0, *, steps: int = 8, width: int = 16, **fields: object) -> Run:
    """A run of a workload in this file."""
    given = {"parameterization": "standard", "lr": 0.01, "held_out": 2, **fields}
    return Run(f"{FILE}:{name}", th.Size(width, 2), seed=seed, steps=steps, **given)


def own_run(seed: int = 0, **fields: object) -> Run:
    """A run with the optimizers of its workload."""
    return run("authored", seed, **{"parameterization": "own", "optimizer": "own", **fields})


class Shelf:
    """A ledger that forgets."""

    def __init__(self) -> None:
        self.outcomes: list = []

    def sources(self) -> dict[str, set[str]]:
        return {}

    def settled(self) -> set[str]:
        return {outcome.run.identity for outcome in self.outcomes if outcome.settled}

    def append(self, outcome: object) -> None:
        self.outcomes.append(outcome)


def numbers(outcome) -> tuple:
    """What has to be the same, bit for bit, however a run was made."""
    return outcome.status, outcome.step, outcome.held_out, dict(outcome.metrics), dict(outcome.readings)
