"""Guidance against Gaussians, whose fields are exact, and fixed points against linear maps."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite import UseError
from theodolite.flows.guidance import CountedField, fixed_point, guided, projection
from theodolite.flows.mixture import GaussianMixture
from theodolite.flows.sampling import sample

F64 = torch.float64
DIRECTIONS = torch.tensor([[math.cos(turn), math.sin(turn)] for turn in (1.57, 3.67, 5.76)], dtype=F64)
MIXTURE = GaussianMixture(2.4 * DIRECTIONS, std=0.3)
CLASS = 1


def _noise(num: int = 2000) -> Tensor:
    return torch.randn(num, 2, dtype=F64, generator=torch.Generator().manual_seed(0))


def _contraction() -> tuple[Tensor, Tensor, Tensor]:
    """A linear map `Ax + b` with the singular values 0.9, 0.5 and 0.2, and its fixed point."""
    chance = torch.Generator().manual_seed(1)
    left, right = (
        torch.linalg.qr(torch.randn(3, 3, dtype=F64, generator=chance)).Q.contiguous() for _ in "lr"
    )
    matrix = left @ torch.diag(torch.tensor([0.9, 0.5, 0.2], dtype=F64)) @ right
    shift = torch.randn(3, dtype=F64, generator=chance)
    return matrix, shift, torch.linalg.solve(torch.eye(3, dtype=F64) - matrix, shift)


def test_guidance_extrapolates_from_the_unconditional_to_the_conditional_velocity() -> None:
    x, t = _noise(50), torch.full((50,), 0.3, dtype=F64)
    without, within = MIXTURE.velocity(x, t), MIXTURE.velocity(x, t, CLASS)
    for scale in (0.0, 0.4, 1.0, 3.0):
        found = guided(MIXTURE.field(), MIXTURE.field(CLASS), scale)(x, t)
        torch.testing.assert_close(found, (1 - scale) * without + scale * within)


@pytest.mark.parametrize(("scale", "expected"), [(0.0, (10, 0)), (1.0, (0, 10)), (2.0, (10, 10))])
def test_only_fields_that_matter_are_evaluated(scale: float, expected: tuple[int, int]) -> None:
    fields = [CountedField(MIXTURE.field(label)) for label in (None, CLASS)]
    sample(guided(*fields, scale), _noise(4), steps=10)
    assert (fields[0].evaluations, fields[1].evaluations) == expected


@pytest.mark.parametrize("method", ["picard", "anderson"])
def test_projection_costs_two_evaluations_an_iteration_in_the_steps_before_its_end(method: Any) -> None:
    field = CountedField(MIXTURE.field())
    pull = projection(field, field, iterations=2, until=0.6, method=method)
    sample(guided(field, field, 2.0), _noise(4), steps=10, before_step=pull)
    assert field.evaluations == 2 * 10 + 6 * 2 * 2


def test_projection_goes_half_a_step_back_without_the_condition_and_forward_with_it() -> None:
    pull = projection(lambda x, t: 3.0 * x, lambda x, t: 5.0 * x, iterations=2)
    found = pull(torch.ones(1, 1, dtype=F64), 0.0, 0.2)
    assert found.item() == pytest.approx(((1 - 0.1 * 3.0) * (1 + 0.1 * 5.0)) ** 2)


def test_times_that_are_rounded_below_the_end_are_not_projected() -> None:
    field = CountedField(MIXTURE.field())
    pull = projection(field, field, iterations=1, until=0.6)
    x = _noise(4)
    assert pull(x, 0.6 - 1e-7, 0.1) is x
    assert field.evaluations == 0
    assert pull(x, 0.59, 0.1) is not x


def test_picard_contracts_at_the_rate_of_the_map() -> None:
    matrix, shift, fixed = _contraction()
    rate = torch.linalg.eigvals(matrix).abs().max().item()
    away = [
        (fixed_point(lambda x: x @ matrix.T + shift, torch.zeros(1, 3, dtype=F64), iterations=num) - fixed)
        .norm()
        .item()
        for num in (60, 70)
    ]
    assert (away[1] / away[0]) ** 0.1 == pytest.approx(rate, rel=0.05)


def test_damped_picard_has_the_rate_of_the_damped_map() -> None:
    for damping in (0.25, 0.5, 1.0):
        found = fixed_point(lambda x: 0.5 * x, torch.ones(1, 1, dtype=F64), iterations=4, damping=damping)
        assert found.item() == pytest.approx((1 - 0.5 * damping) ** 4)


@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_anderson_finds_the_fixed_point_of_a_linear_map_in_as_many_steps_as_dimensions(
    damping: float,
) -> None:
    matrix, shift, fixed = _contraction()
    starts = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"window": 3, "ridge": 0.0, "damping": damping}
    found = fixed_point(lambda x: x @ matrix.T + shift, starts, iterations=4, **options)
    torch.testing.assert_close(found, fixed.expand(5, 3), rtol=1e-6, atol=1e-6)
    picard = fixed_point(lambda x: x @ matrix.T + shift, starts, iterations=4)
    assert (picard - fixed).norm(dim=1).min() > 1e-2
    after = fixed_point(lambda x: x @ matrix.T + shift, starts, iterations=9, **options)
    torch.testing.assert_close(after, fixed.expand(5, 3), rtol=1e-6, atol=1e-6)  # no division by zero


@pytest.mark.parametrize("damping", [1.0, 0.3])
def test_anderson_with_one_earlier_iterate_is_the_formula(damping: float) -> None:
    def function(x: Tensor) -> Tensor:
        return 0.8 * x.cos() + 0.1 * x.flip(1)

    x0 = _noise(6)
    g0 = function(x0)
    x1 = (1 - damping) * x0 + damping * g0
    g1 = function(x1)
    f0, f1 = g0 - x0, g1 - x1
    theta = ((f1 * (f1 - f0)).sum(1) / ((f1 - f0).square().sum(1) + 1e-2))[:, None]
    expected = (1 - damping) * (x1 - theta * (x1 - x0)) + damping * (g1 - theta * (g1 - g0))
    found = fixed_point(function, x0, iterations=2, window=1, ridge=1e-2, damping=damping)
    torch.testing.assert_close(found, expected)


def test_examples_do_not_depend_on_their_batch() -> None:
    pull = projection(MIXTURE.field(), MIXTURE.field(CLASS), iterations=3, method="anderson")
    x = _noise(8)
    torch.testing.assert_close(pull(x, 0.2, 0.1)[:1], pull(x[:1], 0.2, 0.1))


def test_projection_lets_the_gap_shrink_and_the_samples_leave_the_class() -> None:
    """The mean gap, the error of the mean and the spread, as another implementation measured them.

    Where it had its centres is not known: the distance 2.4 was chosen to agree with its gaps. What is checked
    is how the three rows differ.
    """
    found = {}
    for method, iterations in (("none", 0), ("picard", 2), ("anderson", 2)):
        gaps = []

        def observed(x: Tensor, t: Tensor, gaps: list[float] = gaps) -> Tensor:
            within = MIXTURE.velocity(x, t, CLASS)
            gaps.append((within - MIXTURE.velocity(x, t)).norm(dim=1).mean().item())
            return within

        pull: Any = None
        if iterations:
            fields = MIXTURE.field(), MIXTURE.field(CLASS)
            pull = projection(*fields, iterations=iterations, method=method)  # type: ignore[arg-type]
        ends = sample(observed, _noise(), steps=10, before_step=pull)
        off = (ends.mean(0) - MIXTURE.centres[CLASS]).norm().item()
        found[method] = (sum(gaps) / len(gaps), off, ends.std(0).mean().item())
    assert found["none"] == pytest.approx((1.16, 0.004, 0.25), abs=0.05)
    assert found["picard"] == pytest.approx((0.78, 0.25, 0.19), abs=0.05)
    assert found["anderson"] == pytest.approx((0.63, 0.39, 0.15), abs=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_mixed_in_float32(dtype: torch.dtype) -> None:
    start = torch.tensor([[1.0, -2.0]], dtype=dtype)
    found = fixed_point(lambda x: 0.5 * x, start, iterations=2, window=1, ridge=0.0)
    assert found.dtype == dtype
    assert found.abs().max().item() < 1e-6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"iterations": 0}, "iterations is 0"),
        ({"iterations": 1, "until": 1.5}, "until is 1.5"),
        ({"iterations": 1, "method": "andersen"}, "Did you mean 'anderson'"),
        ({"iterations": 1, "window": 0}, "window is 0"),
        ({"iterations": 1, "damping": 0.0}, "damping is 0"),
        ({"iterations": 1, "damping": 1.5}, "damping is 1.5"),
        ({"iterations": 1, "ridge": -1.0}, "ridge is -1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UseError, match=said):
        projection(MIXTURE.field(), MIXTURE.field(CLASS), **options)


def test_guided_fields_have_the_path_of_both() -> None:
    path = "trigonometric"
    u, c, noise = MIXTURE.field(path=path), MIXTURE.field(CLASS, path), _noise(20)
    for field in (guided(u, c, 2.0), guided(CountedField(u), CountedField(c), 2.0), guided(u, c, 1.0)):
        bare = partial(lambda field, x, t: field(x, t), field)  # which knows no path
        found = sample(field, noise, steps=10, method="dpm2m")
        assert torch.equal(found, sample(bare, noise, steps=10, method="dpm2m", path=path))
        with pytest.raises(UseError, match="path is linear, but the field has the trigonometric path"):
            sample(field, noise, steps=10, path="linear")
    for combine in (partial(guided, scale=2.0), partial(projection, iterations=1)):
        with pytest.raises(UseError, match="unconditional field has the trigonometric path and the condit"):
            combine(u, MIXTURE.field(CLASS))


def test_bad_scales_and_fields_are_refused() -> None:
    with pytest.raises(UseError, match=r"scale is -1\.0"):
        guided(MIXTURE.field(), MIXTURE.field(), -1.0)
    said = (
        r"the conditional field returned a tensor of shape \(4, 1\) for points of shape \(4, 2\): return one"
    )
    with pytest.raises(UseError, match=said):
        guided(MIXTURE.field(), lambda x, t: x[:, :1], 2.0)(_noise(4), torch.zeros(4, dtype=F64))
    nothing: Any = lambda x, t: None  # noqa: E731
    with pytest.raises(UseError, match="the unconditional field returned None for points"):
        guided(nothing, MIXTURE.field(), 2.0)(_noise(4), torch.zeros(4, dtype=F64))
    with pytest.raises(UseError, match="the conditional field returned None for points"):
        projection(MIXTURE.field(), nothing, iterations=1)(_noise(4), 0.0, 0.1)
    with pytest.raises(UseError, match="function returned None for points"):
        fixed_point(lambda x: None, _noise(4), iterations=1)  # type: ignore[arg-type,return-value]
    field = MIXTURE.field()
    for wrong, said in ((3, "the int 3"), (nn.Linear(2, 2), r"a Linear that takes \(input\)")):
        for combine in (partial(guided, scale=2.0), partial(projection, iterations=1)):
            for name, given in (("unconditional", (wrong, field)), ("conditional", (field, wrong))):
                with pytest.raises(UseError, match=rf"^{name} is {said}: give field_of\(model, labels\), or"):
                    combine(*given)
    with pytest.raises(UseError, match=r"function returned a tensor of shape \(4, 1\) for points"):
        fixed_point(lambda x: x[:, :1], _noise(4), iterations=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_samples_are_those_of_the_cpu() -> None:
    u, c = MIXTURE.field(), MIXTURE.field(CLASS)
    pull = projection(u, c, iterations=3, method="anderson", window=2)
    here, there = (
        sample(guided(u, c, 2.0), _noise(50).to(device), steps=10, before_step=pull)
        for device in ("cpu", "cuda")
    )
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=1e-6)
