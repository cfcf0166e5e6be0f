"""Checks before a step: gradients and options that no step can be made with."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.optimizers.sharding import local, mesh_groups

Group = dict[str, Any]

ROUNDED_OFF = 1e-12
"""A schedule that ends at 0 may go below it by rounding."""
_NOT_OPTIONS = ("params", "param_names", "shapes")
_WITH_NUMBERS = (float, tuple, list, Tensor)


def evaluated(closure: Callable[[], float] | None) -> float | None:
    """Call the closure of a step, if there is one, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def required_arguments(optimizer: Optimizer) -> list[str]:
    """The arguments that a step of the optimizer cannot do without."""
    # Of the class: a scheduler puts its own function around the step of the object.
    _, *wanted = inspect.signature(type(optimizer).step).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in wanted if one.default is one.empty and one.kind not in optional]


class NonFiniteError(UseError, FloatingPointError):
    """A gradient holds nan or inf. The weights and the optimizer's state are unchanged."""


@torch.no_grad()
def check_step(
    groups: Sequence[Group],
    dense: Mapping[str, Sequence[Group]],
    *,
    defaults: Callable[[Group], Mapping[str, Any]] = lambda group: {},
    squared: Sequence[Group] = (),
    look: bool = True,
    over: Sequence[Any] = (),
) -> None:
    """Raise if no step can be made, before anything has moved.

    To check gradients, one number goes from the device to the CPU, so a step waits for its gradients.
    Processes that hold shards of a gradient, or share the work, agree: all of them raise, or none. While a
    CUDA graph is captured, gradients are not checked.

    Args:
        groups: all groups of the step.
        dense: by name of the optimizer, groups whose gradients must not be sparse.
        defaults: of a group's optimizer. A default of inf means: no bound; a negative one: any sign.
        squared: groups whose optimizer keeps squares of gradients, which must be finite too: an infinite
            square stays in a moving average for good, and its weight never moves again.
        look: check gradients? If not, processes do not agree either.
        over: process groups of replicas that share the work.
    """
    error = None
    try:
        _refuse_odd_numbers(groups, defaults)
        for optimizer, some in dense.items():
            refuse_sparse(optimizer, some)
    except UseError as found:
        error = found
    params = [param for group in groups for param in group["params"] if param.grad is not None]
    if look and params and not _is_captured(params[0]):
        over = (*mesh_groups(params), *over)
        grads = [_values(param.grad) for param in params]
        # Norms take one kernel for many tensors; nan and inf remain in that of all.
        norm = float(nn.utils.get_total_norm(grads))
        # 0: an entry is not finite; 1: a sum of squares is not, which is rare; 2: all are finite.
        level = 2 if math.isfinite(norm) else int(all(bool(grad.isfinite().all()) for grad in grads))
        level = _agreed(-1 if error is not None else level, params, over)
        if error is None:
            _refuse(level, groups)
        if level == 1:
            large = [one for one in _named(squared) if not bool(one[2].abs().amax().square().isfinite())]
            if not _agreed(int(not large), params, over):
                _refuse_large(large)
    if error is not None:
        raise error


def _refuse(level: int, groups: Sequence[Group]) -> None:
    if level < 0:
        raise UseError("another process has refused this step: no step was made. It says why")
    for name, _, grad in _named(groups) if level == 0 else ():
        if bad := int((~torch.isfinite(grad)).sum()):
            kind = "nan" if bool(torch.isnan(grad).any()) else "inf"
            raise NonFiniteError(
                f"the gradient of {name} is {kind} in {bad} of {grad.numel()} entries: no step was made. "
                "Look at the loss of this batch, lower the learning rate, or leave such batches out"
            )
    if level == 0:
        raise NonFiniteError("a gradient in another process is not finite: no step was made. It says which")


def _refuse_large(large: Sequence[tuple[str, Group, Tensor]]) -> None:
    for name, group, grad in large:
        raise NonFiniteError(
            f"the gradient of {name} has an entry of {float(grad.abs().amax()):.3g}, whose square is beyond "
            f"{grad.dtype}, and {group.get('rule', 'the optimizer')} keeps squares: no step was made. Look "
            "at the loss of this batch, or leave such batches out"
        )
    raise NonFiniteError("a gradient in another process is too large to be squared: no step was made")


def refuse_sparse(optimizer: str, groups: Sequence[Group]) -> None:
    """Raise, with the name of the tensor, if a gradient in these groups is sparse."""
    for group in groups:
        for place, param in enumerate(group["params"]):
            if param.grad is not None and param.grad.is_sparse:
                raise UseError(
                    f"the gradient of {names_of(group)[place]} is sparse: {optimizer} needs dense ones, so "
                    "make its layer with sparse=False"
                )


def names_of(group: Group) -> list[str]:
    """The names of a group's parameters, or their indices."""
    return list(group.get("param_names") or (f"parameter {place}" for place in range(len(group["params"]))))


def _refuse_odd_numbers(groups: Sequence[Group], defaults: Callable[[Group], Mapping[str, Any]]) -> None:
    """Raise, with the group and the value, if an option is nan, or infinite or negative where its default
    is not.

    A learning rate that is a tensor on an accelerator is not read: that would wait for the device.
    """
    if torch.compiler.is_compiling():
        return
    for place, group in enumerate(groups):
        usual = defaults(group)
        for option, value in group.items():
            if option in _NOT_OPTIONS or not isinstance(value, _WITH_NUMBERS) or _is_usual(value):
                continue
            default = list(_numbers(usual.get(option.removeprefix("planned_"), (-math.inf, math.inf))))
            lowest = -ROUNDED_OFF if min(default, default=0.0) >= 0 else -math.inf
            highest = sys.float_info.max if max(default, default=0.0) < math.inf else math.inf
            if not all(max(lowest, -highest) <= one <= highest for one in _numbers(value)):
                name = next(iter(names_of(group)), "empty")
                raise UseError(
                    f"{option} of group {place} ({name}, …) is {value!r}: no step was made. Set "
                    f"optimizer.param_groups[{place}][{option!r}] to a finite number, not below 0"
                )


def _is_usual(value: Any) -> bool:
    """Is it a number, or a few, that no default forbids?"""
    numbers = value if isinstance(value, tuple) else (value,)
    return all(isinstance(one, float) and 0 <= one < math.inf for one in numbers)


def _numbers(value: Any) -> Iterator[float]:
    """The numbers in an option that can be read without waiting for a device."""
    for one in value if isinstance(value, tuple | list) else (value,):
        scalar = isinstance(one, Tensor) and one.numel() == 1 and one.device.type == "cpu"
        if scalar or isinstance(one, float):
            yield float(one)


def _agreed(level: int, params: Sequence[Tensor], over: Sequence[Any]) -> int:
    """The minimum over all processes of some groups."""
    for process_group in over:
        least = torch.tensor(float(level), device=local(params[0]).device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=process_group)
        level = int(least)
    return level


def _named(groups: Sequence[Group]) -> Iterator[tuple[str, Group, Tensor]]:
    """The gradients that are not empty, each with its name and its group."""
    for group in groups:
        for name, param in zip(names_of(group), group["params"], strict=True):
            if param.grad is not None and (grad := _values(param.grad)).numel():
                yield name, group, grad


def _values(grad: Tensor) -> Tensor:
    grad = local(grad).detach()  # Sophia has graphs through them
    if grad.is_sparse:
        return grad._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _is_captured(param: Tensor) -> bool:
    return torch.compiler.is_compiling() or (param.is_cuda and torch.cuda.is_current_stream_capturing())
