"""The DiracGAN against finite differences, and against the probe and the controller."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from theodolite import probes
from theodolite_studies.drift import dirac
from theodolite_studies.framework.claims import Array

AT, H = np.array([0.7, -1.3]), 0.2


class Number(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor(value, dtype=torch.float64))


def _loss(one: nn.Module, two: nn.Module, _: object) -> Tensor:
    return nn.functional.softplus(one.at * two.at)  # type: ignore[operator]


def _slopes(value: dirac.Velocity, at: Array, step: float = 1e-5) -> Array:
    """Derivatives in columns, by central differences."""
    shifts = step * np.eye(2)
    return np.stack([(value(at + e) - value(at - e)) / (2 * step) for e in shifts], axis=1)


def test_fields_are_slopes_of_the_loss() -> None:
    def loss(at: Array) -> Array:
        return np.log1p(np.exp(at[:1] * at[1:]))

    (slopes,) = _slopes(loss, AT)
    assert dirac.field(AT) == pytest.approx([-slopes[0], slopes[1]], rel=1e-8)
    assert dirac.jacobian(AT) == pytest.approx(_slopes(dirac.field, AT), rel=1e-8)

    def squares(at: Array) -> Array:
        return np.sum(dirac.field(at) ** 2, keepdims=True) / 2

    (penalty,) = _slopes(squares, AT)
    found = dirac.consensus(AT, H, gamma=0.3)
    assert found == pytest.approx(AT + H * (dirac.field(AT) - 0.3 * penalty), rel=1e-8)


@pytest.mark.parametrize("way", dirac.WAYS)
def test_drifts_are_those_of_the_probe(way: str) -> None:
    seen = dirac.beside_flows(AT, way, H, time=1.0)
    players = Number(AT[0]), Number(AT[1])
    found = probes.game_drift(
        players, _loss, None, lr=H, steps=5, alternating=way == "alternating", rtol=1e-7
    )
    assert seen["distance"] == pytest.approx(found.distance, rel=1e-3)
    assert seen["unexplained"] == pytest.approx(found.modified, rel=1e-3)
    assert seen["flow radius"] == pytest.approx(1, rel=1e-9)


def test_corrected_steps_are_the_flow_to_the_next_order() -> None:
    end = dirac.cancelled(AT, h=H, steps=1)
    slopes = dirac.jacobian(AT)
    cross = slopes - np.diag(np.diag(slopes))
    field = dirac.field(AT)
    assert end == pytest.approx(AT + H * (field + H / 2 * cross @ field), rel=1e-9)
    # Without any drift, the error of one step is of the third order.
    errors = []
    for h in (0.02, 0.01):
        errors.append(float(np.linalg.norm(dirac.without_drift(AT, h) - dirac.flowed(AT, dirac.field, h))))
    assert np.log2(errors[0] / errors[1]) == pytest.approx(3, abs=0.05)


def test_a_start_has_a_record_for_each_step_size_and_each_long_run() -> None:
    rows = list(dirac.dirac(0))
    over_time = [row for row in rows if "time" in row]
    assert len(over_time) == 2 * (len(dirac.SIZES) + len(dirac.FINE))
    ends = {row["game"]: row["radius"] for row in rows if "steps" in row}
    # Measured with another program: 3.35, 1.420, 1.428, 1.400, 1.34 and 0.12 from the start √2.
    expected = {
        "simultaneous": 3.35,
        "interaction cancelled": 1.420,
        "all drift cancelled": 1.428,
        "consensus, γ = h/2": 1.400,
        "alternating": 1.34,
        "extragradient": 0.12,
    }
    for game, radius in expected.items():
        assert ends[game] * 2**0.5 == pytest.approx(radius, abs=0.005), game
