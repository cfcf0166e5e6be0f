"""The step that is measured: given by name, made by an optimizer, or down the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.steps.update import optimizer_step

Direction = Mapping[str, Tensor] | Optimizer | None
"""Tensors by canonical name, where what is not named does not move; an optimizer: its next update; None:
minus the gradient."""


def given_step(
    objective: Objective, direction: Direction, model: nn.Module, gradient: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The step over all parameters of the objective. One that is zero, or not finite, is refused."""
    if direction is None:
        step = {name: -tensor for name, tensor in gradient.items()}
    elif isinstance(direction, Optimizer):
        step = optimizer_step(direction, model)
    elif isinstance(direction, Mapping):
        step = dict(direction)
    else:
        raise UseError(
            f"direction is {described(direction)}: give tensors by name, an optimizer after backward(), or "
            "nothing for minus the gradient"
        )
    extra = [name for name in step if name not in objective.names]
    moving = [name for name in extra if bool(step[name].any())]
    if moving if isinstance(direction, Optimizer) else extra:
        odd = (moving or extra)[0]
        raise UseError(
            f"the direction moves {odd!r}, which is not among the {len(objective.names)} parameters that are "
            f"measured. The first of them is {objective.names[0]!r}; choose others with parameters=…"
        )
    step = {
        name: step[name].detach() if name in step else torch.zeros_like(tensor)
        for name, tensor in objective.tensors.items()
    }
    objective.check(step)
    for name, tensor in step.items():
        if not bool(tensor.isfinite().all()):
            raise UseError(f"the direction is not finite in {name}. Look at the gradients and the batch")
    if norm(step) == 0:
        raise UseError(
            "the direction is zero in all parameters, so it leads nowhere. At a minimum the gradient is; an "
            "optimizer's update may be too small for the precision of the weights"
        )
    return step


def norm(step: Mapping[str, Tensor]) -> float:
    """The Euclidean length over all tensors.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
    5.0
    """
    lengths = torch._foreach_norm([tensor.detach() for tensor in step.values()], dtype=torch.float64)
    return math.hypot(*torch.stack(lengths).tolist())
