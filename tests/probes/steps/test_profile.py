"""The loss along a step: against closed forms and a fine grid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.probes import profile
from theodolite.probes.steps.profile import _above, _rises

cross_entropy = nn.functional.cross_entropy


class Line(nn.Module):
    """Two classes, two rows that pull apart: `(log(1 + e^(−2τ)) + log(1 + e^τ))/2` from τ = −1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.tensor([-1.0], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([inputs * self.tau, torch.zeros_like(inputs)], 1)


BATCH = torch.tensor([2.0, 1.0], dtype=torch.float64), torch.tensor([0, 1])
STEP = {"tau": torch.tensor([0.5], dtype=torch.float64)}


def loss_at(tau: float) -> float:
    return (math.log1p(math.exp(-2 * tau)) + math.log1p(math.exp(tau))) / 2


def test_where_it_falls_to_rises_and_is_above_its_start() -> None:
    found = profile(Line(), cross_entropy, BATCH, STEP)
    fine = np.linspace(0, 10, 200_001)
    values = np.array([loss_at(-1 + tau) for tau in fine])
    lowest = float(fine[values.argmin()])
    above = float(fine[1:][values[1:] > values[0]][0])
    assert found.radius.value == pytest.approx(math.pi / 2)
    assert found.rises_at == pytest.approx(lowest, rel=0.02)
    assert found.above_at == pytest.approx(above, rel=0.01)
    assert found.onset == pytest.approx(above / (math.pi / 2), rel=0.01)
    assert found.falls_to == found.rises_at  # between the lengths, which are a third apart
    assert found.lowest == pytest.approx(values.min(), rel=1e-4)
    assert found.lowest == pytest.approx(loss_at(-1 + found.falls_to))
    assert found.lowest < found.losses.min()
    for length, value in zip(found.lengths, found.losses, strict=True):
        assert value == pytest.approx(loss_at(-1 + length))


def test_a_step_uphill_rises_at_once_and_one_without_end_nowhere() -> None:
    uphill = profile(Line(), cross_entropy, BATCH, {"tau": -STEP["tau"]})
    assert (uphill.rises_at, uphill.above_at, uphill.falls_to) == (0, 0, 0)
    one_row = BATCH[0][:1], BATCH[1][:1]
    endless = profile(Line(), cross_entropy, one_row, STEP)
    assert math.isinf(endless.rises_at)
    assert math.isinf(endless.above_at)
    assert "no length to" in str(endless)


def test_where_a_second_valley_is_lower_it_falls_to_that_and_rises_at_the_first() -> None:
    class Bumpy(nn.Module):
        """The loss is `log(1 + e^(−z))` with `z = τ + 1.5 sin 3τ`."""

        def __init__(self) -> None:
            super().__init__()
            self.tau = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.stack([inputs * (self.tau + 1.5 * torch.sin(3 * self.tau)), 0 * inputs], 1)

    batch = torch.ones(1, dtype=torch.float64), torch.tensor([0])
    found = profile(Bumpy(), cross_entropy, batch, STEP, lengths=np.linspace(0.2, 5.0, 25).tolist())
    # z' = 1 + 4.5 cos 3τ vanishes first at a peak of z.
    assert found.rises_at == pytest.approx(math.acos(-1 / 4.5) / 3, rel=0.02)
    assert found.falls_to == found.lengths[found.losses.argmin()] > 2 * found.rises_at
    assert found.lowest == found.losses.min()


def test_lengths_are_in_units_of_the_radius() -> None:
    found = profile(Line(), cross_entropy, BATCH, STEP, lengths=[3.0, 0.5])
    np.testing.assert_allclose(found.lengths, np.array([0, 0.5, 3]) * math.pi / 2)
    with pytest.raises(th.UseError, match=r"lengths is \[0.0\]"):
        profile(Line(), cross_entropy, BATCH, STEP, lengths=[0.0])


def test_a_loss_that_is_not_finite_counts_as_above() -> None:
    class Wall(Line):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + torch.where(self.tau > 0.2, math.nan, 0.0)

    found = profile(Wall(), cross_entropy, (BATCH[0][:1], BATCH[1][:1]), STEP)
    assert found.above_at == pytest.approx(1.2, rel=0.02)
    assert found.rises_at == pytest.approx(1.2, rel=0.02)


def test_what_happens_before_the_first_length_is_found_too() -> None:
    found = profile(Line(), cross_entropy, BATCH, STEP, lengths=[5.0, 50.0])
    usual = profile(Line(), cross_entropy, BATCH, STEP)
    assert found.rises_at == pytest.approx(usual.rises_at, abs=0.01 * 5 * math.pi / 2)
    assert found.above_at == pytest.approx(usual.above_at, abs=0.01 * 5 * math.pi / 2)


def test_a_rise_that_no_length_is_short_enough_for_is_not_looked_for_for_ever() -> None:
    looked = []

    def wall(places: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        looked.extend(places)
        return np.where(places > 0, 2.0, 1.0) + 0.1 * places

    places = np.array([0.0, 1.0, 2.0])
    assert 0 <= _rises(wall, places, wall(places), 0.0, -1e-9)[1] < 0.01
    assert 0 <= _above(wall, places, wall(places), 0.0, -1e-9) < 0.01
    assert len(looked) < 50
