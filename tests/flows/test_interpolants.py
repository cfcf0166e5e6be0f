"""Paths, and the conversions between the four quantities that a network may predict."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

from theodolite import UseError
from theodolite.flows import LINEAR, GaussianMixture, Interpolant, convert, find_interpolant
from theodolite.flows.interpolants import INTERPOLANTS, finite_times

QUANTITIES = ("data", "noise", "score", "velocity")
PATHS = list(INTERPOLANTS.values())
each_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)


def at(*times: float) -> Tensor:
    return torch.tensor(times, dtype=torch.float64)


@each_path
def test_rates_are_derivatives(path: Interpolant) -> None:
    t, step = torch.linspace(0.01, 0.98, 50, dtype=torch.float64), 1e-6
    for function, rate in ((path.alpha, path.alpha_rate), (path.sigma, path.sigma_rate)):
        slope = (function(t + step) - function(t - step)) / (2 * step)
        assert torch.allclose(rate(t), slope, rtol=1e-7, atol=1e-7)


@each_path
def test_paths_end_at_the_data_itself(path: Interpolant) -> None:
    noise, data = torch.randn(2, 4, 3, dtype=torch.float64)
    assert torch.equal(path.between(noise, data, torch.ones(4, dtype=torch.float64)), data)


def test_the_paths_are_the_known_ones() -> None:
    t = at(0.0, 0.3, 1.0)
    trigonometric, preserving = find_interpolant("trigonometric"), find_interpolant("variance-preserving")
    assert torch.allclose(trigonometric.sigma(t), (math.pi / 2 * t).cos(), atol=1e-15)
    assert torch.allclose(preserving.alpha(t) ** 2 + preserving.sigma(t) ** 2, torch.ones(3).double())
    # half of the integral of β = 20 − 19.9 t from t to 1, by the trapezoid rule, which is exact here
    mean = (20 - 19.9 * t + 0.1) / 2
    assert torch.allclose(preserving.alpha(t), (-mean * (1 - t) / 2).exp())


@each_path
@pytest.mark.parametrize("source", QUANTITIES)
@pytest.mark.parametrize("target", QUANTITIES)
def test_conversions_agree_with_the_definitions(path: Interpolant, source: str, target: str) -> None:
    """`x = αX + σε`, `score = −ε/σ`, `velocity = α′X + σ′ε`, for arbitrary X and ε."""
    mean_data, mean_noise = torch.randn(2, 64, 2, 3, dtype=torch.float64)
    t = torch.linspace(0.05, 0.95, 64, dtype=torch.float64)
    wide = t[:, None, None]
    values = {
        "data": mean_data,
        "noise": mean_noise,
        "score": -mean_noise / path.sigma(wide),
        "velocity": path.alpha_rate(wide) * mean_data + path.sigma_rate(wide) * mean_noise,
    }
    x = path.alpha(wide) * mean_data + path.sigma(wide) * mean_noise
    found = convert(values[source], x, t, source, target, path)  # type: ignore[arg-type]
    error = (found - values[target]).abs().max() / values[target].abs().max()
    assert error < 1e-12


@each_path
@pytest.mark.parametrize("quantity", ["data", "noise", "velocity"])
def test_conversions_of_a_mixture_give_the_gradient_of_its_log_density(
    path: Interpolant, quantity: str
) -> None:
    mixture = GaussianMixture([[1.0, 0.0], [-0.5, 2.0], [0.3, -1.0]], 0.4, [1, 2, 3])
    x = torch.randn(50, 2, dtype=torch.float64, requires_grad=True)
    t = torch.linspace(0.05, 0.95, 50, dtype=torch.float64)
    (score,) = torch.autograd.grad(mixture.log_density(x, t, path=path).sum(), x)
    x = x.detach()
    data = mixture.denoised(x, t, path=path)
    alpha, sigma = path.alpha(t)[:, None], path.sigma(t)[:, None]
    noise = (x - alpha * data) / sigma
    value = {"data": data, "noise": noise, "velocity": mixture.velocity(x, t, path=path)}[quantity]
    found = convert(value, x, t, quantity, "score", path)  # type: ignore[arg-type]
    assert torch.allclose(found, score, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("source", "target", "time"),
    [
        ("noise", "data", 0.0),
        ("score", "velocity", 0.0),
        ("data", "velocity", 1.0),
        ("data", "noise", 1.0),
        ("velocity", "score", 1.0),
    ],
)
@pytest.mark.parametrize("path", ["linear", "trigonometric"])
def test_conversions_that_divide_by_zero_are_refused(
    path: str, source: str, target: str, time: float
) -> None:
    x, t = torch.ones(2, 1), torch.tensor([0.5, time])
    with pytest.raises(UseError, match=f"at t = {time:g}, the {target} from the {source}"):
        convert(x, x, t, source, target, path)  # type: ignore[arg-type]


def test_conversions_that_are_finite_at_the_ends_are_made_there() -> None:
    x, value, t = torch.tensor([[2.0], [2.0]]), torch.tensor([[3.0], [3.0]]), torch.tensor([0.0, 1.0])
    assert convert(value, x, t, "velocity", "data").flatten().tolist() == [5, 2]
    assert convert(value, x, t, "velocity", "noise").flatten().tolist() == [2, -1]
    assert convert(value, x, t, "score", "noise").flatten().tolist() == [-3, 0]


def test_only_targets_that_are_infinite_leave_out_an_end() -> None:
    found = {(q, p.name): finite_times(q, p) for q in QUANTITIES for p in PATHS}  # type: ignore[arg-type]
    cut = {key for key, times in found.items() if times != (0, 1)}
    assert cut == {("score", path.name) for path in PATHS} | {("velocity", "variance-preserving")}
    assert {found[key] for key in cut} == {(0, 0.999)}


def test_dtype_and_shape_stay() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(3, 2, 4, 4, dtype=dtype)
        found = convert(x, x, torch.rand(3, dtype=torch.float64), "velocity", "score")
        assert found.dtype == dtype
        assert found.shape == x.shape


@each_path
def test_a_path_can_be_sent_to_another_process(path: Interpolant) -> None:
    assert pickle.loads(pickle.dumps(path)) == path


def test_wrong_arguments_are_refused() -> None:
    x, t = torch.ones(2, 3), torch.tensor([0.2, 0.4])
    with pytest.raises(UseError, match=r"t holds 1\.5"):
        convert(x, x, torch.tensor([0.5, 1.5]), "data", "noise")
    with pytest.raises(UseError, match="t holds nan"):
        LINEAR.between(x, x, torch.tensor([0.5, math.nan]))
    with pytest.raises(UseError, match="t is 1: give a tensor"):
        convert(x, x, 1, "data", "noise")  # type: ignore[arg-type]
    for times in (torch.tensor(0.5), torch.rand(1), torch.rand(3), torch.rand(2, 1)):
        for call in (LINEAR.between, LINEAR.velocity, lambda *one: convert(*one, "data", "noise")):
            with pytest.raises(
                UseError, match=r"t has the shape \(.*\) for x \(2, 3\): give one time for each x"
            ):
                call(x, x, times)
    with pytest.raises(UseError, match="source is 'speed'"):
        convert(x, x, t, "speed", "noise")  # type: ignore[arg-type]
    with pytest.raises(UseError, match=r"target is 'nois'\. Did you mean 'noise'"):
        convert(x, x, t, "data", "nois")  # type: ignore[arg-type]
    with pytest.raises(UseError, match="path is 'vp'"):
        convert(x, x, t, "data", "noise", "vp")
    with pytest.raises(UseError, match=r"value has the shape \(2, 1\) and x \(2, 3\)"):
        convert(x[:, :1], x, t, "data", "noise")
    with pytest.raises(UseError, match="the velocity of the variance-preserving path is infinite"):
        find_interpolant("variance-preserving").velocity(x, x, torch.ones(2))
