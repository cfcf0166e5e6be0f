"""Velocity fields, made of networks."""

# B batch

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from theodolite.core.arguments import is_whole, one_of
from theodolite.core.calling import call, logits
from theodolite.core.errors import UseError
from theodolite.flows.interpolants import (
    LINEAR,
    Interpolant,
    Quantity,
    check_times,
    convert,
    find_interpolant,
)

Field = Callable[[Tensor, Tensor], Tensor]
"""`field(x, t) -> velocity`, with x and the velocity (B, ...) and times t (B,)."""


def field_of(
    model: nn.Module,
    *condition: Any,
    path: str | Interpolant = LINEAR,
    predict: Quantity = "velocity",
) -> Field:
    """The velocity field of a network that is called as `model(x, t, *condition)`.

    Args:
        model: the network. Put it into eval mode first.
        condition: further inputs, such as labels (B,); an integer is the same label for all examples.
        path: the interpolant it was trained with, or its name.
        predict: the quantity it was trained to predict, which is converted to a velocity.

    >>> class Shrink(nn.Module):
    ...     def forward(self, x, t):
    ...         return -x
    >>> field_of(Shrink())(torch.ones(1, 2), torch.zeros(1))
    tensor([[-1., -1.]])
    >>> field_of(nn.Linear(2, 2))
    Traceback (most recent call last):
    theodolite.UseError: Linear has no input for the time: ...
    """
    path = find_interpolant(path)
    one_of("predict", predict, get_args(Quantity))
    check_signature(model, "t", condition)

    def field(x: Tensor, t: Tensor) -> Tensor:
        check_times(t)
        found = predicted(model, x, t, condition)
        return convert(found, x, t, predict, "velocity", path)

    return field


def predicted(model: nn.Module, x: Tensor, times: Tensor, condition: tuple[Any, ...]) -> Tensor:
    """The output of `model(x, times, *condition)`, in the shape and dtype of x."""
    inputs = (x, times, *(_for_all(one, x) for one in condition))
    found = logits(call(model, inputs))
    if found.shape != x.shape:
        raise UseError(
            f"{type(model).__name__} returned the shape {tuple(found.shape)} for an input of shape "
            f"{tuple(x.shape)}: its output needs the shape of its input"
        )
    return found.to(x.dtype)


def check_signature(model: nn.Module, times: str, condition: tuple[Any, ...]) -> None:
    """Check that a network can be called as `model(x, times, *condition)`."""
    forward = model.forward if isinstance(model, nn.Module) else model
    if not callable(forward):
        raise UseError(f"the model is {model!r}: give a module that is called as model(x, {times})")
    try:
        signature = inspect.signature(forward)
    except ValueError:  # a builtin without one
        return
    name, given = type(model).__name__, f"x, {times}"
    if not _accepts(signature, 2, partial=True):
        raise UseError(f"{name} has no input for the time: let it be called as model({given})")
    if not _accepts(signature, 2 + len(condition), partial=True):
        raise UseError(f"{name} takes {_parameters(signature)}, no condition: {len(condition)} given")
    if not _accepts(signature, 2 + len(condition)):
        raise UseError(
            f"{name} takes {_parameters(signature)}, and the condition after {given} is missing: give it too"
        )


def _accepts(signature: inspect.Signature, number: int, *, partial: bool = False) -> bool:
    try:
        (signature.bind_partial if partial else signature.bind)(*[None] * number)
    except TypeError:
        return False
    return True


def _parameters(signature: inspect.Signature) -> str:
    return "(" + ", ".join(signature.parameters) + ")"


def _for_all(condition: Any, x: Tensor) -> Any:
    """An integer as a label for each example; everything else as it is."""
    if is_whole(condition):
        return torch.full((len(x),), int(condition), device=x.device)
    if isinstance(condition, Tensor) and condition.ndim and len(condition) != len(x):
        raise UseError(
            f"a condition has {len(condition)} rows for {len(x)} examples: give one for each example"
        )
    return condition
