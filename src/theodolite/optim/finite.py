"""No step along a gradient that is not a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.errors import UseError
from theodolite.optim.sharding import local, mesh_groups


class NonFiniteError(UseError, FloatingPointError):
    """A gradient holds nan or inf. The weights and the optimizer's state are as they were."""


@torch.no_grad()
def refuse_nonfinite(groups: Sequence[dict[str, Any]]) -> None:
    """Raise, with the name of the tensor, if a gradient in these groups is not finite.

    One number goes from the device to the CPU, so a step waits for its gradients. Processes that hold shards
    of a gradient agree: all of them raise, or none. While a CUDA graph is captured nothing is looked at.
    """
    params = [param for group in groups for param in group["params"] if param.grad is not None]
    if not params or _captured(params[0]):
        return
    grads = [_values(param.grad) for param in params]
    good = _all_finite(grads)
    for process_group in mesh_groups(params):
        flag = torch.tensor(float(good), device=grads[0].device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=process_group)
        good = bool(flag)
    if good:
        return
    named = [
        (name, param)
        for group in groups
        for name, param in zip(names_of(group), group["params"], strict=True)
    ]
    names = [name for name, param in named if param.grad is not None]
    for name, grad in zip(names, grads, strict=True):
        bad = int((~torch.isfinite(grad)).sum())
        if bad:
            kind = "nan" if bool(torch.isnan(grad).any()) else "inf"
            raise NonFiniteError(
                f"the gradient of {name} is {kind} in {bad} of {grad.numel()} entries: no step was made. "
                "Look at the loss of this batch, lower the learning rate, or leave such batches out"
            )
    raise NonFiniteError("a gradient in another process is not finite: no step was made. It says which")


def refuse_sparse(optimizer: str, groups: Sequence[dict[str, Any]]) -> None:
    """Raise, with the name of the tensor, if a gradient in these groups is sparse."""
    for group in groups:
        for place, param in enumerate(group["params"]):
            if param.grad is not None and param.grad.is_sparse:
                raise UseError(
                    f"the gradient of {names_of(group)[place]} is sparse: {optimizer} needs dense ones, so "
                    "make its layer with sparse=False"
                )


def names_of(group: dict[str, Any]) -> list[str]:
    """What the parameters of a group are called, if only by their place."""
    return list(group.get("param_names") or (f"parameter {place}" for place in range(len(group["params"]))))


def _all_finite(grads: Sequence[Tensor]) -> bool:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    # Of norms, as they take one kernel for many tensors; nan and inf stay what they are in a sum.
    sums = [torch.stack(list(torch._foreach_norm(some))).sum() for some in by_kind.values()]
    if all(math.isfinite(float(one)) for one in sums):
        return True
    # A sum of squares may be beyond its dtype where no entry is.
    return all(bool(torch.isfinite(grad).all()) for grad in grads)


def _values(grad: Tensor) -> Tensor:
    grad = local(grad).detach()  # Sophia has graphs through them
    if grad.is_sparse:
        return grad._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _captured(param: Tensor) -> bool:
    return torch.compiler.is_compiling() or (param.is_cuda and torch.cuda.is_current_stream_capturing())
