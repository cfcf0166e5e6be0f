"""The step that is measured, and how fast the logits change along it: `a = J v`."""

# N rows, K classes

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from theodolite.core.batches import Batch
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import BatchDerivatives
from theodolite.probes.steps.update import optimizer_step

Direction = Mapping[str, Tensor] | Optimizer | None
"""Tensors by canonical name (others do not move); an optimizer: its next update; None: minus the gradient."""


def given_step(
    objective: Objective, direction: Direction, model: nn.Module, gradient: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The step over all parameters of the objective; refused if it is zero or not finite."""
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
    if isinstance(direction, Optimizer):  # it may train others with a step of zero
        extra = [name for name in extra if bool(step[name].any())]
    if extra:
        raise UseError(
            f"the direction moves {extra[0]!r}, which is not among the {len(objective.names)} parameters "
            f"that are measured. The first of them is {objective.names[0]!r}; choose others with parameters=…"
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
            "the direction is zero in all parameters. At a minimum the gradient is zero; an optimizer's "
            "update may be too small for the precision of the weights"
        )
    return step


def norm(step: Mapping[str, Tensor]) -> float:
    """The Euclidean length over all tensors.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
    5.0
    """
    lengths = torch._foreach_norm([tensor.detach() for tensor in step.values()], dtype=torch.float64)
    return math.hypot(*torch.stack(lengths).tolist())


def push(objective: Objective, batch: Batch, direction: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The logits z and `J v`, both of the shape of the logits.

    One forward pass with tangents. If an operation has no derivative in forward mode: a backward pass and one
    through that, whose result is linear in its seed.

    >>> layer = torch.nn.Linear(2, 2, bias=False)
    >>> batch = torch.tensor([[1.0, 10.0]]), torch.tensor([0])
    >>> objective = Objective(layer, torch.nn.functional.cross_entropy, batch)
    >>> push(objective, batch, {"weight": torch.eye(2)})[1]
    tensor([[ 1., 10.]])
    """
    objective.check(direction)
    tangents = {
        name: direction[name].detach().to(objective.device, objective.dtype) for name in objective.names
    }
    try:
        with objective.conditions(), torch.no_grad(), _PlainProducts(), warnings.catch_warnings():
            # On the first call torch loads its own rules by a deprecated function.
            warnings.filterwarnings("ignore", message=".*torch.jit.*")
            found = torch.func.jvp(
                lambda chosen: objective.forward(chosen, batch),
                (objective.stand_ins(grad=False),),
                (tangents,),
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):  # an error of the model itself comes up again
        with objective.conditions():
            point = BatchDerivatives(objective, batch)
            found = point.logits, point.pushed(list(tangents.values()))
    logits, slopes = found[0].detach(), found[1].detach()
    if not (bool(logits.isfinite().all()) and bool(slopes.isfinite().all())):
        raise UseError(
            "the logits, or their derivatives along the direction, are not finite. Look at the batch, the "
            f"weights and the direction for nan and for very large numbers; {logits.dtype} may be too narrow"
        )
    return logits, slopes


class _PlainProducts(TorchFunctionMode):
    """Products with a constant by the rule `(c x)' = c x'`.

    Torch's own rule adds `c' x` with a zero made in Python: a millisecond for each product, of which rotary
    embeddings have eight in a block.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and not kwargs and all(isinstance(one, Tensor) for one in args):
            (x, x_slope), (y, y_slope) = (forward_ad.unpack_dual(one) for one in args)
            if x_slope is not None and y_slope is None:
                return forward_ad.make_dual(x * y, x_slope * y)
            if y_slope is not None and x_slope is None:
                return forward_ad.make_dual(x * y, x * y_slope)
        return func(*args, **(kwargs or {}))


_PRODUCTS = {torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__}


def by_rows(tensor: Tensor, dim: int) -> Tensor:
    """Move the classes last and flatten the other dimensions; (…, K, …) → (N, K)."""
    return tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])
