"""Training and judging flow maps: closed forms, and the exact map as a network."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from theodolite import flows
from theodolite.core.size import Size
from theodolite_studies.flow_maps import training
from theodolite_studies.flow_maps.setting import JUMPS, MAPS, SMALL
from theodolite_studies.flow_maps.study import run
from theodolite_studies.flow_maps.training import (
    WeightAverage,
    costs,
    exact_field,
    judged,
    normal,
    train,
)

TINY = dataclasses.replace(SMALL, steps=3, points=50, size=Size(16, 1))


class ExactMap(nn.Module):
    """`v_{s,t}(x)` of the mixture, by 16 steps of Runge and Kutta's method of order four."""

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        s, t = times.unbind(1)
        velocity, moved, step = flows.three_gaussians().velocity, x, (t - s)[:, None] / 16
        if torch.equal(s, t):
            return velocity(x, t)
        for place in range(16):
            start, half = s + place * step[:, 0], step[:, 0] / 2
            one = velocity(moved, start)
            two = velocity(moved + step / 2 * one, start + half)
            three = velocity(moved + step / 2 * two, start + half)
            four = velocity(moved + step * three, start + 2 * half)
            moved = moved + step / 6 * (one + 2 * two + 2 * three + four)
        return (moved - x) / (t - s)[:, None]


def test_the_average_is_the_weighted_mean_of_the_weights_so_far() -> None:
    net = nn.Linear(2, 1)
    average, seen = WeightAverage(net, 0.9), []
    for step in range(7):
        nn.init.normal_(net.weight, generator=torch.Generator().manual_seed(step))
        average.add()
        seen.append(net.weight.detach().clone())
    shares = 0.9 ** np.arange(6, -1, -1)
    expected = sum(share * each for share, each in zip(shares / shares.sum(), seen, strict=True))
    torch.testing.assert_close(average.network().weight, expected)
    assert not torch.equal(average.network().weight, net.weight)


def _slope(net: nn.Module, batch: Any) -> Tensor:
    weight: Tensor = net.weight
    return (batch[0] * weight).sum()


def test_training_clips_gradients_and_keeps_their_norms() -> None:
    """Along a constant gradient (3, 4), clipped to 1, with a cosine from 0.5 to 0 over four steps."""
    net = nn.Linear(2, 1, bias=False)
    start = net.weight.detach().clone()
    batch = torch.tensor([[3.0, 4.0]]), None
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.5), []
    course = train(
        net,
        _slope,
        lambda seed, step: batch,
        optimizer,
        seed=0,
        steps=4,
        clip=1.0,
        after=lambda steps, average: seen.append((steps, average.steps)),
    )
    rates = 0.25 * (1 + np.cos(np.pi * np.arange(4) / 4))
    torch.testing.assert_close(net.weight, start - rates.sum() * torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(course.gradients, torch.full((4,), 5.0))
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert not course.diverged


def test_training_ends_where_the_loss_is_not_finite() -> None:
    net = nn.Linear(2, 1, bias=False)

    def batches(seed: int, step: int) -> Any:
        return torch.full((1, 2), torch.nan if step >= 150 else 0.0), None

    course = train(net, _slope, batches, torch.optim.SGD(net.parameters(), lr=0.1), seed=0, steps=1000)
    assert course.diverged
    assert len(course.losses) == 200


def test_the_exact_map_is_judged_to_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BOUND_POINTS", 2)
    monkeypatch.setattr(training, "JUMPS", (1, 16))
    found = judged(ExactMap(), 0, 50)
    assert max(found["map"]) < 1e-3
    assert found["gap"] < 1e-9
    assert found["map distance"] == pytest.approx([found["map distance"][0]] * 2, rel=0.01)
    (known,) = exact_field(0, 50)
    assert found["euler"] == pytest.approx(known["euler"], rel=1e-3)
    assert found["euler"][0] > 1 > found["euler"][1] > found["heun"][0]  # eight steps of two evaluations
    assert found["bounds"][1] == pytest.approx(known["map bounds"], rel=0.01)
    assert known["bounds"][0] == [None] * 3


def test_noise_depends_on_name_and_seed_alone() -> None:
    torch.testing.assert_close(normal("a", 1, (3, 2)), normal("a", 1, (3, 2)))
    assert not torch.equal(normal("a", 1, (3, 2)), normal("a", 2, (3, 2)))
    assert not torch.equal(normal("a", 1, (3, 2)), normal("b", 1, (3, 2)))


def test_cells_from_end_to_end() -> None:
    (matching,) = run({"part": "mixture", "kind": "matching", "seed": 0}, TINY, "cpu")
    (jumping,) = run({"part": "mixture", "kind": "eulerian-unstopped", "seed": 0}, TINY, "cpu")
    assert "map" not in matching
    assert len(jumping["map"]) == len(jumping["bounds"]) == len(JUMPS)
    assert matching["data distance"] == jumping["data distance"]
    (longer,) = run({"part": "mixture", "kind": "progressive-midpoint-long", "seed": 0}, TINY, "cpu")
    assert len(longer["gradients"]) == 9  # three times the steps, fewer than windows


def test_costs_are_multiples_of_matching() -> None:
    (found,) = costs(16, 32, rounds=1)
    assert tuple(found["costs"]) == MAPS
    assert all(cost > 0 for cost in found["costs"].values())
