"""Exact flows of Gaussian mixtures, against autograd, finite differences and scipy's solver."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from theodolite import UseError
from theodolite.flows import GaussianMixture, Interpolant, three_gaussians
from theodolite.flows.interpolants import INTERPOLANTS
from theodolite.flows.training import noisy

PATHS = list(INTERPOLANTS.values())
each_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
UNEQUAL = GaussianMixture([[1.0, 0.0], [-0.5, 2.0], [0.3, -1.0]], 0.4, [1, 2, 3])


def points(num: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 1.5 * torch.randn(num, 2, dtype=torch.float64, generator=generator)
    return x, torch.linspace(0.03, 0.97, num, dtype=torch.float64)


@each_path
@pytest.mark.parametrize("label", [None, 1])
def test_the_density_is_the_sum_of_its_components(path: Interpolant, label: int | None) -> None:
    x, t = points()
    chosen = (
        [(1.0, UNEQUAL.centres[1])]
        if label
        else list(zip((1 / 6, 2 / 6, 3 / 6), UNEQUAL.centres, strict=True))
    )
    density = torch.zeros(len(x), dtype=torch.float64)
    for weight, centre in chosen:
        variance = path.alpha(t) ** 2 * 0.4**2 + path.sigma(t) ** 2
        distance = (x - path.alpha(t)[:, None] * centre).square().sum(1)
        density += weight * (-distance / (2 * variance)).exp() / (2 * math.pi * variance)
    assert torch.allclose(UNEQUAL.log_density(x, t, label, path).exp(), density, rtol=1e-10)


def test_the_log_density_is_finite_far_away() -> None:
    far = torch.full((1, 2), 1e4, dtype=torch.float64)
    t = torch.ones(1, dtype=torch.float64)
    assert UNEQUAL.log_density(far, t).isfinite().all()
    assert UNEQUAL.velocity(far, t).isfinite().all()


@each_path
@pytest.mark.parametrize("label", [None, 2])
def test_the_score_is_the_gradient_of_the_log_density(path: Interpolant, label: int | None) -> None:
    x, t = points()
    (gradient,) = torch.autograd.grad(UNEQUAL.log_density(x.requires_grad_(), t, label, path).sum(), x)
    assert torch.allclose(UNEQUAL.score(x.detach(), t, label, path), gradient, rtol=1e-10, atol=1e-11)


@each_path
@pytest.mark.parametrize("label", [None, 0])
def test_the_velocity_obeys_the_continuity_equation(path: Interpolant, label: int | None) -> None:
    """`∂ log p/∂t + div v + v · score = 0`, with the derivative in time by finite differences."""
    x, t = points()
    step = 1e-5
    later, earlier = (UNEQUAL.log_density(x, t + sign * step, label, path) for sign in (1, -1))
    rate = (later - earlier) / (2 * step)
    velocity = UNEQUAL.velocity(x.requires_grad_(), t, label, path)
    divergence = sum(
        torch.autograd.grad(velocity[:, d].sum(), x, retain_graph=True)[0][:, d] for d in range(2)
    )
    flux = (velocity * UNEQUAL.score(x, t, label, path)).sum(1)
    scale = rate.abs() + divergence.abs() + flux.abs() + 1  # type: ignore[union-attr]
    assert ((rate + divergence + flux).abs() / scale).max() < 1e-7


@each_path
def test_the_denoised_mean_is_that_of_the_data(path: Interpolant) -> None:
    """Tweedie's formula, with the score by autograd."""
    x, t = points()
    (score,) = torch.autograd.grad(UNEQUAL.log_density(x.requires_grad_(), t, path=path).sum(), x)
    alpha, sigma = path.alpha(t)[:, None], path.sigma(t)[:, None]
    expected = (x.detach() + sigma**2 * score) / alpha
    assert torch.allclose(UNEQUAL.denoised(x.detach(), t, path=path), expected, rtol=1e-9, atol=1e-9)


@each_path
def test_the_map_of_one_component_is_the_monotone_linear_one(path: Interpolant) -> None:
    """Between the normal distributions at two times, in dimensions that do not interact: mean to mean,
    standard deviation to standard deviation. And its derivative is the velocity."""
    one = GaussianMixture([[2.0, -1.0]], 0.3)
    x, _ = points(5)
    s, t, step = 0.2, 0.9, 1e-5
    ends = torch.tensor([s, t], dtype=torch.float64)
    spread = (path.alpha(ends) ** 2 * 0.09 + path.sigma(ends) ** 2).sqrt()
    means = path.alpha(ends)[:, None] * one.centres
    expected = means[1] + spread[1] / spread[0] * (x - means[0])
    moved = one.flow_map(x, s, t, path=path)
    assert torch.allclose(moved, expected, rtol=1e-13)
    slope = (one.flow_map(x, s, t + step, path=path) - one.flow_map(x, s, t - step, path=path)) / (2 * step)
    at = torch.full((5,), t, dtype=torch.float64)
    assert torch.allclose(slope, one.velocity(moved, at, path=path), rtol=1e-7)


@each_path
@pytest.mark.parametrize("mixture", [UNEQUAL, three_gaussians()])
def test_the_map_of_three_components_agrees_with_scipy(path: Interpolant, mixture: GaussianMixture) -> None:
    x, (s, t) = points(6)[0], (0.0, 0.99)

    def slope(time: float, flat: np.ndarray) -> np.ndarray:
        at = torch.full((len(x),), time, dtype=torch.float64)
        return mixture.velocity(torch.from_numpy(flat).view(-1, 2), at, path=path).numpy().ravel()

    solved = solve_ivp(slope, (s, t), x.numpy().ravel(), method="DOP853", rtol=1e-11, atol=1e-12)
    expected = torch.from_numpy(solved.y[:, -1]).view(-1, 2)
    assert (mixture.flow_map(x, s, t, path=path) - expected).abs().max() < 1e-6
    assert (mixture.flow_map(expected, t, s, path=path, atol=1e-8) - x).abs().max() < 1e-5  # backwards


def test_every_point_may_have_its_own_times() -> None:
    x, t = points(8)
    s = t.flip(0)
    together = UNEQUAL.flow_map(x, s, t)
    alone = torch.cat([UNEQUAL.flow_map(x[k : k + 1], s[k].item(), t[k].item()) for k in range(8)])
    assert torch.allclose(together, alone, atol=2e-6)
    assert torch.equal(UNEQUAL.flow_map(x, s, s), x)


def test_a_map_of_a_label_is_that_of_its_component() -> None:
    x, _ = points(4)
    alone = GaussianMixture(UNEQUAL.centres[1:2], UNEQUAL.std)
    assert torch.equal(UNEQUAL.flow_map(x, 0.1, 0.8, label=1), alone.flow_map(x, 0.1, 0.8))


def test_the_map_carries_noise_to_the_data() -> None:
    """Shares of the components, and moments around each centre, within five standard errors."""
    num = 3000
    noise = torch.randn(num, 2, generator=torch.Generator().manual_seed(1))
    found = UNEQUAL.flow_map(noise, 0.0, 1.0, atol=1e-3).double()
    for weight, centre in zip((1 / 6, 2 / 6, 3 / 6), UNEQUAL.centres, strict=True):
        own = found[
            torch.cdist(found, UNEQUAL.centres).argmin(1) == UNEQUAL.centres.tolist().index(centre.tolist())
        ]
        assert abs(len(own) / num - weight) < 5 * math.sqrt(weight * (1 - weight) / num) + 0.01
        assert (own.mean(0) - centre).abs().max() < 5 * 0.4 / math.sqrt(len(own)) + 0.02


@pytest.mark.parametrize("std", [0.02, 0.2, 1.0, 3.0])
def test_the_floor_of_one_component_is_closed(std: float) -> None:
    """`∫ std²/(t² std² + (1 − t)²) dt = std π/2` on the linear path, and
    `(π/2)² ∫ std²/(std² sin² + cos²) dt = (π/2)² std` on the trigonometric one."""
    one = GaussianMixture([[1.0, 2.0, 3.0]], std)
    assert one.floor() == pytest.approx(std * math.pi / 2, rel=1e-5)
    assert one.floor("trigonometric") == pytest.approx((math.pi / 2) ** 2 * std, rel=1e-5)
    assert UNEQUAL.floor(labelled=True) == pytest.approx(0.4 * math.pi / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("mixture", "path"),
    [(three_gaussians(), path) for path in PATHS]
    + [
        (UNEQUAL, PATHS[0]),
        (GaussianMixture(1.5 * torch.eye(5), 0.5), PATHS[0]),
        (GaussianMixture([[1.0, 0.0], [1.0, 0.0]], 0.5), PATHS[0]),
    ],
)
def test_the_floor_is_the_loss_of_the_exact_velocity(mixture: GaussianMixture, path: Interpolant) -> None:
    """By random numbers, within five standard errors of the mean of 2¹⁸ examples."""
    batch = noisy(lambda seed, step: mixture.sample(2**18, seed, step, dtype=torch.float64), path=path)
    (x, t), target = batch(0, 0)
    losses = (mixture.velocity(x, t, path=path) - target).square().mean(1)
    assert abs(losses.mean() - mixture.floor(path)) < 5 * losses.std() / 2**9


def test_the_floor_of_three_gaussians() -> None:
    """2.166 for the sum over the two dimensions; a mean over 6 million examples gave 2.1652 ± 0.001."""
    assert three_gaussians().floor() == pytest.approx(1.0826, abs=0.0015)


def test_samples_have_the_moments_of_the_mixture() -> None:
    data, labels = UNEQUAL.sample(60_000, "test", 3)
    assert data.dtype == torch.float32
    for label, (weight, centre) in enumerate(zip((1 / 6, 2 / 6, 3 / 6), UNEQUAL.centres, strict=True)):
        own = data[labels == label].double()
        assert abs(len(own) / 60_000 - weight) < 0.01
        assert (own.mean(0) - centre).abs().max() < 5 * 0.4 / math.sqrt(len(own))
        assert (own.std(0) - 0.4).abs().max() < 5 * 0.4 / math.sqrt(2 * len(own))
    assert torch.equal(UNEQUAL.sample(5, 3)[0], UNEQUAL.sample(5, 3)[0])
    assert not torch.equal(UNEQUAL.sample(5, 3)[0], UNEQUAL.sample(5, 4)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_of_x_stays(dtype: torch.dtype) -> None:
    x, t = (one.to(dtype) for one in points(3))
    for found in (
        UNEQUAL.velocity(x, t.double()),
        UNEQUAL.score(x, t),
        UNEQUAL.denoised(x, t),
        UNEQUAL.log_density(x, t),
        UNEQUAL.flow_map(x, 0.0, 0.5),
        UNEQUAL.flow_map(x, 0.0, 0.5, label=1),
    ):
        assert found.dtype == dtype


def test_wrong_arguments_are_refused() -> None:
    x, t = points(3)
    with pytest.raises(UseError, match="std is 0"):
        GaussianMixture([[1.0]], 0)
    with pytest.raises(UseError, match=r"centres have the shape \(3,\)"):
        GaussianMixture([1.0, 2.0, 3.0], 1)  # type: ignore[arg-type]
    with pytest.raises(UseError, match=r"weights are \[1.0, 0.0\]: give 2 positive numbers"):
        GaussianMixture([[1.0], [2.0]], 1, [1, 0])  # type: ignore[arg-type]
    with pytest.raises(UseError, match="label is 3"):
        UNEQUAL.velocity(x, t, 3)
    with pytest.raises(UseError, match=r"x has the shape \(3, 1\): give \(B, 2\)"):
        UNEQUAL.velocity(x[:, :1], t)
    with pytest.raises(UseError, match=r"t has the shape \(2,\) for x \(3, 2\)"):
        UNEQUAL.velocity(x, t[:2])
    with pytest.raises(UseError, match="t holds 2"):
        UNEQUAL.score(x, t + 2)
    with pytest.raises(UseError, match=r"time is 1\.5"):
        UNEQUAL.flow_map(x, 0.0, 1.5)
    with pytest.raises(UseError, match="variance-preserving path is infinite"):
        UNEQUAL.velocity(x, torch.ones(3), path="variance-preserving")


def test_an_accuracy_that_is_not_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("theodolite.flows.mixture.MOST_STEPS", 64)
    with pytest.raises(UseError, match="64 steps do not reach atol = 1e-30"):
        UNEQUAL.flow_map(points(3)[0], 0.0, 1.0, atol=1e-30)
