"""On a GPU: fields, samplers and flow maps stay on the device of their points and give what the CPU gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.core.batches import on_device
from theodolite.core.calling import evaluate, with_tensors
from theodolite.flows import FlowMap, field_of, map_batches, map_loss, sample, sample_map, three_gaussians
from theodolite.models import DiT, FlowMLP, UNet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NETS = {
    "FlowMLP": (partial(FlowMLP, 16, 1), (2,)),
    "DiT": (partial(DiT, 16, 1, side=4, patch=2, head_dim=8, modulation="random"), (1, 4, 4)),
    "UNet": (partial(UNet, 8, 1, head_dim=8), (1, 4, 4)),
}


@pytest.mark.parametrize("method", ["euler", "heun", "dpm2m", "sde"])
def test_samples_are_those_of_the_cpu(method: Any) -> None:
    mixture, noise = three_gaussians(), torch.randn(50, 2, dtype=torch.float64)
    here, there = (
        sample(mixture.field(), noise.to(device), steps=10, method=method) for device in ("cpu", "cuda")
    )
    assert there.is_cuda
    assert torch.allclose(here, there.cpu(), rtol=1e-9, atol=1e-9)
    moved = mixture.flow_map(noise.cuda(), 0.0, 1.0)
    assert moved.is_cuda
    assert torch.allclose(moved.cpu(), mixture.flow_map(noise, 0.0, 1.0), atol=1e-8)


def network(name: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    build, shape = NETS[name]
    torch.manual_seed(0)
    data = torch.randn(8, *shape, dtype=dtype)
    batch = map_batches(lambda seed, step: (data, torch.arange(8) % 3), diagonal=0.5, classes=3)(0, 0)
    return build(classes=3, times=2).to(dtype), batch


def gradients(net: nn.Module, kind: Any, batch: Any) -> list[Tensor]:
    value = evaluate(map_loss(kind), net, batch)
    return list(torch.autograd.grad(value, list(net.parameters()), materialize_grads=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["lagrangian", "eulerian", "progressive-uniform"])
@pytest.mark.parametrize("name", NETS)
def test_gradients_of_flow_maps_are_those_of_the_cpu(name: str, kind: str, dtype: torch.dtype) -> None:
    net, batch = network(name, dtype)
    here = gradients(net, kind, batch)
    there = gradients(net.cuda(), kind, on_device(batch, "cuda"))
    size = torch.cat([one.flatten() for one in here]).norm()
    off = torch.cat([(one - other.cpu()).flatten() for one, other in zip(here, there, strict=True)]).norm()
    assert off < (1e-9 if dtype == torch.float64 else 1e-2) * size


@pytest.mark.parametrize("kind", ["lagrangian", "eulerian"])
def test_many_networks_have_the_gradients_of_each(kind: Any) -> None:
    net, batch = network("DiT", torch.float64)
    net, batch = net.cuda(), on_device(batch, "cuda")
    weights = {name: torch.stack([one.data, 1.2 * one.data]) for name, one in net.named_parameters()}

    def value(chosen: dict[str, Tensor]) -> Tensor:
        return with_tensors(net, chosen, partial(evaluate, map_loss(kind)), batch)

    together = torch.func.vmap(torch.func.grad(value))(weights)
    alone = {name: one[1].clone().requires_grad_() for name, one in weights.items()}
    found = torch.autograd.grad(value(alone), list(alone.values()), materialize_grads=True)
    for name, one in zip(alone, found, strict=True):
        assert torch.allclose(together[name][1], one, rtol=1e-8, atol=1e-10)


def test_autocast_is_kept() -> None:
    net, batch = network("DiT", torch.float32)
    net, batch = net.cuda(), on_device(batch, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        half = evaluate(map_loss("lagrangian"), net, batch)
    assert half.item() == pytest.approx(evaluate(map_loss("lagrangian"), net, batch).item(), rel=0.1)


def test_fields_and_jumps_stay_on_the_device() -> None:
    build, _ = NETS["FlowMLP"]
    x = torch.randn(5, 2, device="cuda")
    velocity = build(classes=3).cuda()
    assert sample(field_of(velocity, 1), x, steps=2, method="heun").is_cuda
    assert sample_map(FlowMap(build(classes=3, times=2).cuda(), (1,)), x, 2).is_cuda
