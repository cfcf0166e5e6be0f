"""Ghosts of softmax: does training collapse where a step leaves the radius of convergence of the loss?

Three parts. `collapse`: one step of growing length from the same weights, along the gradient, a random
direction, Adam's update and Muon's. `temperature`: the same along the gradient with logits over T. `spike`:
training in which the learning rate is 10 to 10⁴ times too large for five steps, with the controller, with
gradients clipped, and with nothing.

References:
    Ghosts of softmax: complex singularities that limit safe step sizes in cross-entropy, 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite import data
from theodolite.controllers.safe_step import SafeStep
from theodolite.core.batches import Batch
from theodolite.core.building import untouched_randomness
from theodolite.core.calling import call, logits
from theodolite.models import GPT
from theodolite.optimizers import Muon
from theodolite.probes import Profile, profile
from theodolite.probes.steps.direction import Direction
from theodolite.workloads import next_token_loss
from theodolite_studies.framework.records import Record, short
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.ghosts.report import CLAIMS, figures, notes

MULTIPLES = np.geomspace(0.05, 200, 49)
"""Of ρ_a, where the loss along a step is looked at."""
DIRECTIONS = ("gradient", "random", "adam", "muon")
TEMPERATURES = tuple(10.0 ** (power / 2) for power in range(-4, 5))
FACTORS = (1.0, 10.0, 100.0, 1e3, 1e4)
METHODS = ("nothing", "clip", "safe")
TRAINED = 100
"""Steps before the step that is looked at."""
BEFORE, SPIKE, AFTER = 50, 5, 45
"""Steps of a run with a spike."""


PIXELS = 8
LENGTH = 32


@dataclass(frozen=True)
class NetworkTask:
    """A network and what it is trained on."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """`batch(seed, step)`."""
    loss: Callable[[Tensor, Tensor], Tensor]
    classes: int
    """ln of it is the loss of one who knows nothing."""
    lr: float
    """Of Adam; of SGD thirty times as much."""

    def model(self, seed: int) -> nn.Module:
        """The network with the weights of a seed."""
        with untouched_randomness(seed):
            return self.build()


def adam(model: nn.Module, lr: float) -> Optimizer:
    """AdamW as everybody has it."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def sgd(model: nn.Module, lr: float) -> Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(model.parameters(), lr=30 * lr)


def muon(model: nn.Module) -> Optimizer:
    """Muon for all that is a matrix; vectors do not move."""
    plain = [tensor for tensor in model.parameters() if tensor.ndim == 2]
    filters = [tensor for tensor in model.parameters() if tensor.ndim == 4]
    groups: list[dict[str, Any]] = [{"params": plain}, {"params": filters, "axes": ((1, 2, 3), (0,))}]
    return Muon([group for group in groups if group["params"]], lr=0.02)


def _mlp(norm: bool) -> nn.Module:
    def hidden(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, 64), *([nn.LayerNorm(64)] if norm else []), nn.ReLU()]

    return nn.Sequential(*hidden(PIXELS**2), *hidden(64), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (PIXELS // 2) ** 2, 10),
    )


def _gpt() -> nn.Module:
    return GPT(32, 2, vocab=256, context=LENGTH)


def _rows(seed: int, step: int) -> Batch:
    return data.draw_examples(data.mixture(dimensions=PIXELS**2), num=64, seed=seed, step=step)


def _images(seed: int, step: int) -> Batch:
    values, labels = _rows(seed, step)
    return values.view(-1, 1, PIXELS, PIXELS), labels


def _text(seed: int, step: int) -> Batch:
    return data.draw_text(data.state_of_the_union(), num=8, length=LENGTH, seed=seed, step=step)


TASKS = {
    "mlp": NetworkTask(lambda: _mlp(False), _rows, nn.functional.cross_entropy, 10, 3e-3),
    "mlp-norm": NetworkTask(lambda: _mlp(True), _rows, nn.functional.cross_entropy, 10, 3e-3),
    "cnn": NetworkTask(_cnn, _images, nn.functional.cross_entropy, 10, 3e-3),
    "gpt": NetworkTask(_gpt, _text, next_token_loss, 256, 3e-3),
}
"""Two hidden layers of 64 without and with norms, and two convolutions, all on a Gaussian mixture of ten
classes in 64 dimensions; a GPT of width 32 and depth 2 on bytes of the State of the Union."""


def cells(setting: Setting) -> list[Cell]:
    """Part by network and seed; of the small study two networks and two seeds."""
    networks = ("mlp", "mlp-norm") if setting.small else tuple(TASKS)
    seeds = {"collapse": 5, "temperature": 5, "spike": 3}
    return [
        {"part": part, "network": network, "seed": seed}
        for part, num in seeds.items()
        for network in networks
        for seed in range(2 if setting.small else num)
    ]


def run(cell: Cell, *_: object) -> Iterator[Record]:
    """The records of a cell."""
    torch.set_num_threads(1)
    task, seed = TASKS[cell["network"]], int(cell["seed"])
    yield from {"collapse": _collapse, "temperature": _temperature, "spike": _spike}[cell["part"]](task, seed)


def _collapse(task: NetworkTask, seed: int) -> Iterator[Record]:
    model = task.model(seed)
    optimizer = adam(model, task.lr)
    for stage, steps in (("start", range(3)), ("trained", range(3, TRAINED))):
        _train(model, optimizer, task, seed, steps)
        batch = task.batch(seed, TRAINED)
        _gradients(model, task, batch)
        for name in DIRECTIONS:
            direction: Direction = {
                "gradient": None,
                "random": _downhill(model, seed),
                "adam": optimizer,
                "muon": muon(model),
            }[name]
            found = profile(model, task.loss, batch, direction, lengths=MULTIPLES.tolist())
            yield {"stage": stage, "direction": name, **_read(found, task)}


def _temperature(task: NetworkTask, seed: int) -> Iterator[Record]:
    model = task.model(seed)
    _train(model, adam(model, task.lr), task, seed, range(TRAINED))
    batch = task.batch(seed, TRAINED)
    for temperature in TEMPERATURES:
        found = profile(model, task.loss, batch, lengths=MULTIPLES.tolist(), temperature=temperature)
        yield {"temperature": temperature, **_read(found, task)}


def _spike(task: NetworkTask, seed: int) -> Iterator[Record]:
    for optimizer in ("adam", "sgd"):
        for method in METHODS:
            for factor in FACTORS:
                yield {
                    "optimizer": optimizer,
                    "method": method,
                    "factor": factor,
                    **spiked(task, seed, optimizer, method, factor),
                }


def spiked(task: NetworkTask, seed: int, optimizer: str, method: str, factor: float) -> dict[str, Any]:
    """One run with a spike: the loss before it and at the end, and what the controller did."""
    model = task.model(seed)
    inside = {"adam": adam, "sgd": sgd}[optimizer](model, task.lr)
    safe = SafeStep(inside, model, task.loss) if method == "safe" else None
    usual = inside.param_groups[0]["lr"]
    losses = []
    for step in range(BEFORE + SPIKE + AFTER):
        inside.param_groups[0]["lr"] = usual * (factor if BEFORE <= step < BEFORE + SPIKE else 1.0)
        batch = task.batch(seed, step)
        losses.append(_gradients(model, task, batch))
        if not math.isfinite(losses[-1]):
            break
        if method == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if safe is None:
            inside.step()
        else:
            safe.step(batch)
    ended = len(losses) == BEFORE + SPIKE + AFTER and math.isfinite(losses[-1])
    return {
        "before": short(float(np.mean(losses[BEFORE - 10 : BEFORE]))),
        "end": short(float(np.mean(losses[-10:]))) if ended else None,
        "worst": short(max(losses)) if ended else None,
        "acted": safe.report.share if safe is not None else None,
        "largest": short(safe.report.largest_after) if safe is not None else None,
    }


def _read(found: Profile, task: NetworkTask) -> dict[str, Any]:
    """Lengths in units of ρ_a; None where nothing happened as far as was looked."""
    unit = found.radius.value
    return {
        "radius": short(unit),
        "loss": short(found.radius.loss),
        "rises": short(found.rises_at / unit),
        "above": short(found.above_at / unit),
        "collapse": short(_crossing(found, math.log(task.classes)) / unit),
        "quadratic": short(found.radius.quadratic / unit),
        "ghost": short(abs(found.radius.ghost) / unit),
    }


def _crossing(found: Profile, level: float) -> float:
    """Where the loss is first above a level, between two lengths by a straight line in their logarithms."""
    for place in range(2, len(found.lengths)):
        if not found.losses[place] <= level:
            low, high = found.losses[place - 1], found.losses[place]
            share = (level - low) / (high - low) if math.isfinite(high) else 1.0
            near, far = found.lengths[place - 1 : place + 1]
            return float(near * (far / near) ** min(max(share, 0.0), 1.0))
    return math.inf


def _train(
    model: nn.Module, optimizer: Optimizer, task: NetworkTask, seed: int, steps: Sequence[int]
) -> None:
    for step in steps:
        _gradients(model, task, task.batch(seed, step))
        optimizer.step()


def _gradients(model: nn.Module, task: NetworkTask, batch: Batch) -> float:
    model.zero_grad()
    loss = task.loss(logits(call(model, batch[0])), batch[1])
    loss.backward()
    return float(loss.detach())


def _downhill(model: nn.Module, seed: int) -> Mapping[str, Tensor]:
    """A random direction, on the side where the loss falls at first."""
    with untouched_randomness(10_000 + seed):
        step = {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}
    slope = sum(
        float((step[name] * tensor.grad).sum())
        for name, tensor in model.named_parameters()
        if tensor.grad is not None
    )
    return {name: tensor * (-1.0 if slope > 0 else 1.0) for name, tensor in step.items()}


STUDY = Study("ghosts", cells, run, CLAIMS, figures, notes)
