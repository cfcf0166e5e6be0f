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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.controllers.safe_step import SafeStep
from theodolite.core.batches import Batch
from theodolite.core.building import untouched_randomness
from theodolite.core.calling import call, logits
from theodolite.probes import Profile, profile
from theodolite.probes.steps.direction import Direction
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Study
from theodolite_studies.ghosts.claims import claims, notes
from theodolite_studies.ghosts.figures import figures
from theodolite_studies.ghosts.setting import SETTINGS, Setting, adam, muon, sgd

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


def cells(small: bool) -> list[Cell]:
    """Part by network and seed; of the small study two networks and two seeds."""
    networks = ("mlp", "mlp-norm") if small else tuple(SETTINGS)
    seeds = {"collapse": 5, "temperature": 5, "spike": 3}
    return [
        {"part": part, "network": network, "seed": seed}
        for part, num in seeds.items()
        for network in networks
        for seed in range(2 if small else num)
    ]


def run(cell: Cell) -> Iterator[Record]:
    """The records of a cell."""
    torch.set_num_threads(1)
    setting, seed = SETTINGS[cell["network"]], int(cell["seed"])
    yield from {"collapse": _collapse, "temperature": _temperature, "spike": _spike}[cell["part"]](
        setting, seed
    )


def _collapse(setting: Setting, seed: int) -> Iterator[Record]:
    model = setting.model(seed)
    optimizer = adam(model, setting.lr)
    for stage, steps in (("start", range(3)), ("trained", range(3, TRAINED))):
        _train(model, optimizer, setting, seed, steps)
        batch = setting.batch(seed, TRAINED)
        _gradients(model, setting, batch)
        for name in DIRECTIONS:
            direction: Direction = {
                "gradient": None,
                "random": _downhill(model, seed),
                "adam": optimizer,
                "muon": muon(model),
            }[name]
            found = profile(model, setting.loss, batch, direction, lengths=MULTIPLES.tolist())
            yield {"stage": stage, "direction": name, **_read(found, setting)}


def _temperature(setting: Setting, seed: int) -> Iterator[Record]:
    model = setting.model(seed)
    _train(model, adam(model, setting.lr), setting, seed, range(TRAINED))
    batch = setting.batch(seed, TRAINED)
    for temperature in TEMPERATURES:
        found = profile(model, setting.loss, batch, lengths=MULTIPLES.tolist(), temperature=temperature)
        yield {"temperature": temperature, **_read(found, setting)}


def _spike(setting: Setting, seed: int) -> Iterator[Record]:
    for optimizer in ("adam", "sgd"):
        for method in METHODS:
            for factor in FACTORS:
                yield {
                    "optimizer": optimizer,
                    "method": method,
                    "factor": factor,
                    **spiked(setting, seed, optimizer, method, factor),
                }


def spiked(setting: Setting, seed: int, optimizer: str, method: str, factor: float) -> dict[str, Any]:
    """One run with a spike: the loss before it and at the end, and what the controller did."""
    model = setting.model(seed)
    inside = {"adam": adam, "sgd": sgd}[optimizer](model, setting.lr)
    safe = SafeStep(inside, model, setting.loss) if method == "safe" else None
    usual = inside.param_groups[0]["lr"]
    losses = []
    for step in range(BEFORE + SPIKE + AFTER):
        inside.param_groups[0]["lr"] = usual * (factor if BEFORE <= step < BEFORE + SPIKE else 1.0)
        batch = setting.batch(seed, step)
        losses.append(_gradients(model, setting, batch))
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
        "before": _rounded(float(np.mean(losses[BEFORE - 10 : BEFORE]))),
        "end": _rounded(float(np.mean(losses[-10:]))) if ended else None,
        "worst": _rounded(max(losses)) if ended else None,
        "acted": safe.report.share if safe is not None else None,
        "largest": _rounded(safe.report.largest_after) if safe is not None else None,
    }


def _read(found: Profile, setting: Setting) -> dict[str, Any]:
    """Lengths in units of ρ_a; None where nothing happened as far as was looked."""
    unit = found.radius.value
    return {
        "radius": _rounded(unit),
        "loss": _rounded(found.radius.loss),
        "rises": _rounded(found.rises_at / unit),
        "above": _rounded(found.above_at / unit),
        "collapse": _rounded(_crossing(found, math.log(setting.classes)) / unit),
        "quadratic": _rounded(found.radius.quadratic / unit),
        "ghost": _rounded(abs(found.radius.ghost) / unit),
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


def _train(model: nn.Module, optimizer: Optimizer, setting: Setting, seed: int, steps: Sequence[int]) -> None:
    for step in steps:
        _gradients(model, setting, setting.batch(seed, step))
        optimizer.step()


def _gradients(model: nn.Module, setting: Setting, batch: Batch) -> float:
    model.zero_grad()
    loss = setting.loss(logits(call(model, batch[0])), batch[1])
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


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


STUDY = Study("ghosts", cells, run, claims, figures, notes)
