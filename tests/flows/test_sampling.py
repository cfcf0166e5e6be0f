"""Samplers on exact fields: orders of convergence, DDIM, and the marginals of the SDE."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from theodolite import UseError
from theodolite.flows import GaussianMixture, convert, field_of, find_interpolant, sample, three_gaussians

THREE = three_gaussians()


@functools.cache
def exact(num: int, start: float, end: float, path: str = "linear") -> Tensor:
    return THREE.flow_map(normal(num), start, end, path=path)


def normal(num: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(num, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("path", ["linear", "trigonometric", "variance-preserving"])
@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("heun", 2), ("dpm2m", 2)])
def test_errors_fall_with_the_order_of_the_method(path: str, method: str, order: int) -> None:
    """From 96 to 192 steps, on times at which log(α/σ) is finite."""
    noise, start, end = normal(200), 0.01, 0.99
    errors = [
        (
            sample(THREE.field(path=path), noise, steps=steps, method=method, path=path, start=start, end=end)  # type: ignore[arg-type]
            - exact(200, start, end, path)
        )
        .norm(dim=1)
        .mean()
        for steps in (96, 192)
    ]
    assert abs(math.log2(errors[0] / errors[1]) - order) < 0.2
    assert errors[1] < (0.01 if order == 1 else 0.001)


@pytest.mark.parametrize(("method", "most"), [("euler", 0.024), ("heun", 0.0014), ("dpm2m", 0.005)])
def test_all_methods_go_from_pure_noise_to_the_data(method: str, most: float) -> None:
    noise = normal(200)
    found = sample(THREE.field(), noise, steps=32, method=method)  # type: ignore[arg-type]
    assert (found - exact(200, 0.0, 1.0)).norm(dim=1).mean() < most


def ddim(x: Tensor, steps: int) -> Tensor:
    """Song et al. (2021), equation 12 with σ = 0, in units of the linear path: predict data and noise, and
    mix them again at the next time."""
    for step in range(steps):
        t, after = step / steps, (step + 1) / steps
        at = torch.full((len(x),), t, dtype=x.dtype)
        velocity = THREE.velocity(x, at)
        data, noise = x + (1 - t) * velocity, x - t * velocity
        x = after * data + (1 - after) * noise
    return x


def test_euler_is_ddim_on_the_linear_path() -> None:
    noise = normal(50)
    assert (sample(THREE.field(), noise, steps=25) - ddim(noise, 25)).abs().max() < 1e-12


@pytest.mark.parametrize("path", ["linear", "trigonometric", "variance-preserving"])
def test_one_step_of_dpm_is_ddim_on_every_path(path: str) -> None:
    noise, schedule = normal(50), find_interpolant(path)
    t, after = (torch.full((50,), one, dtype=torch.float64) for one in (0.3, 0.6))
    velocity = THREE.velocity(noise, t, path=path)
    data = convert(velocity, noise, t, "velocity", "data", path)
    eps = convert(velocity, noise, t, "velocity", "noise", path)
    expected = schedule.alpha(after)[:, None] * data + schedule.sigma(after)[:, None] * eps
    found = sample(THREE.field(path=path), noise, times=[0.3, 0.6], method="dpm2m", path=path)
    assert (found - expected).abs().max() < 1e-12


def test_dpm_is_exact_where_the_mean_of_the_data_is_linear_in_the_log_ratio() -> None:
    """Then only its integral `∫ e^λ X(λ) dλ` counts, which a step of the second order approximates by the
    value in the middle: the next term of the series is the difference."""
    path, times = find_interpolant("linear"), [0.5, 0.55, 0.61]
    ratios = [math.log(t / (1 - t)) for t in times]

    def field(x: Tensor, t: Tensor) -> Tensor:
        data = (t / (1 - t)).log()[:, None].expand_as(x)
        return convert(data.contiguous(), x, t, "data", "velocity", path)

    x = torch.ones(1, 2, dtype=torch.float64)
    found = sample(field, x, times=times, method="dpm2m")
    first = (1 - times[1]) / (1 - times[0]) * (x - times[0] * ratios[0]) + times[1] * ratios[0]
    middle = ratios[1] + (ratios[2] - ratios[1]) / 2  # extrapolated from the values at the first two times
    expected = (1 - times[2]) / (1 - times[1]) * (first - times[1] * middle) + times[2] * middle
    assert torch.allclose(found, expected, rtol=1e-13)


def test_times_of_dpm_are_equally_spaced_in_the_log_ratio() -> None:
    seen: list[float] = []

    def field(x: Tensor, t: Tensor) -> Tensor:
        seen.append(t[0].item())
        return torch.zeros_like(x)

    sample(field, normal(1), steps=6, method="dpm2m", start=0.1, end=0.9)
    ratios = torch.tensor([math.log(t / (1 - t)) for t in [*seen, 0.9]])
    assert torch.allclose(ratios.diff(), ratios.diff()[0].expand(6), rtol=1e-5)
    seen.clear()
    sample(field, normal(1), steps=6, method="dpm2m")
    assert seen[0] == 0
    assert len(seen) == 6
    assert seen[1] == pytest.approx(1 / 6)
    assert seen[-1] == pytest.approx(5 / 6)
    ratios = torch.tensor([math.log(t / (1 - t)) for t in seen[1:]])
    assert torch.allclose(ratios.diff(), ratios.diff()[0].expand(4), rtol=1e-5)


def test_few_steps_of_dpm_have_times_too() -> None:
    for steps in (1, 2, 3, 4):
        for start, end in ((0.0, 1.0), (0.0, 0.5), (0.5, 1.0), (0.2, 0.7)):
            seen: list[float] = []
            sample(
                lambda x, t, seen=seen: seen.append(t[0].item()) or x,  # type: ignore[misc, func-returns-value]
                normal(1),
                steps=steps,
                method="dpm2m",
                start=start,
                end=end,
            )
            assert len(seen) == steps
            assert seen == sorted(set(seen))
            assert seen[0] == start
            assert seen[-1] < end


@pytest.mark.parametrize("path", ["linear", "trigonometric"])
@pytest.mark.parametrize("diffusion", [0.5, 2.0])
def test_the_sde_has_the_marginals_of_the_mixture(path: str, diffusion: float) -> None:
    """After 200 steps of 4000 samples: shares, means and standard deviations of the components to five
    standard errors and 0.01 for the steps."""
    mixture, num = GaussianMixture([[1.5, 0.0], [-1.0, 1.0]], 0.3, [1, 3]), 4000
    field = mixture.field(path=path)
    found = sample(field, normal(num), steps=200, method="sde", path=path, diffusion=diffusion, seed=1)
    label = torch.cdist(found, mixture.centres).argmin(1)
    for k, weight in enumerate((0.25, 0.75)):
        own = found[label == k]
        error = 0.3 / math.sqrt(len(own))
        assert abs(len(own) / num - weight) < 5 * math.sqrt(weight * (1 - weight) / num) + 0.01
        assert (own.mean(0) - mixture.centres[k]).abs().max() < 5 * error + 0.01
        assert (own.std(0) - 0.3).abs().max() < 5 * error / math.sqrt(2) + 0.01


def test_the_sde_forgets_its_noise_and_obeys_its_seed() -> None:
    noise = normal(500)

    def once(**options: float) -> Tensor:
        return sample(THREE.field(), noise, steps=50, method="sde", **options)  # type: ignore[arg-type]

    assert torch.equal(once(seed=3), once(seed=3))
    assert not torch.equal(once(seed=3), once(seed=4))
    assert torch.equal(once(diffusion=0), sample(THREE.field(), noise, steps=50))
    nearest = [torch.cdist(once(seed=seed), THREE.centres).argmin(1) for seed in (3, 4)]
    assert (nearest[0] == nearest[1]).double().mean() < 0.9


def test_data_go_back_to_their_noise() -> None:
    noise = normal(20)
    data = sample(THREE.field(), noise, steps=200, method="heun")
    assert (sample(THREE.field(), data, steps=200, method="heun", start=1, end=0) - noise).abs().max() < 0.02


def test_before_step_changes_the_point_of_each_step() -> None:
    called: list[tuple[float, float]] = []

    def before_step(x: Tensor, t: float, dt: float) -> Tensor:
        called.append((t, dt))
        return x + 1

    still = sample(lambda x, t: torch.zeros_like(x), normal(3), steps=4, before_step=before_step)
    assert torch.allclose(still, normal(3) + 4)
    assert called == [(0, 0.25), (0.25, 0.25), (0.5, 0.25), (0.75, 0.25)]


def test_gradients_are_kept_only_if_asked_for() -> None:
    noise = normal(2).requires_grad_()
    assert not sample(THREE.field(), noise, steps=3).requires_grad
    moved = sample(THREE.field(), noise, steps=3, differentiable=True)
    (gradient,) = torch.autograd.grad(moved[0, 0], noise)
    step = torch.zeros_like(noise)
    step[0, 1] = 1e-6
    later, earlier = (sample(THREE.field(), noise.detach() + sign * step, steps=3) for sign in (1, -1))
    assert gradient[0, 1].item() == pytest.approx((later - earlier)[0, 0].item() / 2e-6, rel=1e-6)


@pytest.mark.parametrize("method", ["euler", "heun", "dpm2m", "sde"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_of_the_noise_stays(method: str, dtype: torch.dtype) -> None:
    seen = set()

    def field(x: Tensor, t: Tensor) -> Tensor:
        seen.add(t.dtype)
        return -x

    assert sample(field, normal(2, torch.float32).to(dtype), steps=3, method=method).dtype == dtype  # type: ignore[arg-type]
    assert seen == {torch.float32 if dtype == torch.bfloat16 else dtype}


def test_progress_is_told() -> None:
    told: list[float] = []
    sample(THREE.field(), normal(1), steps=4, progress=lambda title, done: told.append(done))
    assert told == [0.25, 0.5, 0.75, 1.0]


class Exact(nn.Module):
    """A network that predicts the noise of the three Gaussians without error."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path  # a name of its own, of no meaning to fields

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return -find_interpolant(self.path).sigma(t)[:, None] * THREE.score(x, t, path=self.path)


@pytest.mark.parametrize("path", ["linear", "trigonometric", "variance-preserving"])
@pytest.mark.parametrize("method", ["dpm2m", "sde"])
def test_the_path_is_that_of_the_field(path: str, method: Any) -> None:
    """And not the linear one, which a function is taken to have if no path is given."""
    network = field_of(Exact(path), predict="noise", path=path)
    options = {"steps": 16, "method": method, "start": 0.01, "end": 0.99}
    for field in (THREE.field(path=path), network):
        bare = partial(lambda field, x, t: field(x, t), field)
        found = sample(field, normal(20), **options)
        assert torch.equal(found, sample(bare, normal(20), path=path, **options))
        assert torch.equal(found, sample(bare, normal(20), **options)) == (path == "linear")
        for other in {"linear", "trigonometric"} - {path}:
            with pytest.raises(
                UseError, match=f"path is {other}, but the field has the {path} path: leave out"
            ):
                sample(field, normal(2), steps=2, path=other)


def test_where_a_field_is_infinite_the_argument_that_avoids_it_is_named() -> None:
    noise = field_of(Exact("linear"), predict="noise")
    with pytest.raises(UseError, match=r"at t = 0, the velocity from the noise .*: give start=0\.001$"):
        sample(noise, normal(2), steps=4)
    with pytest.raises(UseError, match=r"give end=0\.001$"):
        sample(noise, normal(2), steps=4, method="heun", start=1.0, end=0.0)
    with pytest.raises(UseError, match=r"give 0\.001 instead of 0 in times$"):
        sample(noise, normal(2), times=[0.0, 0.5, 1.0])
    with pytest.raises(UseError, match=r"at t = 1, the velocity of the variance-pre.*: give end=0\.999$"):
        sample(THREE.field(path="variance-preserving"), normal(2), steps=4, method="heun")
    found = sample(noise, normal(200), steps=200, start=0.001)
    assert (found - exact(200, 0.001, 1.0)).norm(dim=1).mean() < 0.005


def test_samples_that_are_not_finite_are_refused_with_their_step() -> None:
    def late(x: Tensor, t: Tensor) -> Tensor:
        return x / (t < 0.6)[:, None]  # by zero in the last step of four

    said = r"after step 4 of 4, from t = 0\.75 to 1, the samples are not finite"
    with pytest.raises(UseError, match=said):
        sample(late, normal(2), steps=4)
    noise = normal(2)
    noise[1, 0] = math.nan
    with pytest.raises(UseError, match="noise has values that are not finite"):
        sample(THREE.field(), noise, steps=4)


def test_times_may_be_a_tensor_or_an_array() -> None:
    times = [0.0, 0.25, 0.5, 0.75, 1.0]
    expected = sample(THREE.field(), normal(3), times=times)
    for given in (torch.tensor(times), np.array(times), np.array(times, np.float32)):
        assert torch.equal(sample(THREE.field(), normal(3), times=given), expected)  # type: ignore[arg-type]
    with pytest.raises(UseError, match=r"times is 0\.5: give at least two"):
        sample(THREE.field(), normal(3), times=torch.tensor(0.5))


def test_fields_that_cannot_be_called_are_refused() -> None:
    class Labelled(nn.Module):
        def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
            return x

    fix = r"give field_of\(model, labels\), or a function field\(x, t\)"
    with pytest.raises(UseError, match=f"field is the int 3: {fix}"):
        sample(3, normal(2), steps=1)  # type: ignore[arg-type]
    with pytest.raises(UseError, match=rf"field is a Labelled that takes \(x, t, label\): {fix}"):
        sample(Labelled(), normal(2), steps=1)
    for wrong, said in ((None, "None"), (normal(1), r"a tensor of shape \(1, 2\)")):
        with pytest.raises(UseError, match=rf"before_step returned {said} for points of shape \(2, 2\)"):
            sample(THREE.field(), normal(2), steps=1, before_step=lambda *_, wrong=wrong: wrong)


def test_wrong_arguments_are_refused() -> None:
    field, noise = THREE.field(), normal(2)
    for given in (0.0, 1.0):
        with pytest.raises(
            UseError, match=rf"diffusion is {given}, but heun adds no noise: use method='sde'"
        ):
            sample(field, noise, steps=1, method="heun", diffusion=given)
    with pytest.raises(UseError, match=r"start and end are both 0\.5: give two times"):
        sample(field, noise, steps=2, start=0.5, end=0.5)
    for steps in (0, -1, 2.5):
        with pytest.raises(UseError, match=f"steps is {steps}"):
            sample(field, noise, steps=steps)  # type: ignore[arg-type]
    with pytest.raises(UseError, match="steps is missing"):
        sample(field, noise)
    with pytest.raises(UseError, match=r"method is 'eulr'\. Did you mean 'euler'"):
        sample(field, noise, steps=1, method="eulr")  # type: ignore[arg-type]
    with pytest.raises(UseError, match="path is 'cosine'"):
        sample(field, noise, steps=1, path="cosine")
    with pytest.raises(UseError, match=r"end is 1\.5"):
        sample(field, noise, steps=1, end=1.5)
    with pytest.raises(UseError, match=r"times is -0\.1"):
        sample(field, noise, times=[-0.1, 1.0])
    for times in ([0.5], [0.0, 0.5, 0.5], [0.0, 0.8, 0.4]):
        with pytest.raises(UseError, match="give at least two, in strict order"):
            sample(field, noise, times=times)
    with pytest.raises(UseError, match="give times alone"):
        sample(field, noise, steps=2, times=[0.0, 1.0])
    for method in ("dpm2m", "sde"):
        with pytest.raises(UseError, match=f"{method} goes from noise to data, not from 1 to 0"):
            sample(field, noise, steps=2, method=method, start=1.0, end=0.0)  # type: ignore[arg-type]
    with pytest.raises(UseError, match="diffusion is -1"):
        sample(field, noise, steps=1, method="sde", diffusion=-1)
    with pytest.raises(UseError, match="seed is -1"):
        sample(field, noise, steps=1, method="sde", seed=-1)
    with pytest.raises(UseError, match="noise is a tensor of shape"):
        sample(field, noise.long(), steps=1)
    with pytest.raises(
        UseError, match=r"the field returned a tensor of shape \(2, 1\) for points of shape \(2, 2\)"
    ):
        sample(lambda x, t: x[:, :1], noise, steps=1)
