"""Optimizers against those of torch and pytorch_optimizer, where these are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from theodolite.optimizers import Muon, SpectralSphere

source = pytest.importorskip("pytorch_optimizer")
from theodolite.optimizers import borrowed  # noqa: E402  (after the check that it is installed)

SHAPES = [(12, 7), (7, 12), (9, 9)]


def _trained(make: Any, steps: int = 4, shapes: Any = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    optimizer = make(params)
    for _ in range(steps):
        for param in params:
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            leaf = param.detach().clone().requires_grad_()
            param.grad = torch.autograd.grad((noise * leaf + leaf**2).sum(), leaf)[0]
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize(("scale", "adjust"), [("original", "original"), ("rms", "match_rms_adamw")])
def test_muon_is_torchs(scale: str, adjust: str) -> None:
    """torch computes in bfloat16 and decays at the unscaled learning rate; steps agree to its digits."""
    start = _trained(lambda params: torch.optim.SGD(params, lr=0.0), 1)
    ours = _trained(lambda params: Muon(params, lr=0.02, weight_decay=0.1, scale=scale, momentum=0.9))
    theirs = _trained(
        lambda params: torch.optim.Muon(params, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust)
    )
    for begin, mine, other in zip(start, ours, theirs, strict=True):
        assert (mine - other).norm() < 0.02 * (other - begin).norm()


@pytest.mark.parametrize("foreach", [False, True])
def test_lion_is_theirs_to_the_bit(foreach: bool) -> None:
    ours, theirs = (
        _trained(lambda params, home=home: home.Lion(params, lr=0.02, weight_decay=0.1, foreach=foreach))
        for home in (borrowed, source)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shapes", [[(6, 5)], [(4, 3, 2)], [(4, 3, 2, 2)], [(5,)]])
def test_shampoo_is_theirs_for_tensors_of_any_order(shapes: Any) -> None:
    ours, theirs = (
        _trained(lambda params, home=home: home.Shampoo(params, lr=0.02), shapes=shapes)
        for home in (borrowed, source)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["SOAP", "DiffGrad", "ScheduleFreeAdamW"])
def test_with_an_eps_of_nothing_the_others_are_theirs(name: str) -> None:
    """What differs is where eps stands, for tensors that have gradients from the start."""
    ours, theirs = (
        _trained(lambda params, home=home: getattr(home, name)(params, lr=0.02, weight_decay=0.1, eps=1e-30))
        for home in (borrowed, source)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_schedule_free_is_adamw_where_nothing_is_averaged() -> None:
    """At its first step x, y and z are one, and z makes Adam's step without a first moment."""
    ours = _trained(lambda params: borrowed.ScheduleFreeAdamW(params, lr=0.02, weight_decay=0.1), 1)
    theirs = _trained(
        lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1, betas=(0.0, 0.999)), 1
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_the_spheres_direction_is_its_peers_as_far_as_bfloat16_goes(shape: tuple[int, int]) -> None:
    """Where the leading singular value stands apart, so that a power iteration in bfloat16 finds it."""
    peer = pytest.importorskip("pytorch_optimizer.optimizer.sso")
    weight, moment = torch.randn(shape), torch.randn(shape)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    values[0] *= 3
    weight = (left * values) @ right
    theirs = peer.compute_spectral_ball_update(
        weight,
        moment,
        power_iteration_steps=50,
        msign_steps=8,
        solver_tolerance_f=1e-8,
        solver_max_iterations=50,
    ).float()
    param = nn.Parameter(weight.clone())
    param.grad = moment
    SpectralSphere([param], lr=1e-3, momentum=0.0, nesterov=False).step()
    # Back from the retraction, which only scales: a short step along Φ keeps the norm to second order.
    ours = (weight - param.detach()) / (1e-3 * (shape[0] / shape[1]) ** 0.5)
    assert (ours - theirs).norm() < 0.05 * theirs.norm()
    assert (ours - moment / moment.norm() * theirs.norm()).norm() > 0.3 * theirs.norm()
