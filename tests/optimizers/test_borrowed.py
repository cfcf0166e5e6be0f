"""What is put right in optimizers of pytorch_optimizer, and that it was wrong there."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.errors import UseError

from .small import gradients, model, plan_for, train

source = pytest.importorskip("pytorch_optimizer")
from theodolite.optimizers import borrowed  # noqa: E402  (after the check that it is installed)


def _grad(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _stepped(
    optimizer: type[torch.optim.Optimizer], grad: Tensor, steps: int = 1, **options: float
) -> Tensor:
    param = nn.Parameter(torch.zeros_like(grad))
    one = optimizer([param], lr=1.0, weight_decay=0.0, **options)  # type: ignore[call-arg]
    for _ in range(steps):
        param.grad = grad.clone()
        one.step()
    return param.detach()


def test_eps_is_added_after_the_bias_correction() -> None:
    """With constant gradients, m̂ = g and v̂ = g²: a step is ξ·g/(|g| + eps) long."""
    grad = torch.full((3,), 1e-4, dtype=torch.float64)
    expected = -torch.sigmoid(grad) / 2
    torch.testing.assert_close(_stepped(borrowed.DiffGrad, grad, eps=1e-4), expected)
    assert (_stepped(source.DiffGrad, grad, eps=1e-4) / expected).max() < 0.1
    soap, theirs = (_stepped(one, _grad(3, 2), 3, eps=1e6) for one in (borrowed.SOAP, source.SOAP))
    torch.testing.assert_close(soap, -2 * _grad(3, 2) / 1e6, rtol=1e-5, atol=0)
    assert (theirs / soap).max() < 0.4


@pytest.mark.parametrize("eps", [1e-12, 1.0])
def test_without_bias_correction_the_eps_of_soap_is_as_given(eps: float) -> None:
    """A gradient is diagonal in its own bases: singular values s move by (1 − β₁)s/(√(1 − β₂)s + eps)."""
    grad = _grad(4, 4)
    moved = _stepped(borrowed.SOAP, grad, 2, eps=eps, correct_bias=False)  # the first finds the bases
    values = torch.linalg.svdvals(grad)
    expected = 0.05 * values / (math.sqrt(0.05) * values + eps)
    # Rounding beside the diagonal is divided by an eps of 1e-12 too: a ten-thousandth is left of it.
    torch.testing.assert_close(
        torch.linalg.svdvals(moved), expected.sort(descending=True)[0], rtol=0.01, atol=0
    )


@pytest.mark.parametrize("name", ["DiffGrad", "ScheduleFreeAdamW"])
def test_no_floor_but_eps(name: str) -> None:
    """Entries of 1e-12 are far above eps, and far below √1e-15."""
    grad = torch.full((3,), 1e-12, dtype=torch.float64)
    ours, theirs = (_stepped(getattr(home, name), grad, eps=1e-20) for home in (borrowed, source))
    assert ours.abs().min() > 0.49
    assert theirs.abs().max() < 1e-3


def test_the_first_gradient_of_soap_is_diagonal_in_its_own_basis() -> None:
    """Why it only finds the bases: Adam in them divides rounding by rounding, and nothing is small."""
    grad = _grad(24, 24).float()
    basis = [torch.linalg.eigh(gram)[1] for gram in (grad @ grad.T, grad.T @ grad)]
    rotated = basis[0].T @ grad @ basis[1]
    update = basis[0] @ (rotated / (rotated.abs() + 1e-8)) @ basis[1].T
    u, _, vh = torch.linalg.svd(grad)
    assert update.norm() > 4 * (u @ vh).norm()  # √24 would be all entries
    assert torch.equal(_stepped(borrowed.SOAP, grad), torch.zeros_like(grad))


def test_bases_of_float64_are_orthogonal_in_float64() -> None:
    for home, limit in ((borrowed, 1e-13), (source, None)):
        param = nn.Parameter(_grad(6, 5))
        optimizer = home.SOAP([param], precondition_frequency=1)
        for step in range(4):
            param.grad = _grad(6, 5, seed=step)
            optimizer.step()
        basis = optimizer.state[param]["Q"][0]
        error = (basis.T @ basis - torch.eye(6, dtype=torch.float64)).abs().max().item()
        assert error < limit if limit else error > 1e-9


def test_shampoo_moves_before_its_roots_are_due_again() -> None:
    grad = _grad(4, 3)
    ours, theirs = (
        _stepped(one, grad, 2, preconditioning_compute_steps=3) for one in (borrowed.Shampoo, source.Shampoo)
    )
    assert ours.norm() > 1
    assert theirs.norm() == 0
    param = nn.Parameter(grad.clone())
    optimizer = borrowed.Shampoo([param])
    param.grad = grad
    optimizer.step()
    assert "momentum_buffer" not in optimizer.state[param]


def test_sums_in_bfloat16_stop_growing() -> None:
    """Why Shampoo refuses it: after 1000 steps of ones its statistics are at 256."""
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        total += 1
    assert total == 256


def test_sophia_says_what_it_needs() -> None:
    network = model()
    optimizer = plan_for("sophia").optimizer(network)
    for param in network.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(UseError, match=r"no graph.*create_graph=True"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_sophia_says_which_attention_it_can_differentiate() -> None:
    inputs = torch.randn(1, 2, 4, 8)
    refused = pytest.raises(UseError, match=r"flash.*has no second derivative.*SDPBackend\.MATH")
    for backend, ends in ((SDPBackend.FLASH_ATTENTION, refused), (SDPBackend.MATH, nullcontext())):
        query = nn.Parameter(torch.randn(1, 2, 4, 8))
        optimizer = borrowed.SophiaH([query], lr=0.1)
        with sdpa_kernel(backend):
            attended = nn.functional.scaled_dot_product_attention(query, inputs, inputs)
            attended.square().sum().backward(create_graph=True)
        before = query.detach().clone()
        with ends:
            optimizer.step()
        assert torch.equal(query, before) == (ends is refused)
        query.grad = None  # a graph and its parameters hold each other


def test_schedule_free_evaluates_the_average_of_all_z() -> None:
    network = model(dtype=torch.float64)
    optimizer = plan_for("schedule-free", weight_decay=0.1).optimizer(network)
    embed = network.get_parameter("embed.weight")
    average = torch.zeros_like(embed)
    for step in range(4):
        gradients(network, step)
        optimizer.step()
        average += (optimizer.state[embed]["z"] - average) / (step + 1)
    training = [param.detach().clone() for param in network.parameters()]
    optimizer.eval()
    torch.testing.assert_close(embed.detach(), average.detach(), rtol=0, atol=1e-12)
    optimizer.eval()  # once more is the same
    torch.testing.assert_close(embed.detach(), average.detach(), rtol=0, atol=1e-12)
    with pytest.raises(UseError, match=r"after eval\(\): call optimizer\.train\(\)"):
        optimizer.step()
    # Saved as it is evaluated, and gone on with.
    twin = copy.deepcopy(network)
    resumed = plan_for("schedule-free", weight_decay=0.1).optimizer(twin)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, resumed):
        one.train()
    for param, same, other in zip(network.parameters(), training, twin.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), same, rtol=0, atol=1e-12)
        assert torch.equal(param, other)


def test_train_and_eval_are_nothing_to_other_optimizers() -> None:
    network = model()
    optimizer = plan_for("muon-kimi").optimizer(network)
    before = train(network, optimizer, 1)
    optimizer.eval()
    optimizer.train()
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), before, strict=True))


def test_schedule_free_takes_no_schedule_but_a_warmup() -> None:
    plan = plan_for("schedule-free")
    optimizer = plan.optimizer(model())
    with pytest.raises(UseError, match="replaces a schedule"):
        plan.schedule(optimizer, "cosine", steps=10)
    warmed = plan.schedule(optimizer, "constant", steps=10, warmup=4)
    assert warmed.get_last_lr()[0] == pytest.approx(optimizer.param_groups[0]["planned_lr"] / 4)


def test_a_state_of_pytorch_optimizers_own_goes_on() -> None:
    """Its counts of steps stand in the group."""
    param, twin = (nn.Parameter(_grad(4, 3)) for _ in range(2))
    theirs = source.DiffGrad([param], lr=0.1, eps=1e-30)
    for step in range(3):
        param.grad = _grad(4, 3, seed=step)
        theirs.step()
    ours = borrowed.DiffGrad([twin], lr=0.1, eps=1e-30)
    twin.data.copy_(param)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step in range(3, 5):
        for one, optimizer in ((param, theirs), (twin, ours)):
            one.grad = _grad(4, 3, seed=step)
            optimizer.step()
    torch.testing.assert_close(param, twin, rtol=1e-9, atol=0)
    assert math.isclose(float(ours.state[twin]["step"]), 5)
