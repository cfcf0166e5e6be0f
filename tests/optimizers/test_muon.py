"""Muon against a plain reference in float64, and against torch's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.optimizers import Base, Hyper, Muon, NonFiniteError, SpectralSphere
from theodolite.optimizers.step_checks import check_step

from .reference import (
    Reference,
    Rows,
    State,
    Step,
    moved,
    muon_update,
    orthogonal_first,
    orthogonal_rows,
    orthogonal_rows_alone,
    orthogonal_unequal,
    unit_rows,
    unit_unequal,
)


def _orthogonal(x: Tensor, eps: float, steps: int = 5) -> Tensor:
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    sigma = sigma / (sigma.square().sum().sqrt() + eps)
    for _ in range(steps):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    return (u * sigma) @ vh


SCALE = {
    "none": lambda out, inn: 1.0,
    "original": lambda out, inn: max(1.0, out / inn) ** 0.5,
    "rms": lambda out, inn: 0.2 * max(out, inn) ** 0.5,
    "spectral": lambda out, inn: (out / inn) ** 0.5,
}


def _by_the_paper(scale: str) -> Step:
    def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
        return moved(w, SCALE[scale](*w.shape) * muon_update(g, hyper, state), hyper)

    return step


def _muon(scale: str, rows: Rows, rows_alone: Rows = orthogonal_rows_alone, **given: Any) -> Reference:
    def first(gradient: Tensor, **_: Any) -> Tensor:
        return SCALE[scale](*gradient.shape[-2:]) * orthogonal_first(gradient)

    base = Base(lr=0.03, weight_decay=0.5, eps=0.5)
    return Reference(_by_the_paper(scale), first, rows, rows_alone, base=base, **given)


REFERENCES = {
    "muon": _muon("none", orthogonal_rows, unequal=orthogonal_unequal),
    "muon-original": _muon(
        "original",
        lambda n, L: {
            **orthogonal_rows(n, L),
            "input": (1, 1, 1 / math.sqrt(n)),
            "input in block": (1, 1, 1 / (L * math.sqrt(n))),
        },
        unequal=orthogonal_unequal,
    ),
    "muon-kimi": _muon(
        "rms",
        lambda n, L: {
            "input": (1, 1, 1 / math.sqrt(n)),
            "hidden": (1 / math.sqrt(n), math.sqrt(n), 1 / L),
            "output": (1, 1, 1 / math.sqrt(n)),
            "input in block": (1, 1, 1 / (L * math.sqrt(n))),
            "output in block": (1, 1, 1 / (L * math.sqrt(n))),
        },
        lambda n, L: {"hidden": (1 / math.sqrt(n * L), math.sqrt(n), 1 / math.sqrt(L))},
        unequal=lambda i, o, L: (math.sqrt(o) / i, i / math.sqrt(o), math.sqrt(i / o) / L),
    ),
    "muon-spectral": _muon("spectral", unit_rows, unequal=unit_unequal),
}


def _reference(weight: Tensor, grads: list[Tensor], scale: str, nesterov: bool) -> Tensor:
    """A few steps on one (out, in) matrix, written down as in the literature."""
    lr, decay, momentum = 0.1, 0.2, 0.9
    moment = torch.zeros_like(weight)
    for grad in grads:
        moment = momentum * moment + (1 - momentum) * grad
        ahead = momentum * moment + (1 - momentum) * grad if nesterov else moment
        weight = weight - lr * decay * weight - lr * SCALE[scale](*weight.shape) * _orthogonal(ahead, 1e-7)
    return weight


def _run(weight: Tensor, grads: list[Tensor], **options: Any) -> Tensor:
    param = nn.Parameter(weight.clone())
    optimizer = Muon([param], lr=0.1, weight_decay=0.2, momentum=0.9, **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, grad), "the gradient was changed"
    return param.detach()


def _noise(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    return torch.randn(shape, dtype=dtype), [torch.randn(shape, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("scale", SCALE)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 6), (8, 3), (3, 8)])
def test_a_matrix(shape: tuple[int, int], scale: str, nesterov: bool) -> None:
    weight, grads = _noise(*shape)
    expected = _reference(weight, grads, scale, nesterov)
    torch.testing.assert_close(
        _run(weight, grads, scale=scale, nesterov=nesterov), expected, rtol=1e-9, atol=0
    )


def test_a_transposed_weight_moves_as_the_weight_does() -> None:
    weight, grads = _noise(8, 3)
    expected = _reference(weight, grads, "spectral", True)
    turned = _run(weight.T, [grad.T for grad in grads], scale="spectral", axes=((0,), (1,)))
    torch.testing.assert_close(turned.T, expected, rtol=1e-9, atol=0)


def test_a_kernel_is_a_matrix_of_outputs_by_inputs_and_positions() -> None:
    weight, grads = _noise(6, 4, 3, 3)
    expected = _reference(weight.flatten(1), [grad.flatten(1) for grad in grads], "original", True)
    got = _run(weight, grads, scale="original", axes=((1, 2, 3), (0,)))
    torch.testing.assert_close(got.flatten(1), expected, rtol=1e-9, atol=0)


def test_experts_are_so_many_matrices() -> None:
    weight, grads = _noise(3, 5, 8)  # (expert, in, out)
    got = _run(weight, grads, scale="rms", axes=((1,), (2,)))
    for expert in range(3):
        expected = _reference(weight[expert].T, [grad[expert].T for grad in grads], "rms", True)
        torch.testing.assert_close(got[expert].T, expected, rtol=1e-9, atol=0)


def test_matrices_in_one_group_do_not_touch_each_other() -> None:
    shapes = [(4, 6), (6, 4), (4, 6), (5, 5)]
    cases = [_noise(*shape) for shape in shapes]
    params = [nn.Parameter(weight.clone()) for weight, _ in cases]
    optimizer = Muon(params, lr=0.1, weight_decay=0.2, momentum=0.9)
    for step in range(3):
        for param, (_, grads) in zip(params, cases, strict=True):
            param.grad = grads[step]
        optimizer.step()
    for param, (weight, grads) in zip(params, cases, strict=True):
        torch.testing.assert_close(param.detach(), _reference(weight, grads, "none", True), rtol=1e-9, atol=0)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
@pytest.mark.parametrize(("adjust", "scale"), [("original", "original"), ("match_rms_adamw", "rms")])
def test_agrees_with_torch_up_to_its_bfloat16(
    adjust: str, scale: str, shape: tuple[int, int], nesterov: bool
) -> None:
    weight, grads = _noise(*shape, dtype=torch.float32)
    mine = _run(weight, grads, scale=scale, nesterov=nesterov)
    param = nn.Parameter(weight.clone())
    torchs = torch.optim.Muon(
        [param], lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn=adjust, nesterov=nesterov
    )
    for grad in grads:
        param.grad = grad.clone()
        torchs.step()
    moved = (param.detach() - weight).norm()
    assert (mine - param.detach()).norm() < 0.02 * moved


@pytest.mark.parametrize("nesterov", [True, False])
def test_bfloat16_keeps_a_moment_that_is_the_average_of_gradients(nesterov: bool) -> None:
    param = nn.Parameter(torch.randn(8, 8).bfloat16())
    optimizer = Muon([param], momentum=0.5, nesterov=nesterov)
    average = torch.zeros(8, 8)
    for _ in range(4):
        grad = torch.randn(8, 8).bfloat16()
        average = 0.5 * average + 0.5 * grad.float()
        param.grad = grad.clone()
        optimizer.step()
    moment = optimizer.state[param]["momentum_buffer"]
    assert moment.dtype == torch.bfloat16
    torch.testing.assert_close(moment.float(), average, rtol=0.02, atol=0.02)


def test_eps_is_added_to_the_norm_of_the_matrix() -> None:
    weight, grads = torch.zeros(4, 4, dtype=torch.float64), [torch.eye(4, dtype=torch.float64)]
    got = _run(weight, grads, eps=3.0, steps=1, nesterov=False)
    # momentum 0.9: M = 0.1·I of Frobenius norm 0.2
    sigma = 0.1 / (0.2 + 3.0)
    expected = -0.1 * (3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5)
    torch.testing.assert_close(got, expected * torch.eye(4, dtype=torch.float64))


def test_a_closure_is_called_with_gradients_on() -> None:
    param = nn.Parameter(torch.eye(3))
    optimizer = Muon([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert math.isclose(param.detach().trace().item(), 3 - 0.3 * 0.7, rel_tol=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "kimi"}, "scale is 'kimi': it is one of none, original, rms, spectral"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"axes": ((0,), (0,))}, "two disjoint tuples"),
        ({"axes": ((2,), (0,))}, "up has shape (4, 3): it has no dimension 2"),
    ],
)
def test_bad_options_are_refused_in_every_group(options: dict[str, Any], message: str) -> None:
    good = {"params": [nn.Parameter(torch.zeros(3, 3))], "param_names": ["down"]}
    bad = {"params": [nn.Parameter(torch.zeros(4, 3))], "param_names": ["up"], **options}
    with pytest.raises(UseError) as caught:
        Muon([good, bad])
    assert message in str(caught.value)


def test_a_vector_is_refused_by_name() -> None:
    with pytest.raises(UseError, match=r"head\.bias has shape \(4,\): Muon trains matrices"):
        Muon([{"params": [nn.Parameter(torch.zeros(4))], "param_names": ["head.bias"]}])


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UseError, match="sparse"):
        Muon(embedding.parameters()).step()


def test_without_axes_a_kernel_is_flattened_and_three_dimensions_have_to_say() -> None:
    weight, grads = _noise(6, 4, 3, 3)
    torch.testing.assert_close(_run(weight, grads), _run(weight, grads, axes=((1, 2, 3), (0,))))
    with pytest.raises(UseError, match=r"up has shape \(2, 3, 4\): a stack of matrices, or the kernel"):
        Muon([("up", nn.Parameter(torch.zeros(2, 3, 4)))])


@pytest.mark.parametrize("turned", [False, True])
def test_rows_are_matrices_by_themselves(turned: bool) -> None:
    """Queries of all heads, then keys and values interleaved by head, of other heights."""
    rows = (((0, 4),), ((4, 5), (6, 7)), ((5, 6), (7, 8)))
    weight, grads = _noise(8, 5)
    axes: Any = ((0,), (1,)) if turned else None
    given = [tensor.T if turned else tensor for tensor in (weight, *grads)]
    got = _run(given[0], given[1:], scale="spectral", rows=rows, axes=axes)
    got = got.T if turned else got
    for places in ([0, 1, 2, 3], [4, 6], [5, 7]):
        expected = _reference(weight[places], [grad[places] for grad in grads], "spectral", True)
        torch.testing.assert_close(got[places], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("rows", "axes"),
    [
        ((((0, 2),), ((3, 4),)), None),
        ((((0, 2),), ((1, 4),)), None),
        ((((0, 3),),), None),
        ((((0, 4), (4, 4)),), None),
    ],
)
def test_rows_that_are_not_each_output_once_are_refused(rows: Any, axes: Any) -> None:
    with pytest.raises(UseError, match=r"up has 4 outputs, and rows=.* does not name each of them once"):
        Muon([("up", nn.Parameter(torch.zeros(4, 3)))], rows=rows, axes=axes)


def test_equal_shapes_of_other_groups_keep_their_options() -> None:
    cases = [_noise(4, 6) for _ in range(3)]
    options: list[dict[str, Any]] = [{"scale": "rms"}, {"nesterov": False}, {"scale": "rms", "momentum": 0.5}]
    params = [nn.Parameter(weight.clone()) for weight, _ in cases]
    groups = [{"params": [param], **own} for param, own in zip(params, options, strict=True)]
    optimizer = Muon(groups, lr=0.1, weight_decay=0.2, momentum=0.9)
    for step in range(3):
        for param, (_, grads) in zip(params, cases, strict=True):
            param.grad = grads[step]
        optimizer.step()
    for param, (weight, grads), own in zip(params, cases, options, strict=True):
        alone = nn.Parameter(weight.clone())
        single = Muon([alone], **{"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, **own})
        for grad in grads:
            alone.grad = grad
            single.step()
        torch.testing.assert_close(param, alone, rtol=1e-12, atol=0)


def test_options_may_change_between_steps() -> None:
    weight, grads = _noise(4, 6)
    param, fresh = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    optimizer = Muon([param], lr=0.1, momentum=0.0, scale="none", nesterov=False)
    param.grad = fresh.grad = grads[0]
    optimizer.step()
    Muon([fresh], lr=0.1, momentum=0.0, scale="none", nesterov=False).step()
    optimizer.param_groups[0].update(scale="rms", lr=0.3, eps=1.0, steps=2)
    param.grad = fresh.grad = grads[1]
    optimizer.step()
    Muon([fresh], lr=0.3, momentum=0.0, scale="rms", nesterov=False, eps=1.0, steps=2).step()
    torch.testing.assert_close(param, fresh, rtol=1e-12, atol=0)


def test_bfloat16_weights_are_rounded_once() -> None:
    weight, grad = torch.randn(8, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    param = nn.Parameter(weight.clone())
    param.grad = grad
    Muon([param], lr=0.01, weight_decay=0.5, momentum=0.0, nesterov=False).step()
    exact = nn.Parameter(weight.float())
    exact.grad = grad.float()
    Muon([exact], lr=0.01, weight_decay=0.5, momentum=0.0, nesterov=False).step()
    # Decay and step by themselves would be below what a weight of bfloat16 can tell, and be lost.
    assert (param.float() - exact).abs().max() <= exact.abs().max() * 2**-8
    assert torch.equal(param.detach(), exact.detach().bfloat16())


def test_large_matrices_on_a_cpu_agree_with_float64_as_far_as_bfloat16_does() -> None:
    weight, grads = _noise(160, 200, dtype=torch.float32)
    expected = _reference(weight.double(), [grad.double() for grad in grads], "rms", True)
    moved = (expected - weight).norm()
    assert (_run(weight, grads, scale="rms") - expected).norm() < 0.02 * moved


@pytest.mark.parametrize(("value", "said"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_gradient_that_is_not_finite_is_refused_and_nothing_moves(value: float, said: str) -> None:
    params = [nn.Parameter(torch.randn(3, 4)) for _ in range(2)]
    optimizer = Muon(zip(["up", "down"], params, strict=True), lr=0.1, weight_decay=0.1)
    for param in params:
        param.grad = torch.randn(3, 4)
    optimizer.step()
    before = [(param.detach().clone(), optimizer.state[param]["momentum_buffer"].clone()) for param in params]
    params[1].grad[1, 2] = value  # type: ignore[index]
    with pytest.raises(NonFiniteError, match=f"the gradient of down is {said} in 1 of 12 entries"):
        optimizer.step()
    for param, (weight, moment) in zip(params, before, strict=True):
        assert torch.equal(param, weight)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], moment)


def test_a_gradient_whose_squares_are_beyond_float32_is_finite() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    param.grad = 1e30 * torch.eye(2)
    check_step([{"params": [param]}], {})


@pytest.mark.parametrize("scale", [2.0**83, 2.0**-83, 2.0**120, 2.0**-110])
@pytest.mark.parametrize("kind", [Muon, SpectralSphere])
def test_the_step_does_not_depend_on_the_scale_of_the_gradient(kind: Any, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start, grad = torch.randn(2, 5, 4, generator=generator)
    moved = []
    for factor in (1.0, scale):
        weight = nn.Parameter(start.clone())
        weight.grad = grad * factor
        kind([weight], lr=0.1, eps=0.0).step()
        moved.append(weight.detach() - start)
    torch.testing.assert_close(moved[1], moved[0])
    assert bool(moved[0].norm() > 0.1)


def test_a_gradient_of_zero_moves_nothing_even_without_eps() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.zeros(2, 3)
    Muon([weight], lr=0.1, eps=0.0).step()
    assert torch.equal(weight, torch.ones(2, 3))


@pytest.mark.parametrize("kind", [Muon, SpectralSphere])
def test_a_state_of_another_shape_and_a_learning_rate_that_is_none_are_refused(kind: Any) -> None:
    made = []
    for width in (3, 4):
        weight = nn.Parameter(torch.eye(width))
        weight.grad = torch.ones(width, width)
        made.append(kind([weight]))
        made[-1].step()
    with pytest.raises(
        UseError, match=r"parameter 0 has shape \(4, 4\), and the saved momentum_buffer \(3, 3"
    ):
        made[1].load_state_dict(made[0].state_dict())
    made[1].param_groups[0]["lr"] = math.nan
    with pytest.raises(UseError, match=r"lr of group 0 \(parameter 0, …\) is nan: no step was made"):
        made[1].step()


@pytest.mark.parametrize("kind", [Muon, SpectralSphere])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_a_matrix_without_entries_is_passed_over(kind: Any, shape: tuple[int, int]) -> None:
    empty, full = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.ones(3, 2))
    empty.grad, full.grad = torch.zeros(shape), torch.ones(3, 2)
    kind([full, empty], lr=0.1).step()
    assert bool((full != 1).any())


@pytest.mark.parametrize("kind", [Muon, SpectralSphere])
def test_what_is_refused_in_a_later_group_has_moved_nothing_before(kind: Any) -> None:
    embedding, weight = nn.Embedding(5, 4, sparse=True), nn.Parameter(torch.ones(4, 4))
    embedding(torch.tensor([1])).sum().backward()
    weight.grad = torch.ones(4, 4)
    optimizer = kind([{"params": [weight]}, {"params": [embedding.weight]}], lr=0.1, weight_decay=0.5)
    with pytest.raises(UseError, match="sparse"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(4, 4))
    assert not optimizer.state


def test_what_goes_together_is_found_again_for_another_dtype() -> None:
    weight, grads = _noise(6, 4)
    param, fresh = nn.Parameter(weight.float()), nn.Parameter(weight.clone())
    optimizer = Muon([param], lr=0.1, momentum=0.0)
    param.grad = grads[0].float()
    optimizer.step()
    param.data, param.grad = weight.clone(), grads[1]
    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(weight)
    optimizer.step()
    fresh.grad = grads[1]
    Muon([fresh], lr=0.1, momentum=0.0).step()
    torch.testing.assert_close(param, fresh, rtol=1e-12, atol=0)
