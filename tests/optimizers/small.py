"""A small GPT, its plans, and a few steps of training."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import theodolite as th

TOKENS = torch.randint(17, (3, 9), generator=torch.Generator().manual_seed(1))


def build(width: int, depth: int) -> nn.Module:
    return th.models.GPT(width, depth, vocab=17, context=8, head_dim=8, bias=True, norm="layer")


@functools.cache
def _planned(optimizer: str, base: th.Size, given: tuple[tuple[str, Any], ...]) -> th.Plan:
    return th.plan(build, TOKENS[:, :-1], size=th.Size(16, 2), base=base, optimizer=optimizer, **dict(given))


def plan_for(optimizer: str, *, base: th.Size | None = None, **given: float) -> th.Plan:
    """A plan for width 16 and depth 2, kept for the next test that asks for it."""
    return _planned(optimizer, base or th.Size(8, 1), tuple({"lr": 1e-2, **given}.items()))


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return build(16, 2).to(dtype)


def gradients(network: nn.Module, step: int) -> None:
    """Gradients of the loss on the step's tokens, through which one can differentiate once more."""
    tokens = ((TOKENS + step) % 17).to(next(network.parameters()).device)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        logits = network(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    params = list(network.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params, create_graph=True), strict=True):
        param.grad = grad


def train(network: nn.Module, optimizer: Optimizer, steps: int, start: int = 0) -> list[Tensor]:
    """The parameters after some steps."""
    for step in range(start, start + steps):
        gradients(network, step)
        torch.manual_seed(step)  # Sophia draws vectors
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in network.parameters()]


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stepped(optimizer: Any, grad: Tensor, steps: int = 1, **options: Any) -> Tensor:
    """A tensor that started at zero, after some steps along one gradient."""
    param = nn.Parameter(torch.zeros_like(grad))
    one = optimizer([param], lr=1.0, weight_decay=0.0, **options)
    for _ in range(steps):
        param.grad = grad.clone()
        one.step()
    return param.detach()
