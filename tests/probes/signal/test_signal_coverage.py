"""The gain is the true slope without bias, its error is its spread, and small steps fall as it says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.core.batches import Batch
from theodolite.probes import Signal, signal
from theodolite.probes.example_losses import losses_of
from theodolite.surgery import InsertionPoints, find_points

from .growable import Blocks, Branch, batch_for, loss_for, network

POPULATION, SAMPLE, DRAWS = 2048, 16, 40


class World:
    """A network, and all examples there are."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Blocks(Branch, nn.Linear(5, 8)).double()
        self.inputs = torch.randn(POPULATION, 5, dtype=torch.float64)
        self.targets = torch.randint(16, (POPULATION,))
        self.points: InsertionPoints = find_points(self.model, self.inputs[:2])
        self.truth = self.look(torch.arange(POPULATION), torch.arange(2))

    def sample(self, examples: Tensor) -> Batch:
        return self.inputs[examples], self.targets[examples]

    def look(self, examples: Tensor, held_out: Tensor) -> Signal:
        return signal(
            self.model,
            nn.functional.cross_entropy,
            self.sample(examples),
            self.sample(held_out),
            points=self.points,
        )


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_gain_is_unbiased_and_the_norm_is_not(world: World) -> None:
    draws = torch.Generator().manual_seed(1)
    looks = [
        world.look(*torch.randperm(POPULATION, generator=draws)[: 2 * SAMPLE].split(SAMPLE))
        for _ in range(DRAWS)
    ]
    for at, true in enumerate(world.truth.points):
        gains = torch.tensor([look.points[at].gain for look in looks])
        norms = torch.tensor([look.points[at].norm ** 2 for look in looks])
        spread = float(gains.std()) / DRAWS**0.5
        assert abs(float(gains.mean()) - true.norm**2) < 4 * spread
        assert float(norms.mean()) > true.norm**2 + 4 * spread, "the noise of the mean is in its norm"
        noise = torch.tensor([look.points[at].noise for look in looks])
        assert float(noise.mean()) == pytest.approx(float(norms.mean()) - true.norm**2, rel=0.5)


def test_error_is_the_spread_of_gains_and_of_alignments(world: World) -> None:
    draws = torch.Generator().manual_seed(2)
    examples = torch.arange(SAMPLE)
    looks = [
        world.look(examples, torch.randint(SAMPLE, POPULATION, (SAMPLE,), generator=draws))
        for _ in range(DRAWS)
    ]
    for at, true in enumerate(world.truth.points):
        each = [look.points[at] for look in looks]
        gains = torch.tensor([one.gain for one in each])
        errors = torch.tensor([one.error for one in each])
        # Over 40 draws a standard deviation is known to a ninth, at one sigma.
        assert float(gains.std() / errors.mean()) == pytest.approx(1, abs=0.4)
        slope = sum(float((one * true.directions[name]).sum()) for name, one in each[0].directions.items())
        assert abs(float(gains.mean()) - slope) < 4 * float(gains.std()) / DRAWS**0.5
        preconditioned = torch.tensor([one.preconditioned for one in each])
        own = torch.tensor([one.preconditioned_error for one in each])
        assert float(preconditioned.std() / own.mean()) == pytest.approx(1, abs=0.4)
        aligned = float(_aligned(world, at, examples))
        held = [one.alignment_interval[0] <= aligned <= one.alignment_interval[1] for one in each]
        assert sum(held) >= 0.8 * DRAWS


def _aligned(world: World, at: int, examples: Tensor) -> Tensor:
    """The mean gradient by the stream over some examples, times that over all, by autograd."""
    means = []
    for which in (examples, torch.arange(POPULATION)):
        stream = world.model.first(world.inputs[which]).detach()
        for block in list(world.model.blocks)[:at]:
            stream = block(stream)
        stream = stream.detach().requires_grad_()
        rest = stream
        for block in list(world.model.blocks)[at:]:
            rest = block(rest)
        loss = nn.functional.cross_entropy(world.model.last(rest), world.targets[which], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, stream)
        means.append(gradient.mean(0))
    return means[0] @ means[1]


@pytest.mark.parametrize("name", ["pre", "peri"])
@pytest.mark.parametrize("kind", ["plain", "preconditioned"])
def test_small_steps_fall_as_predicted(name: str, kind: str) -> None:
    model, loss = network(name), loss_for(name)
    batch, held_out = batch_for(name, 6), batch_for(name, 5, seed=1)
    points = find_points(model, batch[0])
    one = signal(model, loss, batch, held_out, points=points).points[1]
    directions = one.directions if kind == "plain" else one.preconditioned_directions
    slope = one.gain if kind == "plain" else one.preconditioned
    grown, _ = th.surgery.insert_block(copy.deepcopy(model), batch[0], one.point, points=points)
    before = losses_of(grown, loss, held_out).mean()
    tensors = {key: grown.get_parameter(f"{one.name}.{key}") for key in directions}
    closed = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    ratios = []
    for step in (1e-2, 1e-3, 1e-4):
        with torch.no_grad():
            for key, tensor in tensors.items():
                tensor.copy_(closed[key] - step * directions[key])
        ratios.append(float(before - losses_of(grown, loss, held_out).mean()) / (step * slope))
    off = [abs(ratio - 1) for ratio in ratios]
    assert off[2] < 1e-3
    assert off[2] == pytest.approx(off[1] / 10, rel=0.2), "what is left is of second order"
