"""No step along a gradient, or by a learning rate, that is not a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.optimizers.sharding import local, mesh_groups

NOT_NEGATIVE = ("lr", "weight_decay", "momentum", "betas", "eps", "matrix_eps", "radius", "planned_lr")
"""Options that no step can be made with below 0."""

FINITE = (*NOT_NEGATIVE, "r", "lr_max", "weight_sum", "weight_lr_power")
"""Options that no step can be made with where they are infinite; elsewhere that may mean: no bound."""

ROUNDED_OFF = 1e-12
"""A schedule that ends at 0 may come out below it by rounding."""


class NonFiniteError(UseError, FloatingPointError):
    """A gradient holds nan or inf. The weights and the optimizer's state are as they were."""


def check_step(
    groups: Sequence[dict[str, Any]],
    dense: Mapping[str, Sequence[dict[str, Any]]],
    *,
    squared: Sequence[dict[str, Any]] = (),
    look: bool = True,
    over: Sequence[Any] = (),
) -> None:
    """Raise if no step can be made, before anything has moved; of processes that step together all, or none.

    Args:
        groups: all that the step is made of.
        dense: by name of the optimizer, groups whose gradients must not be sparse.
        squared: groups whose optimizer keeps squares of gradients.
        look: are gradients looked at? If not, processes do not agree either.
        over: process groups of replicas that share the work out.
    """
    error = None
    try:
        refuse_odd_numbers(groups)
        for optimizer, some in dense.items():
            refuse_sparse(optimizer, some)
    except UseError as found:
        error = found
    if look:
        refuse_nonfinite(groups, squared, error=error, over=over)
    if error is not None:
        raise error


@torch.no_grad()
def refuse_nonfinite(
    groups: Sequence[dict[str, Any]],
    squared: Sequence[dict[str, Any]] = (),
    *,
    error: UseError | None = None,
    over: Sequence[Any] = (),
) -> None:
    """Raise, with the name of the tensor, if a gradient in these groups is not finite.

    One number goes from the device to the CPU, so a step waits for its gradients. Processes that hold shards
    of a gradient agree: all of them raise, or none. While a CUDA graph is captured nothing is looked at.

    Args:
        groups: all that a step is made of.
        squared: those whose optimizer keeps squares of gradients, which have to be finite as well: a square
            that is not stays in a moving average for good, and its entry never moves again.
        error: what this process has refused already, of which the others hear.
        over: process groups that agree besides those of shards.
    """
    params = [param for group in groups for param in group["params"] if param.grad is not None]
    if not params or _captured(params[0]):
        return
    grads = [_values(param.grad) for param in params]
    over = (*mesh_groups(params), *over)
    # 0: an entry is not finite; 1: the sum of squares is not, which is rare; 2: all is well.
    level = -1 if error is not None else 2 if _norms_are_finite(grads) else int(_all_finite(grads))
    level = _agreed(level, params, over)
    if error is not None:
        raise error
    if level < 0:
        raise UseError("another process has refused this step: no step was made. It says why")
    if level == 0:
        for name, _, grad in _named(groups):
            bad = int((~torch.isfinite(grad)).sum())
            if bad:
                kind = "nan" if bool(torch.isnan(grad).any()) else "inf"
                raise NonFiniteError(
                    f"the gradient of {name} is {kind} in {bad} of {grad.numel()} entries: no step was made. "
                    "Look at the loss of this batch, lower the learning rate, or leave such batches out"
                )
        raise NonFiniteError("a gradient in another process is not finite: no step was made. It says which")
    if level == 1:
        large = [one for one in _named(squared) if not bool(one[2].abs().amax().square().isfinite())]
        if not _agreed(int(not large), params, over):
            for name, group, grad in large:
                raise NonFiniteError(
                    f"the gradient of {name} has an entry of {float(grad.abs().amax()):.3g}, whose square is "
                    f"beyond {grad.dtype}, and {group.get('rule', 'the optimizer')} keeps squares: no step "
                    "was made. Look at the loss of this batch, or leave such batches out"
                )
            raise NonFiniteError("a gradient in another process is too large to be squared: no step was made")


def refuse_sparse(optimizer: str, groups: Sequence[dict[str, Any]]) -> None:
    """Raise, with the name of the tensor, if a gradient in these groups is sparse."""
    for group in groups:
        for place, param in enumerate(group["params"]):
            if param.grad is not None and param.grad.is_sparse:
                raise UseError(
                    f"the gradient of {names_of(group)[place]} is sparse: {optimizer} needs dense ones, so "
                    "make its layer with sparse=False"
                )


def refuse_odd_numbers(groups: Sequence[dict[str, Any]]) -> None:
    """Raise, with the group and the value, if an option that a step multiplies by is no number for it.

    A learning rate that is a tensor on an accelerator is not looked at: to read it would wait for the device.
    """
    if torch.compiler.is_compiling():
        return
    for place, group in enumerate(groups):
        for option, value in group.items():
            if option in ("params", "param_names"):
                continue
            if any(_is_odd(option, one) for one in _numbers(value)):
                name = next(iter(names_of(group)), "empty")
                raise UseError(
                    f"{option} of group {place} ({name}, …) is {value!r}: no step was made. Set "
                    f"optimizer.param_groups[{place}][{option!r}] to a finite number, not below 0"
                )


def _numbers(value: Any) -> list[float]:
    """Those in an option of a group that can be read without waiting for a device."""
    given = value if isinstance(value, tuple | list) else (value,)
    return [float(one) for one in given if isinstance(one, float) or _is_number_here(one)]


def _is_number_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"


def _is_odd(option: str, value: float) -> bool:
    lowest = -ROUNDED_OFF if option in NOT_NEGATIVE else -math.inf
    return math.isnan(value) or value < lowest or (math.isinf(value) and option in FINITE)


def names_of(group: dict[str, Any]) -> list[str]:
    """What the parameters of a group are called, if only by their place."""
    return list(group.get("param_names") or (f"parameter {place}" for place in range(len(group["params"]))))


def name_of(group: dict[str, Any], param: Tensor) -> str:
    """The name of a parameter of a group."""
    return names_of(group)[[id(one) for one in group["params"]].index(id(param))]


def _norms_are_finite(grads: Sequence[Tensor]) -> bool:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    # Of norms, as they take one kernel for many tensors; nan and inf stay what they are in a sum.
    sums = [torch.stack(list(torch._foreach_norm(some))).sum() for some in by_kind.values()]
    return all(math.isfinite(float(one)) for one in sums)


def _all_finite(grads: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(grad).all()) for grad in grads)


def _agreed(level: int, params: Sequence[Tensor], over: Sequence[Any]) -> int:
    """The least over all processes of some groups."""
    for process_group in over:
        least = torch.tensor(float(level), device=local(params[0]).device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=process_group)
        level = int(least)
    return level


def _named(groups: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any], Tensor]]:
    """The gradients that are there and not empty, each with its name and its group."""
    found = [
        (name, group, _values(param.grad))
        for group in groups
        for name, param in zip(names_of(group), group["params"], strict=True)
        if param.grad is not None
    ]
    return [one for one in found if one[2].numel()]


def _values(grad: Tensor) -> Tensor:
    grad = local(grad).detach()  # Sophia has graphs through them
    if grad.is_sparse:
        return grad._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _captured(param: Tensor) -> bool:
    return torch.compiler.is_compiling() or (param.is_cuda and torch.cuda.is_current_stream_capturing())
