"""On a GPU: the same steps, in bfloat16 where the CPU uses float32."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from theodolite.optim import Muon, SpectralSphere

from .small import model, plan_for, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (3, 64, 96)])
def test_muon_moves_as_on_the_cpu(shape: tuple[int, ...]) -> None:
    axes: Any = ((len(shape) - 1,), (len(shape) - 2,))
    weight, grad = torch.randn(shape), torch.randn(shape)
    moved = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        param = nn.Parameter(weight.to(device, dtype))
        param.grad = grad.to(device, dtype)
        Muon([param], lr=1.0, scale="rms", axes=axes).step()
        moved.append(param.detach().cpu().double() - weight.double())
    assert (moved[0] - moved[1]).norm() < 0.02 * moved[1].norm()


def test_the_sphere_keeps_its_radius() -> None:
    param = nn.Parameter(torch.randn(200, 300, device="cuda"))
    before = torch.linalg.matrix_norm(param.detach(), 2)
    optimizer = SpectralSphere([param], lr=0.5)
    for _ in range(5):
        param.grad = torch.randn_like(param)
        optimizer.step()
    torch.testing.assert_close(torch.linalg.matrix_norm(param.detach(), 2), before, rtol=1e-4, atol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rule", ["adamw", "muon-kimi"])
def test_a_state_saved_on_the_cpu_goes_on_on_the_gpu(rule: str, fused: bool) -> None:
    which = "options" if rule == "adamw" else "vector_options"
    plan = dataclasses.replace(plan_for(rule), **{which: {"fused": fused}})
    network = model().cuda()
    optimizer = plan.optimizer(network)
    train(network, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.update({key: value.cpu() for key, value in state.items()})
    twin = copy.deepcopy(network)
    resumed = plan.optimizer(twin)
    resumed.load_state_dict(saved)
    train(network, optimizer, 2)
    train(twin, resumed, 2)
    for mine, theirs in zip(twin.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
