"""Velocity fields, made of networks."""

# B batch

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from theodolite.core.arguments import is_whole, one_of, positive
from theodolite.core.building import in_one_line
from theodolite.core.calling import call, described, logits
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

NUM_TIMES = 1000
"""The timestep of pure noise, for most models of diffusers."""
SHARED = ("img_ids", "txt_ids")
"""Inputs of Flux without a dimension for examples."""
IF_TWO_TIMES = "if it takes two times, use FlowMap(net).velocity"
"""For a network that fails."""


@dataclass(frozen=True)
class PathField:
    """A field that knows its path, so that `sample` need not be told."""

    function: Field
    path: Interpolant

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """The velocity."""
        return self.function(x, t)


def path_of(field: Field) -> Interpolant | None:
    """The path that a field was made for, if it knows it."""
    path = getattr(field, "path", None)
    return path if isinstance(path, Interpolant) else None


def field_of(
    model: nn.Module,
    *condition: Any,
    path: str | Interpolant = LINEAR,
    predict: Quantity = "velocity",
    **named: Any,
) -> Field:
    """The velocity field of a network that is called as `model(x, t, *condition, **named)`.

    For a network that is trained on a `diffusers:` workload, use `denoiser_field`.

    Args:
        model: the network. Put it into eval mode first, or its dropout makes the field random.
        condition: further inputs, such as labels (B,) or texts (B, ...). An integer, or a tensor with one
            row, is the same for all examples.
        path: the interpolant it was trained with, or its name.
        predict: the quantity it was trained to predict, which is converted to a velocity.
        named: further inputs that are given by name.

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
    check_signature(model, "t", condition, named)

    def field(x: Tensor, t: Tensor) -> Tensor:
        check_times(t, x)
        found = predicted(model, x, t, condition, named, hint=IF_TWO_TIMES)
        return convert(found, x, t, predict, "velocity", path)

    return PathField(field, path)


def denoiser_field(
    model: nn.Module,
    *,
    path: str | Interpolant = LINEAR,
    predict: Quantity = "velocity",
    timesteps: float | None = None,
    **condition: Any,
) -> Field:
    """The velocity field of a network in the convention of diffusers, as on a `diffusers:` workload.

    There, data are at the time 0 and noise at 1, and the network is called as `model(x, timestep=1000·time,
    **condition)`. The field turns this around: its time is `t = 1 − time`, 0 for noise, and its velocity goes
    to the data. Channels that are predicted beyond those of x, as DiT's variance, are left out.

    Args:
        model: the network. Put it into eval mode first.
        path: the interpolant it was trained with, or its name.
        predict: the quantity it was trained to predict. `velocity` is the derivative with respect to the
            network's own time: on the linear path noise − data, the target of `diffusers:` workloads.
        timesteps: the timestep of pure noise. By default 1000, but 1 for Flux, and the number of rows for
            times that are rows of a table.
        condition: further inputs by their names, such as `class_labels=labels`, as for `field_of`.

    >>> class Exact(nn.Module):  # data are all 3: noise − data is (x − 3)/time
    ...     def forward(self, sample, timestep):
    ...         return (sample - 3) / (timestep / 1000)[:, None]
    >>> denoiser_field(Exact())(torch.zeros(1, 2), torch.tensor([0.5]))
    tensor([[6., 6.]])
    """
    path = find_interpolant(path)
    one_of("predict", predict, get_args(Quantity))
    if timesteps is not None:
        positive("timesteps", timesteps)
    _check_denoiser(model, condition)

    def field(x: Tensor, t: Tensor) -> Tensor:
        time = 1 - check_times(t, x)
        named = {"timestep": _timestep_of(model, time) if timesteps is None else time * timesteps}
        named |= {name: one if name in SHARED else _for_all(one, x) for name, one in condition.items()}
        with _explained(model, {"x": x, **named}, "give what it was trained with"):
            found = logits(call(partial(model, **named), (x,)))  # type: ignore[arg-type]
        found = _shaped_as(x, found[tuple(map(slice, x.shape))], model)
        return convert(-found if predict == "velocity" else found, x, t, predict, "velocity", path)

    return PathField(field, path)


def timestep(kind: str, config: Mapping[str, Any], time: Tensor) -> Tensor:
    """Times from 0 (data) to 1 (noise) in the units of a model of diffusers, by its class and its config.

    >>> timestep("DiTTransformer2DModel", {}, torch.tensor([0.5]))
    tensor([500.])
    """
    if kind == "FluxTransformer2DModel":
        return time
    if config.get("time_embedding_type") == "learned":  # a row of a table for each
        rows = config["num_train_timesteps"]
        return (time * rows).long().clamp(max=rows - 1)
    return time * NUM_TIMES


def _timestep_of(model: nn.Module, time: Tensor) -> Tensor:
    config = getattr(model, "config", None)
    return timestep(type(model).__name__, config if isinstance(config, Mapping) else {}, time)


def predicted(
    model: nn.Module,
    x: Tensor,
    times: Tensor,
    condition: tuple[Any, ...],
    named: Mapping[str, Any] | None = None,
    *,
    hint: str | None = None,
) -> Tensor:
    """The output of `model(x, times, *condition, **named)`, in the shape and dtype of x.

    With a hint, an error inside the network becomes a `UseError` that ends with it.
    """
    inputs = (x, times, *(_for_all(one, x) for one in condition))
    further = {name: _for_all(one, x) for name, one in (named or {}).items()}
    called: Any = partial(model, **further) if further else model
    given = {"x": x, "times": times, **{f"condition {i}": one for i, one in enumerate(inputs[2:])}, **further}
    with _explained(model, given, hint) if hint else contextlib.nullcontext():
        found = logits(call(called, inputs))
    return _shaped_as(x, found, model)


def _shaped_as(x: Tensor, found: Tensor, model: nn.Module) -> Tensor:
    if found.shape != x.shape:
        raise UseError(
            f"{type(model).__name__} returned the shape {tuple(found.shape)} for an input of shape "
            f"{tuple(x.shape)}: its output needs the shape of its input"
        )
    return found.to(x.dtype)


@contextlib.contextmanager
def _explained(model: nn.Module, inputs: Mapping[str, Any], hint: str) -> Iterator[None]:
    """Say what a network was called with if it fails."""
    try:
        yield
    except (UseError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        shapes = [
            f"{name} of shape {tuple(one.shape)}" for name, one in inputs.items() if hasattr(one, "shape")
        ]
        raise UseError(
            f"{type(model).__name__} was called with {', '.join(shapes)}, and failed with "
            f"{in_one_line(error)}: {hint}"
        ) from error


def check_field(name: str, field: Any) -> None:
    """Check that a velocity field can be called as `field(x, t)`."""
    fix = "give field_of(model, labels), or a function field(x, t)"
    if not callable(field):
        raise UseError(f"{name} is {described(field)}: {fix}")
    signature = _signature(field)
    if signature is not None and not _accepts(signature, 2):
        raise UseError(f"{name} is {described(field)} that takes {_parameters(signature)}: {fix}")


def check_signature(
    model: nn.Module,
    times: str,
    condition: tuple[Any, ...],
    named: Mapping[str, Any] | None = None,
    *,
    missing: str = "give it too",
) -> None:
    """Check that a network can be called as `model(x, times, *condition, **named)`.

    With None for `named`, inputs cannot be given by name. `missing` says what to do about an input that is.
    """
    if not callable(model):
        raise UseError(f"the model is {model!r}: give a module that is called as model(x, {times})")
    for one in (*condition, *(named or {}).values()):
        _check_condition(one)
    signature = _signature(model)
    if signature is None:
        return
    name = type(model).__name__
    if not _accepts(signature, 2, partial=True):
        raise UseError(f"{name} has no input for the time: let it be called as model(x, {times})")
    if not _accepts(signature, 2 + len(condition), partial=True):
        most = sum(one.kind in _BY_POSITION for one in signature.parameters.values()) - 2
        room = f"{most or 'no'} condition{'s' * (most > 1)} by position"
        raise UseError(f"{name} takes {_parameters(signature)}, {room}: {len(condition)} given")
    by_name = "let it be an input by position" if named is None else BY_NAME
    _check_names(name, signature, 2 + len(condition), named or {}, (missing, by_name))


def _check_denoiser(model: nn.Module, condition: Mapping[str, Any]) -> None:
    if not callable(model):
        raise UseError(f"the model is {model!r}: give a module that is called as model(x, timestep=…)")
    for one in condition.values():
        _check_condition(one)
    signature = _signature(model)
    if signature is not None:
        named = {"timestep": None, **condition}
        _check_names(type(model).__name__, signature, 1, named, (BY_NAME, BY_NAME))


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = "give it by name, {}=…"
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _check_names(
    name: str,
    signature: inspect.Signature,
    number: int,
    named: Mapping[str, Any],
    fixes: tuple[str, str],
) -> None:
    """Check that a network with a number of inputs by position takes those by name, and needs no others.

    The fixes are for an input by position that is missing, and for one by name.
    """
    takes = f"{name} takes {_parameters(signature)}"
    try:
        bound = signature.bind_partial(*[None] * number, **named).arguments
    except TypeError as error:
        raise UseError(f"{takes}, but {error}") from None
    for key, one in signature.parameters.items():
        if key not in bound and one.default is inspect.Parameter.empty and one.kind not in _ANY:
            fix = fixes[one.kind not in _BY_POSITION].format(key)
            raise UseError(f"{takes}, and {key} is missing: {fix}")


def _signature(function: Any) -> inspect.Signature | None:
    """How it is called; None for a builtin that does not say."""
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:
        return None


def _accepts(signature: inspect.Signature, number: int, *, partial: bool = False) -> bool:
    try:
        (signature.bind_partial if partial else signature.bind)(*[None] * number)
    except TypeError:
        return False
    return True


def _parameters(signature: inspect.Signature) -> str:
    """The names of the inputs, as in the code: `(x, t, *, label)`."""
    bare = [
        one.replace(default=inspect.Parameter.empty, annotation=inspect.Parameter.empty)
        for one in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def _check_condition(condition: Any) -> None:
    if isinstance(condition, float | bool):
        raise UseError(
            f"a condition is {described(condition)}: give an integer label, or a tensor with a row for each "
            "example"
        )


def _for_all(condition: Any, x: Tensor) -> Any:
    """A condition for each example, if it is an integer, integers, or a tensor; else as it is."""
    if is_whole(condition):
        return torch.full((len(x),), int(condition), device=x.device)
    if isinstance(condition, np.ndarray) or (
        isinstance(condition, list | tuple) and condition and all(map(is_whole, condition))
    ):
        condition = torch.as_tensor(condition, device=x.device)
    if not isinstance(condition, Tensor) or not condition.ndim or len(condition) == len(x):
        return condition
    if len(condition) == 1:
        return condition.expand(len(x), *condition.shape[1:])
    raise UseError(
        f"a condition has {len(condition)} rows for {len(x)} examples: give one for each example, or one for "
        "all. Inputs without examples, such as positions, go into a function: "
        "field_of(lambda x, t: model(x, t, positions))"
    )
