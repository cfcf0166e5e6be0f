"""Is diffGrad better than Adam, and than Adam at half the learning rate?

diffGrad is Adam's step times `ξ = sigmoid(|g_before − g|)`, entry by entry. The paper means ξ to brake where
gradients hardly change. ξ is 1/2 there, and entries of gradients are small everywhere in most networks: then
diffGrad is Adam at half the learning rate. So that is the control, over a grid of learning rates.

References:
    Dubey et al., diffGrad: an optimization method for convolutional neural networks, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite_studies.diffgrad.report import CLAIMS, figures, notes
from theodolite_studies.framework.records import Record, short
from theodolite_studies.framework.study import Cell, Setting, Study

OPTIMIZERS = {"adam": "adamw", "diffgrad": "diffgrad"}
SEEDS = range(3)
STARTS = range(5)
FUNCTION_STEPS, NETWORK_STEPS = 300, 150
RATES = {"function": range(-8, 1), "network": range(-11, -4)}
"""Exponents of two. Adam has one more, below, which is the control of the lowest."""
HELD_OUT = 8
"""Batches."""


def cells(setting: Setting) -> Sequence[Cell]:
    """Each function from each start, each network from each seed; all learning rates."""
    found: list[Cell] = []
    for part, tasks, seeds in (("function", FUNCTIONS, STARTS), ("network", NETWORKS, SEEDS)):
        rates = list(RATES[part])[:: 4 if setting.small else 1]
        for task in tasks:
            for seed in list(seeds)[: 1 if setting.small else None]:
                for optimizer in OPTIMIZERS:
                    lower = [rate - 1 for rate in rates] if optimizer == "adam" else []
                    found += [
                        {"part": part, "task": task, "optimizer": optimizer, "rate": rate, "seed": seed}
                        for rate in sorted({*rates, *lower})
                    ]
    return found


def run(cell: Cell, *_: object) -> Iterator[Record]:
    """One training run: where it ends, and the mean of ξ on the way."""
    torch.manual_seed(cell["seed"])
    part = _of_function if cell["part"] == "function" else _of_network
    yield part(cell)


def first(x: Tensor) -> Tensor:
    """Two parabolas; the lower minimum comes first, at −0.3."""
    return torch.where(x <= 0, (x + 0.3) ** 2, (x - 0.2) ** 2 + 0.05)


def second(x: Tensor) -> Tensor:
    """A steep line into a cubic with waves."""
    return torch.where(x <= -0.9, -40 * x - 35.15, x**3 + x * torch.sin(8 * x) + 0.85)


def third(x: Tensor) -> Tensor:
    """A parabola with a bump to either side of a kink, which is the minimum, at 0."""
    size = x.abs()
    return torch.where(size > 0.5, x**2, torch.where(size > 0.4, 0.75 - size, 7 * size / 8))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"F1": first, "F2": second, "F3": third}
"""Of the kind of the paper's three, which it starts at −1."""


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 8, 8)),
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(32 * 4, 10),
    )


def _blobs(seed: int, step: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
    from theodolite import data

    examples = data.mixture(8192, dimensions=192, separation=5.0, seed=int(held_out))
    rows = torch.randint(8192, (64,), generator=torch.Generator().manual_seed(seed * 10_000 + step))
    return examples.values[rows], examples.labels[rows]


def _text(seed: int, step: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
    from theodolite.workloads import workload

    task = workload("gpt-sotu")
    draw = task.held_out if held_out and task.held_out else task.batch
    tokens, targets = draw(seed, step)
    return tokens[:8, :64], targets[:8, :64]


def _gpt() -> nn.Module:
    from theodolite import models

    return models.GPT(32, 2, vocab=256, context=64, head_dim=16)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, Tensor]]]] = {
    "cnn": (_convolutional, _blobs),
    "gpt": (_gpt, _text),
}


def _made(cell: Cell, params: list[Tensor]) -> Optimizer:
    from theodolite import optimizers

    rule = OPTIMIZERS[cell["optimizer"]]
    group = {"params": params, "lr": 2.0 ** cell["rate"], "weight_decay": 0.0, "eps": 1e-8}
    return optimizers.OPTIMIZERS[rule].maker({})([group])


def _of_function(cell: Cell) -> Record:
    function = FUNCTIONS[cell["task"]]
    x = nn.Parameter(torch.tensor([-1.0 + 0.2 * (torch.rand(()).item() - 0.5)], dtype=torch.float64))
    optimizer = _made(cell, [x])
    factor = _Factor([x])
    for _ in range(FUNCTION_STEPS):
        x.grad = torch.autograd.grad(function(x).sum(), x)[0]
        factor.look()
        optimizer.step()
    everywhere = torch.linspace(-1.5, 1.5, 300_001, dtype=torch.float64)
    gap = function(x.detach()).item() - function(everywhere).min().item()
    return {"loss": short(gap, 6), "end": short(x.item(), 6), "factor": short(factor.mean, 6)}


def _of_network(cell: Cell) -> Record:
    build, batch = NETWORKS[cell["task"]]
    model = build()
    optimizer = _made(cell, list(model.parameters()))
    factor = _Factor(list(model.parameters()))
    for step in range(NETWORK_STEPS):
        loss = _loss(model, batch(cell["seed"], step))
        if not math.isfinite(loss.item()):
            return {"loss": None, "factor": short(factor.mean, 6)}
        optimizer.zero_grad()
        loss.backward()
        factor.look()
        optimizer.step()
    with torch.no_grad():
        judged = [_loss(model, batch(cell["seed"], step, held_out=True)).item() for step in range(HELD_OUT)]
    return {"loss": short(sum(judged) / HELD_OUT, 6), "factor": short(factor.mean, 6)}


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class _Factor:
    """The mean of ξ over entries and steps after the first, whose gradient has none before it."""

    def __init__(self, params: list[Any]) -> None:
        self._params, self._before = params, cast("list[Tensor | None]", [None for _ in params])
        self._sum, self._num = 0.0, 0

    def look(self) -> None:
        """At the gradients there are now."""
        for place, param in enumerate(self._params):
            before, self._before[place] = self._before[place], param.grad.detach().clone()
            if before is not None:
                self._sum += (before - param.grad).abs().sigmoid().sum().item()
                self._num += param.numel()

    @property
    def mean(self) -> float:
        """1/2 if no gradient ever changed."""
        return self._sum / self._num if self._num else math.nan


STUDY = Study("diffgrad", cells, run, CLAIMS, figures, notes)
