"""The path of training on a plane, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.probes.curvature.axes import Axes, trajectory
from theodolite.probes.curvature.landscape import landscape

SHAPES = {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (2, 4)}


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).double()


def walk(num: int) -> list[dict[str, Tensor]]:
    """A walk with steps of different lengths in different directions."""
    scale = {
        name: torch.logspace(0, -1, torch.Size(shape).numel()).reshape(shape)
        for name, shape in SHAPES.items()
    }
    place = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    found = []
    for _ in range(num):
        place = {name: one + scale[name] * torch.randn(one.shape).double() for name, one in place.items()}
        found.append(place)
    return found


def flat(states: list[dict[str, Tensor]]) -> np.ndarray:
    return np.stack([torch.cat([state[name].flatten() for name in SHAPES]).numpy() for state in states])


def test_components_shares_and_distances_are_those_of_a_singular_value_decomposition() -> None:
    states = walk(7)
    found = trajectory(build(), states)
    differences = flat(states) - flat(states)[-1]
    left, values, right = np.linalg.svd(differences, full_matrices=False)
    for index in range(2):
        axis = np.concatenate([found.axes.vectors[index][name].flatten().numpy() for name in SHAPES])
        assert abs(axis @ right[index]) == pytest.approx(1, rel=1e-9)
        np.testing.assert_allclose(
            np.abs(found.points[:, index]), np.abs(left[:, index] * values[index]), atol=1e-9
        )
    assert found.explained == pytest.approx(tuple(values[:2] ** 2 / (values**2).sum()), rel=1e-9)
    rest = left[:, 2:] * values[2:]
    np.testing.assert_allclose(found.away, np.linalg.norm(rest, axis=1), atol=1e-7)
    assert (found.points[-1] == 0).all()
    assert found.axes.orthonormal
    assert f"{100 * found.explained[0]:.1f} % + " in str(found)


def test_on_axes_that_are_not_at_right_angles_points_are_least_squares() -> None:
    states = walk(5)
    generator = torch.Generator().manual_seed(1)
    one, other = (
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        for _ in range(2)
    )
    other = {name: other[name] + one[name] for name in SHAPES}
    axes = Axes("checkpoints", (one, other), ("one", "other"))
    found = trajectory(build(), states, axes=axes)
    matrix = flat([one, other]).T
    differences = flat(states) - flat(states)[-1]
    expected, residuals, *_ = np.linalg.lstsq(matrix, differences.T, rcond=None)
    np.testing.assert_allclose(found.points, expected.T, atol=1e-9)
    assert found.explained == pytest.approx((1 - residuals.sum() / (differences**2).sum(),), rel=1e-9)


def test_buffers_are_not_part_of_the_path() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    states = []
    for step in range(3):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state["0.weight"][0, step] += 1
        state["1.running_mean"] += 1000 * step
        states.append(state)
    found = trajectory(model, states)
    assert np.abs(found.points).max() < 3
    assert set(found.last) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_bf16_checkpoints_are_compared_in_float32() -> None:
    """A step of 2^-9 beside a weight of 1 is lost in bfloat16, in which the difference would be zero."""
    model = nn.Linear(3, 1, bias=False).bfloat16()
    states = [{"weight": torch.tensor([[1.0 + 2**-9 * step, 0.0, float(step == 0)]])} for step in range(3)]
    found = trajectory(model, states)
    assert sum(found.explained) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(found.points[1]) == pytest.approx(2**-9, rel=1e-3)


def test_a_landscape_has_the_last_checkpoint_in_its_centre_and_the_path_on_it() -> None:
    model, states = build(), walk(4)
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = trajectory(model, states)
    found = landscape(model, F.mse_loss, (x, y), axes=path, num=5)
    for low, high, places in zip(path.points.min(0), path.points.max(0), found.places, strict=True):
        assert places[0] < low < high < places[-1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.load_state_dict(states[-1])
    assert found.loss == pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-9)
    assert path.summary in " ".join(str(found).split())
    # A place on the plane is the last weights plus so much of each axis.
    corner = {
        name: states[-1][name]
        + sum(places[0] * axis[name] for places, axis in zip(found.places, path.axes.vectors, strict=True))
        for name in SHAPES
    }
    model.load_state_dict(corner)
    assert found.values[0, 0] == pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-9)


def test_two_checkpoints_and_three_on_a_line_make_a_line() -> None:
    model, (state, other) = build(), walk(2)
    assert len(trajectory(model, [state, other]).axes.vectors) == 1
    between = {name: (state[name] + other[name]) / 2 for name in SHAPES}
    found = trajectory(model, [state, between, other])
    assert found.points.shape == (3, 1)
    assert found.explained == pytest.approx((1.0,))
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    assert landscape(model, F.mse_loss, (x, y), axes=found, num=5).values.shape == (5,)


def test_bad_input_is_named() -> None:
    model = build()
    with pytest.raises(th.UseError, match="1 checkpoints make no path"):
        trajectory(model, [model.state_dict()])
    with pytest.raises(th.UseError, match="Did you keep state_dict"):
        trajectory(model, [model.state_dict()] * 3)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()}
    with pytest.raises(th.UseError, match="holds nan or infinity"):
        trajectory(model, [model.state_dict(), broken])
    path = trajectory(model, walk(3), parameters=["1.*"])
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    with pytest.raises(th.UseError, match="over other parameters"):
        landscape(model, F.mse_loss, (x, y), axes=path)
