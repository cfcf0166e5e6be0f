"""A GAN in the plane: eight Gaussians on a ring, two small networks, SGD.

The runs of all seeds with one learning rate are trained as one network of stacked weights. Their losses are
added, so each gets its own gradients, and one that diverges does not touch the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from theodolite.controllers.interaction import cancel_interaction
from theodolite.flows import GaussianMixture, sliced_wasserstein
from theodolite.probes.steps.game import game_drift
from theodolite_studies.framework.records import Record, short

ARMS = ("simultaneous", "alternating", "cancelled")
RATES = tuple(round(0.1 * 2 ** (power / 2), 4) for power in range(-2, 9))
"""From 0.05 to 1.6, by factors of √2."""
SEEDS, TUNING = 12, 4
"""Networks with one rate, of which the first few are for the choice of the rate."""
STEPS, EVERY = 1200, 100
WIDTH, BATCH, SAMPLES = 32, 64, 2000
CLUSTERS, RADIUS, STD = 8, 1.5, 0.2

WAYS = {
    "simultaneous": ((1.0, 1.0), (1, 1), False),
    "alternating": ((1.0, 1.0), (1, 1), True),
    "alternating, 2 to 1": ((1.0, 0.5), (2, 1), True),
}
"""What `game_drift` measures: learning rates in units of h, updates of each player, and is it alternating?"""
SIZES, ROUNDS = (0.2, 0.05, 0.0125, 0.003125), 5
MOMENTS = (0, 300)
"""Steps of training after which the drift is measured."""

Batch = tuple[Tensor, Tensor]
"""Data and noise, (seeds, examples, 2) each."""


def mixture() -> GaussianMixture:
    """The data."""
    angles = torch.arange(CLUSTERS, dtype=torch.float64) * 2 * math.pi / CLUSTERS
    return GaussianMixture(RADIUS * torch.stack([angles.cos(), angles.sin()], 1), STD)


class Stacked(nn.Module):
    """Networks 2–width–width–outputs with SiLU, one for each seed; (seeds, N, 2) → (seeds, N, outputs)."""

    def __init__(self, outputs: int, num: int, width: int = WIDTH) -> None:
        super().__init__()
        sizes = (2, width, width, outputs)
        self.weights = nn.ParameterList(
            torch.randn(num, fan_in, fan_out) / fan_in**0.5 for fan_in, fan_out in itertools.pairwise(sizes)
        )
        self.biases = nn.ParameterList(torch.zeros(num, 1, size) for size in sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        """What each network makes of its own inputs."""
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, nn.functional.silu(x) if layer else x, weight)
        return x


def losses(judge: nn.Module, maker: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of discriminator and generator (the non-saturating one), added over the seeds."""
    data, noise = batch
    made = judge(maker(noise))
    wrong = nn.functional.softplus(-judge(data)) + nn.functional.softplus(made)
    return wrong.mean((1, 2)).sum(), nn.functional.softplus(-made).mean((1, 2)).sum()


def training(
    arm: str, lr: float, *, steps: int = STEPS, every: int = EVERY, seeds: int = SEEDS
) -> Iterator[Record]:
    """The sliced Wasserstein distance from data of every seed along training; None where it diverged."""
    torch.manual_seed(21)
    players = Stacked(1, seeds), Stacked(2, seeds)
    optimizers = [torch.optim.SGD(player.parameters(), lr=lr) for player in players]
    data = mixture()
    truth, others = (data.sample(SAMPLES, "ring", name)[0] for name in ("truth", "others"))
    found: list[list[float | None]] = [[] for _ in range(seeds)]
    for step in range(1, steps + 1):
        update(arm, lr, players, optimizers, batch_of(data, seeds, step))
        if step % every == 0:
            with torch.no_grad():
                samples = players[1](torch.randn(seeds, SAMPLES, 2))
            for own, made in zip(found, samples, strict=True):
                own.append(_distance(made, truth))
    yield {"distances": found, "floor": _distance(others, truth)}


def update(
    arm: str,
    lr: float,
    players: tuple[nn.Module, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Batch,
) -> None:
    """A step of both players."""
    if arm == "alternating":
        for own, (player, optimizer) in enumerate(zip(players, optimizers, strict=True)):
            gradients = torch.autograd.grad(losses(*players, batch)[own], list(player.parameters()))
            for tensor, gradient in zip(player.parameters(), gradients, strict=True):
                tensor.grad = gradient
            optimizer.step()
        return
    cancel_interaction(players, losses, batch, lr=lr, strength=float(arm == "cancelled"))
    for optimizer in optimizers:
        optimizer.step()


def batch_of(data: GaussianMixture, seeds: int, step: int) -> Batch:
    """Data and noise of a step, the same for all arms and rates."""
    points, _ = data.sample(seeds * BATCH, "ring", step)
    noise = torch.randn(seeds, BATCH, 2, generator=torch.Generator().manual_seed(step))
    return points.view(seeds, BATCH, 2), noise


def rounds(
    seed: int, *, moments: Sequence[int] = MOMENTS, sizes: Sequence[float] = SIZES, rtol: float = 1e-6
) -> Iterator[Record]:
    """The drift of some rounds, at moments of simultaneous training, and what of it each flow leaves."""
    torch.manual_seed(seed)
    players, lr = (Stacked(1, 1), Stacked(2, 1)), 0.1
    optimizers = [torch.optim.SGD(player.parameters(), lr=lr) for player in players]
    data = mixture()
    for step in range(max(moments) + 1):
        batch = batch_of(data, 1, 10_000 * (seed + 1) + step)
        if step in moments:
            for way, ((h_1, h_2), updates, is_alternating) in WAYS.items():
                for h in sizes:
                    found = game_drift(
                        players,
                        losses,
                        batch,
                        lr=(h * h_1, h * h_2),
                        steps=ROUNDS,
                        updates=updates,
                        alternating=is_alternating,
                        rtol=rtol,
                    )
                    yield {
                        "moment": step,
                        "game": way,
                        "h": h,
                        "length": short(found.length),
                        "distance": short(found.distance),
                        "unexplained": short(found.modified),
                        "self only": short(found.self_only),
                        "interaction only": short(found.interaction_only),
                        "exact": found.converged,
                    }
        update("simultaneous", lr, players, optimizers, batch)


def _distance(made: Tensor, truth: Tensor) -> float | None:
    return short(sliced_wasserstein(made, truth), 4) if bool(made.isfinite().all()) else None
