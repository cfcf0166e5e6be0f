"""The coordinates of an optimizer: the positive factors by which its step multiplies a gradient.

For a step `Δθ = −P·gradient` with P a positive diagonal:

    Adam, AdamW, NAdam   P = lr/(√v̂ + eps),  v̂ = v/(1 − β₂ᵗ)
    RMSprop, Adagrad     P = lr/(√v + eps)
    SGD                  P = lr·(1 − dampening)/(1 − momentum)

Momentum averages gradients and changes no factor, but in SGD their sum is `1/(1 − momentum)` times as large.
Weight decay does not depend on the batch, so it is left out. A factor that all tensors share cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.optimizers.joined import Joined
from theodolite.optimizers.parameter_groups import layers

BIAS_CORRECTED = {"Adam", "AdamW", "NAdam"}
SECOND_MOMENTS = {"RMSprop": "square_avg", "Adagrad": "sum"}
"""By class, the name of v in its state; without a bias correction."""


class NoState(UseError):
    """The optimizer has made no step yet, so it has no second moments."""


@torch.no_grad()
def root_factors(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
    """√P by name: a tensor, or one number for all entries; 0.0 for tensors that no step moves.

    Raises UseError if a step is not a positive factor for each entry, NoState before the first step.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> root_factors(torch.optim.SGD([weight], lr=0.04, momentum=0.75), {"weight": weight})
    {'weight': 0.4}
    """
    if not isinstance(optimizer, Optimizer):
        raise UseError(f"optimizer is {described(optimizer)}, not a torch.optim.Optimizer")
    names = {id(tensor): name for name, tensor in tensors.items()}
    found: dict[str, Tensor | float] = {}
    waiting: list[str] = []
    for made, group, tensor in _members(optimizer):
        name = names.get(id(tensor))
        if name is None:
            continue
        lr = float(group["lr"])
        factor = _factor(made, group, name, tensor) if lr else 0.0
        if factor is None:
            waiting.append(name)
            factor = 0.0
        found[name] = (lr * factor) ** 0.5
    if not found:
        raise UseError("none of the optimizer's parameters is trained in this model: give its own optimizer")
    if waiting and not any(isinstance(root, Tensor) for root in found.values()):
        raise NoState(
            f"the optimizer has no state for {waiting[0]} yet: its factors follow from the second moments of "
            "gradients. Take a few steps first, or leave out optimizer=, which measures without it"
        )
    if all(isinstance(root, float) and not root for root in found.values()):
        raise UseError("all learning rates of the optimizer are 0, so its steps have no length to compare")
    return {name: found.get(name, 0.0) for name in tensors}


def _members(optimizer: Optimizer) -> Iterator[tuple[Optimizer, dict[str, Any], Tensor]]:
    """Each parameter, its group, and the optimizer that has the group."""
    if isinstance(optimizer, Joined):
        for one in optimizer.optimizers:
            yield from _members(one)
        return
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            yield optimizer, group, tensor


def _factor(optimizer: Optimizer, group: Mapping[str, Any], name: str, tensor: Tensor) -> Any:
    """P without the learning rate; None if there is no state yet."""
    kind = type(layers(optimizer, group)[-1])
    kinds = {one.__name__ for one in kind.__mro__}
    state = optimizer.state.get(tensor) or {}
    if kinds & BIAS_CORRECTED and (not state or "exp_avg_sq" in state):
        if not state:
            return None
        square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
        correction = 1 - float(group["betas"][1]) ** float(state["step"])
        return 1 / ((square / correction).sqrt() + float(group["eps"]))
    for known, moment in SECOND_MOMENTS.items():
        if known in kinds:
            if not state:
                return None
            square = state[moment]
            if group.get("centered"):
                square = square - state["grad_avg"].square()
            return 1 / (square.clamp(min=0).sqrt() + float(group["eps"]))
    if "SGD" in kinds:
        momentum = float(group.get("momentum", 0.0))
        dampening = float(group.get("dampening", 0.0)) if momentum else 0.0
        return (1 - dampening) / (1 - momentum)
    raise UseError(
        f"{name} is trained by {kind.__name__}, whose step is not a positive factor for each entry of the "
        "gradient, so there are no coordinates to measure in. Leave out optimizer=, which measures the plain "
        "gradient"
    )
