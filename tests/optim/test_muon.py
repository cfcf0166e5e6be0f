"""Muon against a plain reference in float64, and against torch's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.errors import UseError
from theodolite.optim import Muon


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
