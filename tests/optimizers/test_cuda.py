"""On a GPU: the same steps, in bfloat16 where the CPU uses float32."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from theodolite.optimizers import Muon, NonFiniteError, SpectralSphere
from theodolite.optimizers.hyperball import AdamH, MuonH

from .small import model, plan_for, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (3, 64, 96)])
@pytest.mark.parametrize("kind, lr", [(Muon, 10.0), (MuonH, 0.3), (AdamH, 0.3)])
def test_matrices_move_as_on_the_cpu(kind: Any, lr: float, shape: tuple[int, ...]) -> None:
    axes: Any = ((len(shape) - 1,), (len(shape) - 2,))
    weight, grad = torch.randn(shape), torch.randn(shape)
    moved = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        param = nn.Parameter(weight.to(device, dtype))
        param.grad = grad.to(device, dtype)
        optimizer = kind([param], lr=lr, axes=axes)
        for _ in range(3):
            optimizer.step()
        moved.append(param.detach().cpu().double() - weight.double())
    assert (moved[0] - moved[1]).norm() < 0.02 * moved[1].norm()


@pytest.mark.parametrize("kind, order", [(SpectralSphere, 2), (AdamH, "fro"), (MuonH, "fro")])
def test_a_sphere_keeps_its_radius(kind: Any, order: Any) -> None:
    param = nn.Parameter(torch.randn(200, 300, device="cuda"))
    before = torch.linalg.matrix_norm(param.detach(), order)
    optimizer = kind([param], lr=0.5)
    for _ in range(5):
        param.grad = torch.randn_like(param)
        optimizer.step()
    torch.testing.assert_close(torch.linalg.matrix_norm(param.detach(), order), before, rtol=1e-4, atol=0)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_batches_go_on_as_the_first_step_began(dtype: torch.dtype) -> None:
    """From the second step on a batch is played from a CUDA graph; shapes, rows and a stack side by side."""
    torch.manual_seed(0)
    shapes = [(48, 32), (48, 32), (32, 48), (96, 32), (3, 24, 40)]
    starts = [torch.randn(shape) for shape in shapes]
    rows = (((0, 32),), ((32, 48), (64, 80)), ((48, 64), (80, 96)))
    moved = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        params = [nn.Parameter(start.to(device, kind)) for start in starts]
        groups: list[dict[str, Any]] = [
            {"params": params[:3]},
            {"params": params[3:4], "rows": rows},
            {"params": params[4:], "axes": ((2,), (1,))},
        ]
        optimizer = Muon(groups, lr=0.1, weight_decay=0.1, scale="spectral")
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(device, kind)
            optimizer.step()
        moved.append([param.detach().cpu().double() for param in params])
    close = 0.02 if dtype == torch.float32 else 0.1  # six steps are some forty roundings of a weight
    for start, here, there in zip(starts, *moved, strict=True):
        assert (here - there).norm() < close * (there - start).norm()


def test_a_copy_of_a_recorded_optimizer_trains_by_itself() -> None:
    param = nn.Parameter(torch.randn(16, 16, device="cuda"))
    optimizer = Muon([param], lr=0.1)
    for _ in range(3):
        param.grad = torch.randn_like(param)
        optimizer.step()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    before = param.detach().clone()
    other.grad = torch.randn_like(other)
    for _ in range(3):
        twin.step()
    assert torch.equal(param, before)
    assert not torch.equal(other, before)


def test_matrices_of_millions_of_entries() -> None:
    """Brought into the batch, and out of it, each by a kernel of its own; X is not copied."""
    torch.manual_seed(0)
    starts = [torch.randn(2048, 4096) for _ in range(3)] + [torch.randn(4096, 2048) for _ in range(3)]
    grads = [torch.randn_like(start) for start in starts]
    params = [nn.Parameter(start.cuda()) for start in starts]
    optimizer = Muon(params, lr=0.1, scale="rms", weight_decay=0.1)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.cuda()
    optimizer.step()
    for start, grad, param in zip(starts, grads, params, strict=True):
        exact = nn.Parameter(start.cuda().double())
        exact.grad = grad.cuda().double()
        Muon([exact], lr=0.1, scale="rms", weight_decay=0.1).step()
        there = exact.detach()
        assert (param.detach().double() - there).norm() < 0.02 * (there - start.cuda()).norm()


def test_nan_on_a_gpu_is_refused_with_nothing_moved() -> None:
    plan, network = plan_for("muon-kimi"), model().cuda()
    optimizer = plan.optimizer(network)
    train(network, optimizer, 2)
    before = [param.detach().clone() for param in network.parameters()]
    for param in network.parameters():
        param.grad = torch.randn_like(param)
    network.get_parameter("blocks.1.feed_forward.branch.up.weight").grad[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(NonFiniteError, match=r"blocks\.1\.feed_forward\.branch\.up\.weight is nan in 1 of"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
