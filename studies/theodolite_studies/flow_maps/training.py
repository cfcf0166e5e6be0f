"""Flow maps of three Gaussians: trained, compared with the exact map, and timed."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite import flows
from theodolite.core.batches import Batch, on_device
from theodolite.core.building import build_model
from theodolite.core.size import Size
from theodolite.data.batches import generator
from theodolite.models import FlowMLP
from theodolite.optimizers.schedule import schedule
from theodolite_studies.flow_maps.setting import ARMS, JUMPS, MAPS, FlowMapSetting
from theodolite_studies.framework.records import Record, short

LR, AVERAGED = 3e-3, 0.995
"""Of Adam on the mixture, and the decay of the averages of its weights."""
BATCH = 256
WINDOWS = 40
"""Parts of a training of which the largest gradient norm is kept."""
BOUND_POINTS = 300
"""Noises of which the step bound of inversion is measured, two pairs each and one more."""
UNSEEN = 1_000_000
"""Added to a seed: data that are not trained on."""
ROUNDS = 7
"""Timed steps of each loss, in turn."""


class WeightAverage:
    """The exponential average of a network's weights, over the steps so far alone.

    `a ← d·a + (1 − d)·w` from a = 0, divided by `1 − dⁿ` after n steps.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> average = WeightAverage(net, 0.5)
    >>> for value in (1.0, 4.0):
    ...     _ = nn.init.constant_(net.weight, value)
    ...     average.add()
    >>> average.network().weight.item()  # (1 + 2·4)/3
    3.0
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.net, self.decay, self.steps = net, decay, 0
        self.sums = [torch.zeros_like(tensor) for tensor in net.parameters()]

    @torch.no_grad()
    def add(self) -> None:
        """Take the weights as they are now."""
        self.steps += 1
        torch._foreach_lerp_(self.sums, list(self.net.parameters()), 1 - self.decay)

    @torch.no_grad()
    def network(self) -> nn.Module:
        """A copy of the network with the average as its weights, in eval mode."""
        made = copy.deepcopy(self.net).eval()
        for tensor, total in zip(made.parameters(), self.sums, strict=True):
            tensor.copy_(total / (1 - self.decay**self.steps))
        return made


@dataclass(frozen=True)
class Course:
    """A training that has ended."""

    average: WeightAverage
    losses: Tensor
    gradients: Tensor
    """Norms at every step, before clipping."""
    diverged: bool


def train(
    net: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Callable[[int, int], Batch],
    optimizer: Optimizer,
    *,
    seed: int,
    steps: int,
    warmup: int = 0,
    averaged: float = AVERAGED,
    clip: float = math.inf,
    after: Callable[[int, WeightAverage], None] = lambda steps, average: None,
) -> Course:
    """Train with a cosine schedule to zero. Ends early where the loss is no longer finite.

    Args:
        net: on its device, to which batches are moved.
        loss: of the network on a batch.
        batches: by seed and step.
        optimizer: of the network.
        seed: of the batches.
        steps: how many.
        warmup: steps of linear increase.
        averaged: decay of the average of the weights.
        clip: largest norm of a gradient.
        after: called with the number of steps made and the average.
    """
    device = str(next(net.parameters()).device)
    scheduler = schedule(optimizer, "cosine", steps=steps, warmup=warmup)
    average, losses, gradients = WeightAverage(net, averaged), [], []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(net, on_device(batches(seed, step), device))
        value.backward()
        gradients.append(nn.utils.clip_grad_norm_(net.parameters(), clip))
        losses.append(value.detach())
        if (step + 1) % 100 == 0 and not math.isfinite(value.item()):
            break
        optimizer.step()
        scheduler.step()
        average.add()
        after(step + 1, average)
    found = torch.stack(losses).cpu()
    return Course(average, found, torch.stack(gradients).cpu(), not bool(found.isfinite().all()))


def draw(num: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Points of the mixture."""
    return flows.three_gaussians().sample(num, seed, step)


def map_of_mixture(kind: str, seed: int, setting: FlowMapSetting) -> Iterator[Record]:
    """Train one arm and compare it with the exact map."""
    arm = ARMS[kind]
    net = build_model(partial(FlowMLP, times=2), setting.size, seed=seed)
    course = train(
        net,
        flows.map_loss(arm.loss, stop_gradients=arm.stop_gradients),
        flows.map_batches(partial(draw, BATCH)),
        torch.optim.Adam(net.parameters(), lr=LR),
        seed=seed,
        steps=arm.times * setting.steps,
    )
    parts = course.gradients.tensor_split(min(WINDOWS, len(course.gradients)))
    record: dict[str, Any] = {
        "gradient": short(course.gradients.max().item()),
        "gradients": [short(part.max().item(), 3) for part in parts],
        "diverged": course.diverged,
    }
    if not course.diverged:
        jumps = arm.loss != "matching"
        record |= judged(course.average.network(), seed, setting.points, jumps=jumps)
    yield record


@torch.no_grad()
def judged(net: nn.Module, seed: int, points: int, *, jumps: bool = True) -> Record:
    """How far a map and the samplers of its velocity are from the exact map and from the data.

    Args:
        net: predicts `v_{s,t}(x)`.
        seed: of noise and data.
        points: how many of each.
        jumps: does it jump, or is only its diagonal trained?
    """
    mixture, flow_map = flows.three_gaussians(), flows.FlowMap(net)
    noise = normal("noise", seed, (points, 2))
    exact = mixture.flow_map(noise.double(), 0.0, 1.0)
    data, more = (mixture.sample(points, f"flow maps {name}", seed)[0] for name in ("data", "more"))
    samplers: dict[str, Callable[[Tensor, int], Tensor]] = {
        "euler": lambda start, steps: flows.sample(flow_map.velocity, start, steps=steps),
        "heun": lambda start, steps: flows.sample(flow_map.velocity, start, steps=steps // 2, method="heun"),
    }
    if jumps:
        samplers["map"] = lambda start, steps: flows.sample_map(flow_map, start, steps)
    found: dict[str, Any] = {"gap": short(_gap(flow_map, seed, points))}
    found["data distance"] = short(flows.sliced_wasserstein(more, data))
    for name, sampler in samplers.items():
        evaluations = JUMPS[1:] if name == "heun" else JUMPS
        samples = [sampler(noise, number) for number in evaluations]
        found[name] = [short(flows.map_error(each, exact)) for each in samples]
        found[f"{name} distance"] = [short(flows.sliced_wasserstein(each, data)) for each in samples]
    best = samplers["map" if jumps else "euler"]
    net.double()
    found["bounds"] = bounds(best, seed, JUMPS)
    return found


def bounds(
    sampler: Callable[[Tensor, int], Tensor], seed: int, jumps: Sequence[int]
) -> list[list[float | None]]:
    """By the number of jumps, the least ratio 2⟨dz, df⟩/|df|², its 1 % quantile and its median."""
    noise, found = normal("bounds", seed, (BOUND_POINTS, 2)).double(), []
    for number in jumps:
        bound = flows.step_bound(partial(_fixed, sampler, number), noise, seed=seed)
        levels = dict(bound.quantiles)
        found.append([short(value, 4) for value in (bound.least, levels[0.01], levels[0.5])])
    return found


def _fixed(sampler: Callable[[Tensor, int], Tensor], number: int, noise: Tensor) -> Tensor:
    return sampler(noise, number)


def exact_field(seed: int, points: int) -> Iterator[Record]:
    """Euler's method on the exact velocity, which makes no error of its own.

    One step of it takes every noise to the mean of the data, so that there is no bound.
    """
    mixture = flows.three_gaussians()
    noise = normal("noise", seed, (points, 2)).double()
    exact = mixture.flow_map(noise, 0.0, 1.0)

    def euler(start: Tensor, steps: int) -> Tensor:
        return flows.sample(mixture.field(), start, steps=steps)

    def whole(start: Tensor, steps: int) -> Tensor:
        return mixture.flow_map(start, 0.0, 1.0, atol=1e-8)

    yield {
        "euler": [short(flows.map_error(euler(noise, number), exact)) for number in JUMPS],
        "bounds": [[None] * 3, *bounds(euler, seed, JUMPS[1:])],
        "map bounds": bounds(whole, seed, JUMPS[:1])[0],
    }


def _gap(flow_map: flows.FlowMap, seed: int, points: int) -> float:
    """The diagonal loss above its floor: `E|v_{t,t}(x_t) − b_t(x_t)|²`, a mean over dimensions.

    The loss itself is this and the floor, but for the noise of its targets.
    """
    mixture = flows.three_gaussians()
    batch = flows.map_batches(partial(draw, points), diagonal=1.0, name="flow maps gap")
    (x, times), _ = batch(UNSEEN + seed, 0)
    t = times[:, 0]
    apart = flow_map.velocity(x, t) - mixture.velocity(x, t)
    return apart.square().mean().item()


def costs(width: int, num: int, rounds: int = ROUNDS) -> Iterator[Record]:
    """The time of a training step of each loss, as a multiple of that of matching.

    Steps of all losses alternate, in the processor time of one thread; of each the median counts.
    """
    kinds: Sequence[Any] = ("matching", *MAPS)
    net = build_model(partial(FlowMLP, times=2), Size(width, 3), seed=0)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)
    batch = flows.map_batches(partial(draw, num))(0, 0)
    losses = {kind: flows.map_loss(kind) for kind in kinds}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(1 + rounds):  # the first one warms up
        for kind, loss in losses.items():
            start = time.process_time()
            optimizer.zero_grad()
            loss(net, batch).backward()
            optimizer.step()
            taken[kind].append(time.process_time() - start)
    medians = {kind: statistics.median(times[1:]) for kind, times in taken.items()}
    yield {
        "milliseconds": short(1e3 * medians["matching"], 3),
        "costs": {kind: short(medians[kind] / medians["matching"], 4) for kind in MAPS},
    }


def normal(name: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers, by the name and the seed alone."""
    return torch.from_numpy(generator("flow maps", name, seed).standard_normal(shape)).float()
