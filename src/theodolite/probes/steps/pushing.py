"""How fast the logits change along a direction: `a = J v`, by one pass in forward mode."""

# N rows, K classes

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from theodolite.core.batches import Batch
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Point
from theodolite.probes.curvature.score import CrossEntropy


def push(objective: Objective, batch: Batch, direction: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The logits z and `J v`, both of the shape of the logits.

    One forward pass with tangents; where an operation has no derivative in forward mode, a backward pass and
    one through that, whose result is linear in what it was seeded with.

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
            # The first time torch loads its own rules, by a function that it means to give up.
            warnings.filterwarnings("ignore", message=".*torch.jit.*")
            found = torch.func.jvp(
                lambda chosen: objective.forward(chosen, batch),
                (objective.stand_ins(grad=False),),
                (tangents,),
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):  # what is really wrong shows again there
        with objective.conditions():
            point = Point(objective, batch)
            found = point.logits, point.pushed(list(tangents.values()))
    logits, slopes = found[0].detach(), found[1].detach()
    if not (bool(logits.isfinite().all()) and bool(slopes.isfinite().all())):
        raise UseError(
            "the logits, or how fast they change along the direction, are not finite. Look at the batch, the "
            f"weights and the direction for nan and for very large numbers; {logits.dtype} may be too narrow"
        )
    return logits, slopes


class _PlainProducts(TorchFunctionMode):
    """Products with what does not move, by the rule `(c x)' = c x'`.

    Torch's own rule adds `c' x` with a zero that it carries about in Python: a millisecond for each product,
    of which rotary embeddings have eight in a block.
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


def require_cross_entropy(known: CrossEntropy | None, loss: Loss) -> CrossEntropy:
    """Refuse a loss that is no cross-entropy of the softmax of the logits."""
    if known is None:
        called = getattr(loss, "__name__", type(loss).__name__)
        raise UseError(
            f"the loss {called} is not a cross-entropy of the softmax of the logits on this batch, and only "
            "such a loss has the zeros that a radius is the distance of. Give one: loss(logits, targets) as "
            "nn.functional.cross_entropy is, of logits that nothing clamps; of one sigmoid, make two logits "
            "(0, z)"
        )
    return known


def by_rows(tensor: Tensor, dim: int) -> Tensor:
    """The classes last, everything else one dimension; (…, K, …) → (N, K)."""
    return tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])


def least_of_all(objective: Objective, value: float) -> float:
    """The least over the ranks, if the model is one of several replicas; all of them have to have one."""
    if objective.group is None:
        return value
    least = objective.together(lambda: torch.tensor(value, dtype=torch.float64, device=objective.device))
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=objective.group)
    return float(least)
