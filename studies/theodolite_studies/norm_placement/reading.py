"""What the stream of a GPT is, block by block: its size, its gradient, its largest entry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.building import evaluated
from theodolite.core.calling import logits
from theodolite.workloads import Workload


def read_stream(model: nn.Module, tensors: Mapping[str, Tensor], workload: Workload) -> dict[str, Any]:
    """Size, gradient and peak of the stream before the first block and after each, on one held-out batch.

    Args:
        model: a GPT: the function, which is read in eval mode. It is left as it was.
        tensors: its parameters and buffers.
        workload: the batch and the loss.

    Returns:
        `stream`: root mean squares of h_0 … h_L. `gradient`: those of ∂loss/∂h_l, for the loss summed over
        all tokens. `peak`: the largest |h| of all of them over the median |h| of its own block. A value that
        is not finite is None.
    """
    device = next(iter(tensors.values())).device
    inputs, targets = (tensor.to(device) for tensor in workload.draw_held_out(0))
    stream: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...], made: Tensor) -> None:
        if not stream:
            stream.append(given[0])
        stream.append(made)

    blocks = model.get_submodule("blocks")
    hooks = [block.register_forward_hook(keep) for block in blocks.children()]
    # Leaves that want gradients, so that the stream does; theirs are not computed.
    own = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point()) for name, tensor in tensors.items()
    }
    try:
        with evaluated(model), torch.enable_grad(), sdpa_kernel([SDPBackend.MATH]):
            output = logits(functional_call(model, own, (inputs,)))
            loss = workload.loss(output, targets) * targets.numel()
            gradients = torch.autograd.grad(loss, stream)
    finally:
        for hook in hooks:
            hook.remove()
    sizes = [_rms(value) for value in stream]
    peaks = [_finite(value.detach().abs().max() / value.detach().abs().median()) for value in stream]
    return {
        "stream": sizes,
        "gradient": [_rms(value) for value in gradients],
        "peak": None if None in peaks else max(peak for peak in peaks if peak is not None),
    }


def _rms(value: Tensor) -> float | None:
    return _finite(value.detach().float().square().mean().sqrt())


def _finite(value: Tensor) -> float | None:
    """To four digits; None if there is no such number."""
    number = float(value)
    return float(f"{number:.4g}") if math.isfinite(number) else None
