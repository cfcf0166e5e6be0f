"""Muon, for every weight that is a matrix in some layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.errors import UseError
from theodolite.optim.matrices import (
    LINEAR,
    Axes,
    as_matrices,
    check_matrices,
    from_matrices,
    gathered,
    scattered,
)
from theodolite.optim.orthogonal import newton_schulz

SCALES: dict[str, Callable[[int, int], float]] = {
    "none": lambda fan_in, fan_out: 1.0,
    "original": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    "rms": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_in, fan_out)),
    "spectral": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
}
"""What the orthogonal update is multiplied by; see `theodolite.rules.muon`."""


class Muon(Optimizer):
    """Momentum, made orthogonal: `W ← (1 − lr·weight_decay)·W − lr·s·NS(M)`.

    `M ← momentum·M + (1 − momentum)·∇W`, and with Nesterov's form NS gets
    `momentum·M + (1 − momentum)·∇W` once more. NS is the Newton–Schulz iteration, `≈ UVᵀ`, for all
    matrices of one shape at once; it computes in bfloat16 on an accelerator, in float32 on the CPU, and
    in float64 for float64.

    Args:
        params: matrices, or groups of them.
        lr: learning rate.
        momentum: of the moving average of gradients.
        nesterov: look one step ahead?
        weight_decay: decoupled, by the learning rate without its scale.
        scale: s by name: `none` 1, `original` √max(1, out/in), `rms` 0.2·√max(in, out),
            `spectral` √(out/in).
        axes: (in, out), the dimensions inputs and outputs run over; the others are a stack of matrices.
            A transposed weight has ((0,), (1,)), a convolution ((1, 2, 3), (0,)).
        eps: added to the Frobenius norm the matrix is divided by.
        steps: of Newton–Schulz.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> weight.grad = torch.diag(torch.tensor([3.0, 1.0]))
    >>> Muon([weight], lr=0.1).step()
    >>> bool((weight.diagonal() + 0.1).abs().max() < 0.035)      # both directions move by about lr
    True

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is
        scalable for LLM training, 2025.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: str = "none",
        axes: Axes = LINEAR,
        eps: float = 1e-7,
        steps: int = 5,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                "scale": scale,
                "axes": axes,
                "eps": eps,
                "steps": steps,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices; options not given are the optimizer's."""
        super().add_param_group(param_group)
        try:
            if param_group["scale"] not in SCALES:
                raise UseError(f"scale is {param_group['scale']!r}: it is one of {', '.join(SCALES)}")
            if not 0 <= param_group["momentum"] < 1:
                raise UseError(f"momentum is {param_group['momentum']!r}: it has to be in [0, 1)")
            check_matrices("Muon", param_group)
        except UseError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            updates = averaged(params, self.state, group["momentum"], group["nesterov"])
            lr = float(group["lr"])
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            for alike in by_shape(updates):
                stacked = torch.cat([as_matrices(gathered(updates[i]), group["axes"]) for i in alike])
                orthogonal = newton_schulz(stacked, steps=group["steps"], eps=group["eps"])
                _, fan_out, fan_in = stacked.shape
                scale = SCALES[group["scale"]](fan_in, fan_out)
                for i, matrices in zip(alike, orthogonal.chunk(len(alike)), strict=True):
                    param = params[i]
                    update = from_matrices(matrices, param, group["axes"]).to(param.dtype)
                    param.add_(scattered(update, param), alpha=-lr * scale)
        return loss


def averaged(params: list[Tensor], state: Any, momentum: float, nesterov: bool) -> list[Tensor]:
    """Update the momentum of each parameter, and give what is to be made orthogonal."""
    for param in params:
        if param.grad.is_sparse:  # type: ignore[union-attr]
            raise UseError("a gradient is sparse: matrix optimizers need dense ones, so use sparse=False")
        if "momentum_buffer" not in state[param]:
            state[param]["momentum_buffer"] = torch.zeros_like(param)
    grads: list[Tensor] = [param.grad for param in params]  # type: ignore[misc]
    buffers = [state[param]["momentum_buffer"] for param in params]
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    if not nesterov:
        return buffers
    ahead = torch._foreach_mul(buffers, momentum)
    torch._foreach_add_(ahead, grads, alpha=1 - momentum)
    return list(ahead)


def by_shape(tensors: list[Tensor]) -> list[list[int]]:
    """Places of the tensors whose matrices can be stacked."""
    groups: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.shape, tensor.device, tensor.dtype), []).append(place)
    return list(groups.values())
