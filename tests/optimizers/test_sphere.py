"""The spectral sphere against singular value decompositions in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.optimizers import Base, Hyper, SpectralSphere
from theodolite.optimizers.sphere import leading, tangent

from .reference import (
    Reference,
    State,
    averaged,
    moved,
    orthogonal_first,
    orthogonal_rows_alone,
    unit_rows,
    unit_unequal,
)


def _polar(matrix: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    """With a radius of 1.5."""
    m = averaged(state, "m", g, 0.95)
    m = 0.95 * m + 0.05 * g
    m = m / (m.norm() + hyper.eps)
    u, _, vh = torch.linalg.svd(w, full_matrices=False)
    theta, aspect = u[:, :1] @ vh[:1], math.sqrt(w.shape[0] / w.shape[1])
    low, high = -10.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        rising = (theta * _polar(m + middle * theta)).sum() > 0
        low, high = (low, middle) if rising else (middle, high)
    w = (1 - hyper.lr * hyper.weight_decay) * w - hyper.lr * aspect * _polar(m + low * theta)
    return w * (1.5 * hyper.extent * aspect) / torch.linalg.matrix_norm(w, 2)


def without_noise(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    """Along the momentum's own orthogonal factor, whose directions without a gradient are left out.

    There the polar factor is rounding errors, which differ between the two runs.
    """
    u, s, vh = torch.linalg.svd(averaged(state, "m", g, 0.9), full_matrices=False)
    aspect = math.sqrt(w.shape[0] / w.shape[1])
    w = moved(w, aspect * u * (s / (s + 0.01 * hyper.eps)) @ vh, hyper)
    return w * (hyper.extent * aspect / torch.linalg.matrix_norm(w, 2))


def first(gradient: Tensor, **_: Any) -> Tensor:
    return math.sqrt(gradient.shape[-2] / gradient.shape[-1]) * orthogonal_first(gradient)


REFERENCES = {
    "sso": Reference(
        step,
        first,
        rows=unit_rows,
        rows_alone=orthogonal_rows_alone,
        unequal=unit_unequal,
        base=Base(lr=0.03, weight_decay=0.5, eps=0.5),
        options={"radius": 1.5},
        absorbable=without_noise,
        # The retraction takes back what weight decay does, and the length of the start.
        matters=frozenset(["lr", "eps", "extent"]),
        tolerance=1e-6,  # a bisection and power iterations
    )
}

SHAPES = [(7, 7), (30, 12), (12, 30), (2, 5), (3, 10, 6)]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _outer(matrices: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    return u[..., :1] @ vh[..., :1, :]


@pytest.mark.parametrize("shape", [*SHAPES, (200, 200)])
def test_the_leading_singular_value_and_its_vectors(shape: tuple[int, ...]) -> None:
    matrices = _random(*shape)
    norm, outer = leading(matrices)
    torch.testing.assert_close(norm[..., 0, 0], torch.linalg.svdvals(matrices)[..., 0], rtol=1e-9, atol=0)
    torch.testing.assert_close(outer, _outer(matrices), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_direction_is_the_steepest_of_norm_one_along_the_sphere(shape: tuple[int, ...]) -> None:
    theta, moment = _outer(_random(*shape)), _random(*shape)
    moment = moment / torch.linalg.matrix_norm(moment, keepdim=True)
    phi = tangent(moment, theta)
    assert (theta * phi).sum((-2, -1)).abs().max() < 1e-6
    assert torch.linalg.svdvals(phi).max() < 1 + 1e-6
    # No other point of the ball on the tangent plane is steeper: projections of random ones are not.
    reached = (moment * phi).sum((-2, -1))
    near = moment + 0.3 * _random(50, *shape) / moment[0].numel() ** 0.5
    others = tangent(near, theta.expand_as(near))
    assert ((moment * others).sum((-2, -1)) <= reached + 1e-6).all()


@pytest.mark.parametrize("radius", [None, 0.7])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_a_step_and_the_way_back_to_the_sphere(shape: tuple[int, int], radius: float | None) -> None:
    weight, grad = _random(*shape), _random(*shape)
    param = nn.Parameter(weight.clone())
    param.grad = grad.clone()
    SpectralSphere([param], lr=0.1, weight_decay=0.5, radius=radius).step()

    aspect = (shape[0] / shape[1]) ** 0.5
    theta = _outer(weight)
    low, high = -100.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        u, _, vh = torch.linalg.svd(grad / grad.norm() + middle * theta, full_matrices=False)
        low, high = (middle, high) if (theta * (u @ vh)).sum() < 0 else (low, middle)
    moved = weight * (1 - 0.1 * 0.5) - 0.1 * aspect * (u @ vh)
    kept = torch.linalg.matrix_norm(weight, 2) if radius is None else torch.tensor(radius * aspect)
    expected = moved * (kept / torch.linalg.matrix_norm(moved, 2))
    torch.testing.assert_close(param.detach(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_stays_for_many_steps(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.randn(3, 9, 6, dtype=dtype))  # (expert, in, out)
    before = torch.linalg.matrix_norm(param.detach(), 2)
    start = param.detach().clone()
    optimizer = SpectralSphere([param], lr=0.2, axes=((1,), (2,)))
    for _ in range(20):
        param.grad = torch.randn_like(param)
        optimizer.step()
    assert (param.detach() - start).norm() > 1
    torch.testing.assert_close(torch.linalg.matrix_norm(param.detach(), 2), before, rtol=1e-5, atol=0)


def test_a_learning_rate_of_zero_moves_nothing() -> None:
    param = nn.Parameter(torch.randn(5, 4))
    before = param.detach().clone()
    param.grad = torch.randn(5, 4)
    SpectralSphere([param], lr=0.0, radius=3.0).step()
    assert torch.equal(param.detach(), before)


def test_a_weight_that_is_zero_has_no_radius() -> None:
    param = nn.Parameter(torch.zeros(5, 4))
    param.grad = torch.randn(5, 4)
    with pytest.raises(UseError, match=r"shape \(5, 4\), has a matrix of zeros.*or radius="):
        SpectralSphere([param]).step()


@pytest.mark.parametrize("radius", [0.0, -1.0, float("nan")])
def test_a_radius_is_positive(radius: float) -> None:
    with pytest.raises(UseError, match="radius is"):
        SpectralSphere([nn.Parameter(torch.ones(2, 2))], radius=radius)


def test_the_leading_direction_is_found_wherever_it_lies() -> None:
    """In the last two of twelve directions; and beside rows of zeros."""
    crowded = torch.diag(torch.tensor([1.0] * 10 + [2.0, 3.0], dtype=torch.float64))
    assert leading(crowded)[0].item() == pytest.approx(3.0, rel=1e-9)
    padded = torch.cat([torch.zeros(8, 32, dtype=torch.float64), _random(8, 32)])
    assert leading(padded)[0].item() == pytest.approx(torch.linalg.matrix_norm(padded, 2).item(), rel=1e-6)


def test_a_later_weight_of_zero_is_refused_by_name_before_the_first_moves() -> None:
    weights = {"up": nn.Parameter(torch.randn(3, 3)), "down": nn.Parameter(torch.zeros(3, 3))}
    before = weights["up"].detach().clone()
    for weight in weights.values():
        weight.grad = torch.ones(3, 3)
    with pytest.raises(UseError, match=r"down, of shape \(3, 3\), has a matrix of zeros"):
        SpectralSphere(weights.items(), lr=0.1).step()
    assert torch.equal(weights["up"], before)


def test_a_resumed_run_of_bfloat16_keeps_the_digits_of_its_radius() -> None:
    ends = []
    for resumed in (False, True):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(16, 8).bfloat16())
        optimizer = SpectralSphere([param], lr=0.05)
        for step in range(8):
            param.grad = torch.randn(16, 8).bfloat16()
            optimizer.step()
            if resumed and step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = SpectralSphere([param], lr=0.05)
                optimizer.load_state_dict(saved)
        ends.append((param.detach(), optimizer.state[param]["radius"]))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
