"""Batches of noisy data: their distribution, their targets, their purity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from theodolite import UseError
from theodolite.flows import Interpolant, noisy, three_gaussians, velocity_loss
from theodolite.flows.interpolants import INTERPOLANTS
from theodolite.models import FlowMLP

NUM = 4096


def draw(seed: int, step: int) -> tuple[Tensor, Tensor]:
    return three_gaussians().sample(NUM, "test", seed, step, dtype=torch.float64)


@pytest.mark.parametrize("path", INTERPOLANTS.values(), ids=lambda path: path.name)
def test_every_target_belongs_to_the_same_noise_and_data(path: Interpolant) -> None:
    data = draw(3, 5)[0]
    batches = {
        predict: noisy(draw, path=path, predict=predict)(3, 5)  # type: ignore[arg-type]
        for predict in ("data", "noise", "velocity", "score")
    }
    assert torch.equal(batches["data"][1], data)
    for predict, ((x, t), target) in batches.items():
        noise = (x - path.alpha(t)[:, None] * data) / path.sigma(t)[:, None]
        expected = {
            "data": data,
            "noise": noise,
            "velocity": path.alpha_rate(t)[:, None] * data + path.sigma_rate(t)[:, None] * noise,
            "score": -noise / path.sigma(t)[:, None],
        }[predict]
        far = path.sigma(t) > 0.01  # nearer to the data the noise cannot be seen in x
        assert torch.allclose(target[far], expected[far], rtol=1e-9, atol=1e-9)


def test_noise_is_standard_normal_and_times_are_as_asked() -> None:
    (_, uniform), noise = noisy(draw, predict="noise")(0, 0)
    assert noise.mean().abs() < 5 / math.sqrt(2 * NUM)
    assert (noise.var() - 1).abs() < 5 * math.sqrt(2 / (2 * NUM))
    assert (noise.T @ noise / NUM - torch.eye(2)).abs().max() < 5 * math.sqrt(2 / NUM)
    assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12 / NUM)
    assert abs(uniform.var() - 1 / 12) < 0.005
    (_, middle), _ = noisy(draw, times="logit-normal")(0, 0)
    odds = (middle / (1 - middle)).log()
    assert abs(odds.mean()) < 5 / math.sqrt(NUM)
    assert abs(odds.var() - 1) < 5 * math.sqrt(2 / NUM)


def test_a_batch_depends_on_its_name_seed_and_step_alone() -> None:
    torch.manual_seed(1)
    first = noisy(draw)(0, 1)[0]
    torch.manual_seed(2)
    again = noisy(draw)(0, 1)[0]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for other in (noisy(draw)(0, 2), noisy(draw)(1, 1), noisy(draw, name="other")(0, 1)):
        assert not torch.equal(other[0][1], first[1])


def test_labels_are_kept_and_dropped() -> None:
    labels = draw(0, 0)[1]
    inputs, _ = noisy(draw, classes=3)(0, 0)
    assert torch.equal(inputs[2], labels)
    inputs, _ = noisy(draw, classes=3, label_dropout=0.25)(0, 0)
    dropped = inputs[2] == 3
    assert torch.equal(inputs[2][~dropped], labels[~dropped])
    assert abs(dropped.double().mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / NUM)
    for label in range(3):  # whatever the label
        assert abs(dropped[labels == label].double().mean() - 0.25) < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_and_shape_are_those_of_the_data(dtype: torch.dtype) -> None:
    (x, t), target = noisy(lambda seed, step: (torch.ones(5, 3, 4, 4, dtype=dtype), None))(0, 0)
    assert {x.dtype, t.dtype, target.dtype} == {dtype}
    assert x.shape == target.shape == (5, 3, 4, 4)


@pytest.mark.parametrize("path", INTERPOLANTS.values(), ids=lambda path: path.name)
@pytest.mark.parametrize("predict", ["score", "velocity"])
def test_times_of_bfloat16_data_are_not_rounded_to_where_targets_are_infinite(
    path: Interpolant, predict: Any
) -> None:
    data = torch.ones(NUM, 2, dtype=torch.bfloat16)
    (x, t), target = noisy(lambda seed, step: (data, None), path=path, predict=predict)(0, 0)
    assert (x.dtype, t.dtype, target.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert t.max() > 0.998  # which is 1 in bfloat16
    assert target.isfinite().all()
    net = FlowMLP(8, 1).bfloat16()
    assert net(x, t).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype, classes", [(torch.bool, 2), (torch.uint8, 256)])
def test_the_null_label_may_be_beyond_the_dtype_of_the_labels(dtype: torch.dtype, classes: int) -> None:
    labels = torch.ones(8, dtype=dtype)
    inputs, _ = noisy(lambda *_: (torch.ones(8, 2), labels), classes=classes, label_dropout=1.0)(0, 0)
    assert inputs[2].tolist() == [classes] * 8


def test_the_loss_of_the_exact_velocity_is_the_floor() -> None:
    """A mean over 100 batches, within five standard errors."""
    mixture = three_gaussians()
    losses = []
    for step in range(100):
        (x, t), target = noisy(draw)(7, step)
        losses.append(velocity_loss(mixture.velocity(x, t), target))
    found = torch.stack(losses)
    assert abs(found.mean() - mixture.floor()) < 5 * found.std() / 10


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UseError, match="predict is 'speed'"):
        noisy(draw, predict="speed")  # type: ignore[arg-type]
    with pytest.raises(UseError, match="times is 'normal'"):
        noisy(draw, times="normal")  # type: ignore[arg-type]
    with pytest.raises(UseError, match="label_dropout is 2"):
        noisy(draw, classes=3, label_dropout=2)
    with pytest.raises(UseError, match=r"label_dropout is 0\.1, but labels are not kept: give classes"):
        noisy(draw, label_dropout=0.1)
    with pytest.raises(UseError, match="draw returned a tensor of shape"):
        noisy(lambda seed, step: torch.ones(3, 2))(0, 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(UseError, match="as data: return floats"):
        noisy(lambda seed, step: (torch.ones(3, 2).long(), None))(0, 0)
    with pytest.raises(UseError, match="as labels: return one integer per example"):
        noisy(lambda seed, step: (torch.ones(3, 2), torch.ones(2).long()), classes=2)(0, 0)
    for wrong in (3, -1, 2):
        labels = torch.tensor([0, 1, wrong])
        with pytest.raises(UseError, match=f"labels hold {wrong}, but classes is 2: labels go from 0 to 1"):
            noisy(lambda *_, labels=labels: (torch.ones(3, 2), labels), classes=2, label_dropout=0.5)(0, 0)
    with pytest.raises(UseError, match=r"draw is a tensor of shape \(3, 2\): give a function draw"):
        noisy(torch.ones(3, 2))  # type: ignore[arg-type]
    with pytest.raises(UseError, match="the prediction is a tuple of 1"):
        velocity_loss((torch.ones(3, 2),), torch.ones(3, 2))  # type: ignore[arg-type]
    with pytest.raises(UseError, match=r"returned the shape \(4, 1\) for a target of shape \(4, 2\)"):
        velocity_loss(torch.ones(4, 1), torch.ones(4, 2))
