"""A tiny residual network, and worlds in which the loss of every run is known and nothing is trained."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.fleet import training
from theodolite.fleet.run import Outcome, Run
from theodolite.forecasting import law
from theodolite.launching import LaunchSheet, preparation

INPUTS, CLASSES, BATCH = 4, 2, 8
STEPS = 8
"""Of the shortest small run in these tests."""
scale = import_module("theodolite.launching.scale")  # the function of this name hides it


class Net(nn.Module):
    """Without biases or norms, so that its parameters and FLOP are a line of arithmetic."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x.relu())
        found: Tensor = self.head(x)
        return found


def flop_per_token(width: int, depth: int) -> int:
    """6 for each weight that is multiplied; 4 in the first layer, whose inputs need no gradient."""
    return 4 * INPUTS * width + 6 * (depth * width**2 + CLASSES * width)


def parameters(width: int, depth: int) -> int:
    return INPUTS * width + depth * width**2 + CLASSES * width


def draw(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    inputs = torch.randn(BATCH, INPUTS, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


TINY = th.Workload("tiny", Net, draw, nn.functional.cross_entropy, th.Size(8, 1))
BASE = th.Size(8, 1)
TARGET = th.Size(32, 4, tokens=4000 * BATCH)


@dataclass(frozen=True)
class World:
    """The loss of every run: a law in parameters and tokens, times what a wrong learning rate costs.

    The best base learning rate at 8 × 1 with a batch of 8 and `at` tokens is `2^best`. It goes as
    batch^`batch` and tokens^−`tokens`, and moves by `moves` octaves with every doubling of the width. Seeds
    move it by `noise` octaves.
    """

    best: float = -6.0
    tokens: float = 0.3
    batch: float = 0.5
    moves: float = 0.0
    noise: float = 0.02
    at: int = 64
    diverges: bool = False

    def loss(self, run: Run) -> float:
        size = run.size
        assert size.tokens is not None
        assert size.batch is not None
        law = 1.5 + 20 * parameters(size.width, size.depth) ** -0.4 + 30 * size.tokens**-0.5
        more_tokens, more_batch = math.log2(size.tokens / self.at), math.log2(size.batch / BATCH)
        chance = random.Random(f"{run.seed} {size}")
        best = self.best - self.tokens * more_tokens + self.batch * more_batch
        best += self.moves * math.log2(size.width / BASE.width) + self.noise * chance.gauss(0, 1)
        assert run.base is not None
        rate = math.log2(run.lr) + planned(run.horizon, run.base, size)
        return law * (1 + 0.02 * (rate - best) ** 2) * (1 + 1e-4 * chance.gauss(0, 1))

    def train(self, run: Run, workload: th.Workload, **_: object) -> Outcome:
        size, loss = run.size, self.loss(run)
        readings = {"parameters": parameters(size.width, size.depth), "tokens": size.tokens}
        if self.diverges:
            return Outcome(run, "diverged", 3, None, readings=readings)
        return Outcome(run, "finished", run.steps, loss, readings=readings)


def planned(rule: str, base: th.Size, size: th.Size) -> float:
    """Octaves that a rule adds to the learning rate of AdamW, by the rule's definition."""
    tokens, batch = (math.log2(getattr(size, one) / getattr(base, one)) for one in ("tokens", "batch"))
    if rule.startswith("sde"):
        return (batch - tokens) / 2
    powers = re.match(r"power\(([^,]+), ([^)]+)\)", rule)
    return float(powers[2]) * batch - float(powers[1]) * tokens if powers else 0.0


def in_world(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, to: th.Size = TARGET, **given: object
) -> LaunchSheet:
    """What `th.scale` finds in a world."""
    hurried(monkeypatch)
    monkeypatch.setattr(training, "train", world.train)
    return th.scale(TINY, to, **{"base": BASE, "budget": 0.2, "engine": "serial", "out": folder, **given})


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs, a survey of a few sections, and few draws of the bootstrap."""
    found, told = scale.survey, scale.forecast
    monkeypatch.setattr(preparation, "LEAST_STEPS", STEPS)
    monkeypatch.setattr(scale, "survey", lambda *args, **rest: found(*args, only=["growth"], **rest))
    monkeypatch.setattr(law, "DRAWS_OF_ORIGIN", 20)
    monkeypatch.setattr(scale, "forecast", lambda *args, **rest: told(*args, draws=20, **rest))
