"""Inversion against linear samplers, whose bound and rate are known, and exact flows of mixtures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from theodolite import UseError
from theodolite.flows.inversion import Inversion, Sampler, StepBound, invert, step_bound
from theodolite.flows.mixture import GaussianMixture
from theodolite.flows.sampling import sample

F64 = torch.float64
ONE = GaussianMixture(torch.tensor([[1.0, -2.0]]), std=0.5)
CORNERS = GaussianMixture(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]]), std=0.5)


def _noise(num: int = 300, seed: int = 0, dimensions: int = 2) -> Tensor:
    return torch.randn(num, dimensions, dtype=F64, generator=torch.Generator().manual_seed(seed))


def _euler(mixture: GaussianMixture, steps: int = 20) -> Sampler:
    return lambda noise: sample(mixture.field(), noise, steps=steps)


def _factor(std: float, steps: int) -> float:
    """The factor by which Euler's method scales the noise of one Gaussian on the linear path."""
    factor = 1.0
    for t in (step / steps for step in range(steps)):
        factor *= 1 + (t * std**2 - (1 - t)) / ((t * std) ** 2 + (1 - t) ** 2) / steps
    return factor


def test_the_bound_of_one_gaussian_is_two_over_its_factor() -> None:
    bound = step_bound(_euler(ONE), _noise(20))
    assert 2 / _factor(0.5, 20) == pytest.approx(4.308, abs=5e-4)
    assert [value for _, value in bound.quantiles] == pytest.approx([2 / _factor(0.5, 20)] * 4, rel=1e-6)
    assert (bound.opposed, bound.pairs) == (0.0, 60)


@pytest.mark.parametrize(("share", "converges"), [(0.9, True), (1.1, False)])
def test_one_gaussian_converges_below_its_bound_and_diverges_above(share: float, converges: bool) -> None:
    step = share * 2 / _factor(0.5, 20)
    found = invert(_euler(ONE), _noise(5), step=step, iterations=60, tolerance=1e-15, patience=200)
    ratios = found.residuals[1:21] / found.residuals[:20]
    torch.testing.assert_close(ratios, torch.full_like(ratios, abs(1 - 2 * share)))
    assert bool((found.residuals[-1] < 1e-5).all()) is converges
    if not converges:
        assert found.status == "iterations"
        assert found.converged == 0.0
        assert found.residuals[-1].min() > 1e3


def test_close_pairs_find_what_random_pairs_miss() -> None:
    sampler = _euler(CORNERS)
    first, second = _noise(4000, 1), _noise(4000, 2)
    shifts, changes = second - first, sampler(second) - sampler(first)
    random_pairs = (2 * (shifts * changes).sum(1) / changes.square().sum(1)).min().item()
    close = step_bound(sampler, first, turns=0)
    assert close.least < 0.6 * random_pairs
    jacobians = torch.func.vmap(torch.func.jacrev(lambda z: sampler_of_one(z)))(first[:500])
    directions = torch.randn(4000, 1, 2, dtype=F64, generator=torch.Generator().manual_seed(3))
    directions = directions.expand(4000, 500, 2)
    mapped = (jacobians @ directions[..., None])[..., 0]
    exact = 2 * (directions * mapped).sum(-1) / mapped.square().sum(-1)
    turned = step_bound(sampler, first[:500], turns=4)
    assert turned.least == pytest.approx(exact.min().item(), rel=0.02)


def sampler_of_one(z: Tensor) -> Tensor:
    return sample(CORNERS.field(), z[None], steps=20, differentiable=True)[0]


def test_turns_find_the_one_direction_that_stretches_in_many_dimensions() -> None:
    factors = torch.ones(400, dtype=F64)
    factors[7] = 10.0
    random_directions, turned = (
        step_bound(lambda z: factors * z, _noise(4, dimensions=400), turns=turns).least for turns in (0, 4)
    )
    assert turned == pytest.approx(2 / 10.0, rel=1e-3)
    assert random_directions > 1.0


def test_a_rotation_has_no_step_that_contracts() -> None:
    turned = torch.tensor([[math.cos(2.0), math.sin(2.0)], [-math.sin(2.0), math.cos(2.0)]], dtype=F64)
    bound = step_bound(lambda z: z @ turned, _noise(10))
    assert (bound.least, bound.opposed) == (pytest.approx(2 * math.cos(2.0)), 1.0)
    assert math.isnan(bound.positive)
    assert "no step contracts for 100 % of 30 close pairs" in str(bound)
    with pytest.raises(UseError, match="in all of 258 pairs of noises the sample moves against the noise"):
        invert(lambda z: z @ turned, _noise(2))


@pytest.mark.parametrize("std", [0.5, 0.2])
def test_auto_inverts_samples_where_the_bound_is_too_small_to_arrive(std: float) -> None:
    """Mixtures stretch at a few places only, and the bound is for all places."""
    sampler = _euler(GaussianMixture(CORNERS.centres, std=std))
    target = sampler(_noise(seed=5))
    automatic = invert(sampler, target, iterations=150)
    bound = invert(sampler, target, step="bound", iterations=150)
    assert automatic.converged > 0.97
    assert automatic.converged >= bound.converged
    if std < 0.5:
        assert bound.converged < 0.5
    torch.testing.assert_close(
        (sampler(automatic.noise) - target).square().mean(1).sqrt(), automatic.residuals.min(0).values
    )
    assert bool((automatic.residuals.diff(dim=0) <= 0).all())


def test_auto_solves_a_linear_sampler_of_one_factor_in_one_or_two_iterations() -> None:
    found = invert(_euler(ONE), _noise(5), tolerance=1e-10)
    assert found.iterations <= 2
    torch.testing.assert_close(_euler(ONE)(found.noise), _noise(5))
    assert found.step == pytest.approx(1 / _factor(0.5, 20))
    assert found.evaluations == 2 + 18 * 4 + found.iterations


def test_auto_gives_each_example_its_own_step() -> None:
    factors = torch.tensor([[0.1], [1.0], [30.0]], dtype=F64)
    found = invert(lambda z: factors * z, _noise(3), tolerance=1e-10)
    assert found.iterations == 2
    torch.testing.assert_close(found.noise, _noise(3) / factors)


def test_the_bound_contracts_towards_the_noise_of_the_target() -> None:
    sampler, truth = _euler(CORNERS), _noise(50, 8)
    found = invert(sampler, sampler(truth), step="bound", iterations=400, tolerance=1e-10, patience=50)
    assert found.status == "converged"
    torch.testing.assert_close(found.noise, truth, atol=1e-6, rtol=0)


def test_an_edit_starts_from_the_noise_of_an_example_and_moves_towards_it() -> None:
    pair = GaussianMixture(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), std=0.3)
    source, edited = (lambda z, label=label: sample(pair.field(label), z, steps=20) for label in (0, 1))
    example = source(_noise(20))
    found = invert(edited, example, start=_noise(20), step=0.5, iterations=2, patience=9)
    before, after = ((edited(z) - example).norm(dim=1).mean().item() for z in (_noise(20), found.noise))
    assert before == pytest.approx(2.0, rel=1e-3)  # the distance of the two centres
    assert after == pytest.approx(2.0 * (1 - 0.5 * _factor(0.3, 20)) ** 2, rel=1e-3)


def test_the_number_of_small_steps_sets_how_much_of_the_new_class_is_kept() -> None:
    """Samples of one Gaussian are a multiple of the noise: each step leaves 1 − ηa of the way."""
    mixture, factor = GaussianMixture(CORNERS.centres, 0.2), _factor(0.2, 20)
    old, new = (lambda z, label=label: sample(mixture.field(label), z, steps=20) for label in (0, 1))
    data, _ = GaussianMixture(CORNERS.centres[:1], 0.2).sample(200, "old", dtype=F64)
    noise = invert(old, data, tolerance=1e-9).noise
    for iterations in (1, 8, 64):
        edited = new(invert(new, data, start=noise, step=0.1, iterations=iterations, patience=100).noise)
        left = (1 - 0.1 * factor) ** iterations
        expected = data + left * (CORNERS.centres[1] - CORNERS.centres[0])
        torch.testing.assert_close(edited, expected, rtol=0, atol=1e-6)
    kept = (torch.cdist(expected, CORNERS.centres).argmin(1) == 1).double().mean()
    assert kept < 0.5  # after 64
    arrived = new(invert(new, data, start=noise, iterations=1).noise)
    torch.testing.assert_close(arrived, data, rtol=0, atol=1e-3)  # by the default step, at once


def test_slow_convergence_is_no_stall() -> None:
    """The residual falls by 0.5 % in an iteration, and by 10 % in 20."""
    found = invert(lambda z: 0.5 * z, _noise(2), step=0.01, iterations=2000)
    assert found.status == "converged"


def test_a_target_that_cannot_be_reached_stalls() -> None:
    found = invert(lambda z: z.tanh(), torch.full((3, 2), 2.0), step=0.5, patience=5)
    assert found.status == "stalled"
    assert found.iterations < 200
    assert "make no more progress" in " ".join(str(found).split())


def test_an_example_that_overflows_keeps_its_best_noise() -> None:
    def cubic(z: Tensor) -> Tensor:
        assert bool(z.isfinite().all())
        return z**3

    start = torch.tensor([[1.2, 1.2], [30.0, 30.0]])
    found = invert(cubic, torch.ones(2, 2), step=0.3, start=start, iterations=40, patience=100)
    assert found.converged == 0.5
    torch.testing.assert_close(found.noise, torch.tensor([[1.0, 1.0], [30.0, 30.0]]), atol=1e-3, rtol=0)
    assert found.residuals.isinf().any()
    rows = json.loads(found.to_json())["residuals"]
    assert [row["largest"] is None for row in rows] == found.residuals.isinf().any(1).tolist()


def test_a_sampler_that_overflows_for_one_example_goes_on_with_the_others() -> None:
    """`sample` alone refuses values that are not finite."""

    def sampler(noise: Tensor) -> Tensor:
        return sample(lambda x, t: x**3 - x, noise, steps=1)

    start = torch.tensor([[1.2, 1.2], [30.0, 30.0]])
    found = invert(sampler, torch.ones(2, 2), step=0.3, start=start, iterations=40, patience=100)
    torch.testing.assert_close(found.noise, torch.tensor([[1.0, 1.0], [30.0, 30.0]]), atol=1e-3, rtol=0)
    assert found.residuals.isinf().any()
    with pytest.raises(UseError, match="the samples are not finite"):
        sampler(torch.full((1, 1), 1e30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_precision_is_that_of_the_target(dtype: torch.dtype) -> None:
    seen: set[torch.dtype] = set()

    def half(noise: Tensor) -> Tensor:
        seen.add(noise.dtype)
        return 0.5 * noise

    found = invert(half, torch.ones(2, 3, dtype=dtype), start=torch.zeros(2, 3, dtype=F64))
    assert seen == {dtype}
    torch.testing.assert_close(found.noise, torch.full((2, 3), 2.0, dtype=dtype), rtol=0, atol=3e-3)


def test_half_precision_is_updated_in_float32() -> None:
    target = torch.full((2, 3), 0.5).bfloat16()
    found = invert(lambda z: 0.5 * z, target, step=0.01, iterations=1600, tolerance=5e-3, patience=400)
    assert found.noise.dtype == torch.bfloat16
    assert found.status == "converged"  # in bfloat16 moves of 0.01 × 0.005 would be lost
    assert step_bound(lambda z: 0.5 * z, target).least == pytest.approx(4.0, rel=0.05)


def test_the_result_prints_saves_and_leaves_its_tensors_out_of_json(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    sampler = _euler(CORNERS)
    found = invert(
        sampler, sampler(_noise(40)), iterations=60, progress=lambda title, done: told.append((title, done))
    )
    text = str(found)
    assert "median residual" in text
    assert "100 % of 40 examples have a residual of at most 0.001" in text
    content = json.loads(found.save(tmp_path / "inversion.json").read_text())
    assert len(content["residuals"]) == found.iterations + 1
    assert content["residuals"][0]["largest"] == pytest.approx(found.residuals[0].max().item())
    assert [content["residuals"][place]["converged"] for place in (0, -1)] == [0.0, 1.0]
    assert content["bound"]["pairs"] == 360
    assert "noise" not in content
    assert "Residuals" in found.save(tmp_path / "inversion.html").read_text()
    assert found.save(tmp_path / "inversion.csv").read_text().count("\n") >= 4
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert {title for title, _ in told} == {"measuring the step", "inverting"}
    assert isinstance(found.bound, StepBound)
    path = found.bound.save(tmp_path / "bound.json")
    assert StepBound.load(path) == found.bound


def test_the_global_generator_is_left_alone_and_seeds_decide() -> None:
    before = torch.get_rng_state()
    sampler, target = _euler(CORNERS), _noise(4)
    runs: list[Inversion] = [invert(sampler, target, iterations=2, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(runs[0].residuals, runs[1].residuals)
    assert not torch.equal(runs[0].residuals, runs[2].residuals)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"iterations": 0}, "iterations is 0"),
        ({"step": 0.0}, "step is 0.0: give a positive number, 'auto' or 'bound'"),
        ({"step": -1.0}, "step is -1.0"),
        ({"step": "autos"}, "Did you mean 'auto'"),
        ({"patience": 0}, "patience is 0"),
        ({"tolerance": -1.0}, "tolerance is -1"),
        ({"start": torch.zeros(3, 2)}, r"start has shape \(3, 2\) and target \(4, 2\)"),
        ({"start": torch.full((4, 2), torch.nan)}, "start has values that are not finite"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UseError, match=said):
        invert(lambda z: z, torch.zeros(4, 2), **options)


def _random(z: Tensor) -> Tensor:
    return z + torch.randn(z.shape)


@pytest.mark.parametrize(
    ("sampler", "target", "said"),
    [
        (lambda z: z, torch.tensor([[1.0, torch.inf]]), "target has values that are not finite"),
        (lambda z: z, torch.zeros(3), "target is torch.float32 \\(3,\\): give a tensor of floats"),
        (lambda z: z, torch.zeros(3, 2).long(), "target is torch.int64"),
        (lambda z: z, [1.0], "target is \\[1.0\\]"),
        (
            lambda z: z[:, :1],
            torch.zeros(4, 2),
            r"returned a tensor of shape \(4, 1\) for points of shape \(4",
        ),
        (lambda z: [z], torch.zeros(4, 2), "returned a list"),
        (None, torch.zeros(4, 2), "sampler is None: give a function of the noise, such as lambda noise"),
        (lambda z, t: z, torch.zeros(4, 2), r"sampler is a function that takes \(z, t\): give a function of"),
        (lambda z: z / 0, torch.zeros(4, 2), "returns values that are not finite"),
        (_random, torch.zeros(4, 2), "gives two samples for the same noise"),
        (lambda z: 0 * z, torch.ones(4, 2), "constant or not finite around some noise"),
    ],
)
def test_bad_targets_and_samplers_are_refused(sampler: Sampler, target: Any, said: str) -> None:
    with pytest.raises(UseError, match=said):
        invert(sampler, target)
    if not callable(sampler):
        with pytest.raises(UseError, match=said):
            step_bound(sampler, target)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_noise_is_that_of_the_cpu() -> None:
    sampler, truth = _euler(CORNERS), _noise(20, 8)
    options: dict[str, Any] = {"step": "bound", "iterations": 400, "tolerance": 1e-9, "patience": 50}
    found = invert(sampler, sampler(truth.cuda()), start=_noise(20, 9), **options)
    assert found.noise.is_cuda
    torch.testing.assert_close(found.noise.cpu(), truth, atol=1e-5, rtol=0)
    automatic = invert(sampler, sampler(truth.cuda()))
    assert automatic.converged == 1.0
    assert not automatic.residuals.is_cuda
