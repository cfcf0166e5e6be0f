"""Velocity fields, made of networks."""

# B batch

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from theodolite.core.arguments import is_whole, one_of, positive
from theodolite.core.building import in_one_line, untouched_randomness
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

BY_NAME = "give it by name, {}=…"
"""What to do about an input that is missing."""

_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""Errors of a network. Other exceptions may be control flow: by one, a checkpoint ends its second pass."""


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
        found = predicted(model, x, t, condition, named)
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
        with _explained(model, (x,), named, " by name"):
            output = call(partial(model, **named), (x,))  # type: ignore[arg-type]
        found = logits(output)
        found = _shaped_as(x, found[tuple(map(slice, x.shape))] if found.ndim == x.ndim else found, model)
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
    given: str | None = " by name",
) -> Tensor:
    """The output of `model(x, times, *condition, **named)`, in the shape and dtype of x.

    An error inside the network becomes a `UseError`, in which `given` says how conditions are given; with
    None errors are left as they are.
    """
    inputs = (x, times, *(_for_all(one, x) for one in condition))
    further = {name: _for_all(one, x) for name, one in (named or {}).items()}
    called: Any = partial(model, **further) if further else model
    explained = _explained(model, inputs, further, given) if given else contextlib.nullcontext()
    with explained:
        output = call(called, inputs)
    return _shaped_as(x, logits(output), model)


def _shaped_as(x: Tensor, found: Tensor, model: nn.Module) -> Tensor:
    if found.shape != x.shape:
        raise UseError(
            f"{type(model).__name__} returned the shape {tuple(found.shape)} for an input of shape "
            f"{tuple(x.shape)}: its output needs the shape of its input"
        )
    return found.to(x.dtype)


def check_shape(name: str, found: Any, x: Tensor, fix: str) -> Tensor:
    """Check that what a function returned for points x is a tensor of their shape."""
    if not isinstance(found, Tensor) or found.shape != x.shape:
        raise UseError(f"{name} returned {described(found)} for points of shape {tuple(x.shape)}: {fix}")
    return found


@contextlib.contextmanager
def _explained(
    model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], given: str
) -> Iterator[None]:
    """Say what a network was called with if it fails, and what it was not called with."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        if type(error).__module__.startswith("theodolite"):  # a `UseError`, or one of a probe that looks on
            raise
        names = ("x", "times", *(f"condition {place}" for place in range(len(inputs) - 2)))
        seen = dict(zip(names, inputs, strict=False)) | dict(named)
        missing = _left_out(model, len(inputs), named)
        raise UseError(
            f"{type(model).__name__} was called with {', '.join(starmap(_shown, seen.items()))}"
            f"{', without ' * bool(missing)}{', '.join(missing)}, and failed with {_quoted(error)}: "
            f"{_remedy(error, model, inputs, named, given if missing else '')}"
        ) from error


def _left_out(model: nn.Module, number: int, named: Mapping[str, Any]) -> list[str]:
    """The inputs of a network that are None by default, and were not given."""
    signature = _signature(model)
    if signature is None:
        return []
    bound = signature.bind_partial(*[None] * number, **named).arguments
    return [name for name, one in signature.parameters.items() if name not in bound and one.default is None]


def _shown(name: str, value: Any) -> str:
    """An input: its shape, the range of labels, or what it is."""
    if not isinstance(value, Tensor):
        return f"{name} ({described(value)})"
    shown = f"{name} of shape {tuple(value.shape)}"
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)  # whose numbers cannot be looked at
    if _is_label(value) and value.numel() and value.device.type == "cpu" and not wrapped:
        return f"{shown} with integers from {value.min()} to {value.max()}"
    return shown


def _quoted(error: Exception) -> str:
    """The error in one line, with the line of code if it says nothing, as an assertion."""
    at = traceback.extract_tb(error.__traceback__)
    return in_one_line(error) + (f" in `{at[-1].line}`" if at and at[-1].line and not str(error) else "")


def _remedy(
    error: Exception, model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], given: str
) -> str:
    # After an error of its own a GPU runs nothing more.
    alive = len(inputs) > 1 and "CUDA error" not in str(error)
    if alive and _runs(model, (inputs[0], _other_times(inputs[1]), *inputs[2:]), named):
        one_time = inputs[1].ndim == 1
        return (
            f"if it takes {'two times, use FlowMap(net).velocity' if one_time else 'one time, use field_of'}"
        )
    labels = any(map(_is_label, (*inputs[2:], *named.values())))
    if labels and (isinstance(error, IndexError) or "device-side assert" in str(error)):
        return "give labels below its number of classes"
    if len(inputs) > 2 or named or given:
        lacking = isinstance(error, KeyError | AttributeError) or "None" in str(error)
        shape = "" if lacking else ", or check the shape of the points"
        return f"give the conditions it was trained with{given}{shape}"
    return "it has no conditions, so check the shape of the points, and the network itself"


def _other_times(times: Tensor) -> Tensor:
    """Two times (B, 2) in place of one (B,), and one in place of two."""
    return torch.stack([times, times], 1) if times.ndim == 1 else times[:, 0]


@torch.no_grad()
def _runs(model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Does the network take these inputs? Its buffers and the random numbers are left as they were."""
    buffers = [(one, one.clone()) for one in model.buffers()] if isinstance(model, nn.Module) else []
    try:
        with untouched_randomness():
            output = logits(call(partial(model, **named), inputs))  # type: ignore[arg-type]
    except Exception:
        return False
    finally:
        for one, before in buffers:
            one.copy_(before)
    return output.shape == inputs[0].shape


def _is_label(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def check_field(name: str, field: Any) -> None:
    """Check that a velocity field can be called as `field(x, t)`."""
    check_function(name, field, 2, "give field_of(model, labels), or a function field(x, t)")


def check_function(name: str, function: Any, number: int, fix: str) -> None:
    """Check that something can be called with so many inputs by position."""
    if not callable(function):
        raise UseError(f"{name} is {described(function)}: {fix}")
    signature = _signature(function)
    if signature is not None and not _accepts(signature, number):
        raise UseError(f"{name} is {described(function)} that takes {_parameters(signature)}: {fix}")


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
    signature, name = _signature(model), type(model).__name__
    if signature is None:
        return
    if not _accepts(signature, 1, "timestep", partial=True):
        raise UseError(
            f"{name} takes {_parameters(signature)}, and has no input timestep: let it be called as "
            "model(x, timestep=…), or use field_of for a network that is called as model(x, t)"
        )
    _check_names(name, signature, 1, {"timestep": None, **condition}, (BY_NAME, BY_NAME))


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
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
        raise UseError(f"{takes}, but {error}: give each of its inputs once, by these names") from None
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


def _accepts(signature: inspect.Signature, number: int, *names: str, partial: bool = False) -> bool:
    try:
        (signature.bind_partial if partial else signature.bind)(*[None] * number, **dict.fromkeys(names))
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
