"""Optimizers that somebody else's function makes: called, checked, and read for each tensor.

A factory gets a model and returns its optimizer: one, several, or one of the forms that Lightning's
`configure_optimizers` has, with schedulers beside them. Schedulers are left aside: the learning rates are
those that they start from.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.building import build_model, in_one_line, untouched_randomness
from theodolite.core.calling import Build, described
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers.group_scales import apply_group_scales
from theodolite.optimizers.joined import Joined
from theodolite.optimizers.parameter_groups import MEMBERS, handlings, layers
from theodolite.optimizers.planned import set_lr
from theodolite.optimizers.recognition import eps_of, reads_stored_shape, rule_of, rule_of_vectors
from theodolite.present.text import counted

MakeOptimizer = Callable[[nn.Module], Any]
"""A model to its optimizer, to several, or to optimizers and schedulers."""


@dataclass(frozen=True)
class Made:
    """What a factory returned. Made by `make_optimizers`."""

    optimizers: tuple[Optimizer, ...]
    """In order; learning rates are those before any schedule."""
    notes: tuple[str, ...]
    """What was left aside."""


@dataclass(frozen=True)
class OwnOptions:
    """How a factory's optimizers treat one tensor. Made by `read_options`."""

    name: str
    state: Literal["trained", "frozen", "absent", "twice", "unknown"]
    """As in `theodolite.optimizers.parameter_groups.Handling`."""
    class_name: str
    """Of the optimizer; empty if none has the tensor."""
    rule: str | None
    """The name in `theodolite.optimizers.OPTIMIZERS` of the rule that fits; None if none does."""
    lr: float
    """Before any schedule; nan if no number is known."""
    weight_decay: float
    decoupled: bool | None
    eps: float | None
    group: int
    """The number of its group, counted over all optimizers; −1 if no group has it."""
    stored_shape: bool = False
    """Is the optimizer's factor of a shape that of the stored tensor?"""


def make_optimizers(make: MakeOptimizer, model: nn.Module) -> Made:
    """Call a factory for a model, and check that it returns optimizers of the model's tensors.

    The groups get the learning rates that a schedule starts from: a warmup from zero has already changed
    them. Random numbers of the caller stay as they are.

    >>> import torch
    >>> make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> make_optimizers(make, nn.Linear(2, 2)).optimizers[0].param_groups[0]["lr"]
    0.1
    >>> make_optimizers(lambda model, config: None, nn.Linear(2, 2))
    Traceback (most recent call last):
    theodolite.UseError: the optimizer's factory <lambda> needs config beside the model: bind it, as in ...
    """
    said = f"the optimizer's factory {_name(make)}"
    _check_signature(make, said)
    before = _versions(model)
    try:
        with untouched_randomness():
            returned = make(model)
    except UseError as error:
        raise UseError(f"{said}: {error}") from error
    except (Exception, SystemExit) as error:  # as of an argparse in it
        raise UseError(f"{said} failed at {_place(error)}: {in_one_line(error)}") from error
    _check_unchanged(before, model, said)
    notes: list[str] = []
    optimizers = tuple(_collected(returned, said, notes))
    if not optimizers:
        raise UseError(f"{said} returned {_shown(returned)}: return its optimizer, or a list of several")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _unschedule(group)
    _check_tensors(optimizers, model, said)
    return Made(optimizers, tuple(dict.fromkeys(notes)))


def made_as_one(make: MakeOptimizer, model: nn.Module) -> Optimizer:
    """What a factory makes of a model, to train with: several optimizers are joined.

    Factors of groups (`apply_group_scales`) are multiplied in.

    >>> from torch.optim import SGD, AdamW
    >>> make = lambda model: [SGD([model.weight], lr=0.1), AdamW([model.bias], lr=0.2)]
    >>> made_as_one(make, nn.Linear(2, 2))
    Joined(SGD, AdamW)
    """
    made = make_optimizers(make, model).optimizers
    apply_group_scales(made)
    return made[0] if len(made) == 1 else Joined(made)


def read_options(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, OwnOptions]:
    """How the optimizers treat each tensor of the model, by canonical name.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> for name, found in read_options(model, [torch.optim.SGD(model[0].parameters(), lr=0.5)]).items():
    ...     print(name, found.state, found.rule, found.lr)
    0.weight trained sgd 0.5
    0.bias trained sgd 0.5
    1.weight absent None nan
    1.bias absent None nan
    """
    tensors: dict[str, Tensor] = dict(canonical_parameters(model))
    found, _ = handlings(tensors, optimizers)
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    places: dict[int, int] = {}
    for index, (_, group) in enumerate(groups):
        for tensor in group["params"]:
            places.setdefault(id(tensor), index)
    options = {}
    for name, how in found.items():
        place = places.get(id(tensors[name]), -1)
        rule, class_name, eps, lr, stored = None, "", None, math.nan, False
        if place >= 0:
            optimizer, group = groups[place]
            rule, class_name = rule_of(optimizer, group), type(layers(optimizer, group)[-1]).__name__
            if tensors[name].ndim < 2:
                rule = rule_of_vectors(rule, group)
            eps, lr = eps_of(rule, group), _number(group.get("lr"))
            stored = reads_stored_shape(rule, group)
        decay = how.weight_decay
        options[name] = OwnOptions(
            name, how.state, class_name, rule, lr, decay, how.decoupled, eps, place, stored
        )
    return options


def check_pure(make: MakeOptimizer, build: Build, size: Size) -> None:
    """Call a factory for two equal models, and check that it makes equal groups for both, whatever the seed.

    >>> from theodolite import Size
    >>> import torch
    >>> rates = iter([0.01, 0.005])
    >>> make = lambda model: torch.optim.AdamW(model.parameters(), lr=next(rates))
    >>> check_pure(make, lambda width, depth: nn.Linear(width, 2), Size(4, 1))
    Traceback (most recent call last):
    theodolite.UseError: the optimizer's factory <lambda> keeps state between calls: for the same model ...
    """
    first, second = (_by_tensor(make, build_model(build, size, seed=0), seed) for seed in (0, 1))
    said = f"the optimizer's factory {_name(make)} keeps state between calls: for the same model it made "
    fix = "Compute everything from the model that it is given, without state and without random numbers"
    for name in dict.fromkeys((*first, *second)):
        one, other = first.get(name, []), second.get(name, [])
        if len(one) != len(other):
            raise UseError(f"{said}{counted(len(one), 'group')} with {name}, then {len(other)}. {fix}")
        for before, after in zip(one, other, strict=True):
            for option in dict.fromkeys((*before, *after)):
                was, is_now = before.get(option), after.get(option)
                if was != is_now:
                    raise UseError(f"{said}{name} with {option} {was!r}, then {is_now!r}. {fix}")


def options_digest(make: MakeOptimizer, build: Build, size: Size) -> str:
    """A hash of the options that a factory gives each tensor: the same for the same numbers, to six digits.

    >>> import torch
    >>> rates = (0.1, 0.1 + 1e-15, 0.2)
    >>> makes = [lambda model, lr=lr: torch.optim.SGD(model.parameters(), lr) for lr in rates]
    >>> one, same, other = (options_digest(make, nn.Linear, Size(4, 1)) for make in makes)
    >>> one == same, one == other
    (True, False)
    """
    found = _by_tensor(make, build_model(build, size, seed=0), 0)
    return hashlib.sha256(json.dumps(_rounded(found), sort_keys=True).encode()).hexdigest()[:16]


def _rounded(value: Any) -> Any:
    """Floats to six digits: the last ones differ between machines."""
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _by_tensor(make: MakeOptimizer, model: nn.Module, seed: int) -> dict[str, list[dict[str, Any]]]:
    """By name of a tensor: the options of each group that has it, as far as they can be compared."""
    names = {id(tensor): name for name, tensor in canonical_parameters(model)}
    found: dict[str, list[dict[str, Any]]] = {}
    with untouched_randomness(seed):
        made = make_optimizers(make, model)
    for optimizer in made.optimizers:
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in MEMBERS}
            known = {key: shown for key, value in options.items() if (shown := _plain(value)) is not None}
            for tensor in group["params"]:
                held = {"class": type(layers(optimizer, group)[-1]).__name__, **known}
                found.setdefault(names[id(tensor)], []).append(held)
    return found


def _plain(value: Any) -> Any:
    """A value that can be compared with ==; None for functions and other objects."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else None


def _check_signature(make: Any, said: str) -> None:
    """Refuse what cannot be called with a model alone."""
    if isinstance(make, Optimizer):
        raise UseError(f"{said} is an optimizer: give a function of the model that makes it")
    inner = _unbound(make)
    if isinstance(inner, type) and issubclass(inner, Optimizer):
        raise UseError(
            f"{said} is a class: give a function of the model, as in "
            f"lambda model: {inner.__name__}(model.parameters(), lr=…)"
        )
    if not callable(make):
        raise UseError(f"{said} cannot be called: give a function of the model that returns its optimizer")
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return
    kinds = inspect.Parameter
    places = [
        each for each in parameters if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    if not places and all(each.kind is not kinds.VAR_POSITIONAL for each in parameters):
        raise UseError(f"{said} takes no model: give a function of the model that returns its optimizer")
    others = [*places[1:], *(each for each in parameters if each.kind is kinds.KEYWORD_ONLY)]
    needed = [each.name for each in others if each.default is kinds.empty]
    if needed:
        bound = ", ".join(f"{name}=…" for name in needed)
        raise UseError(
            f"{said} needs {' and '.join(needed)} beside the model: bind "
            f"{'it' if len(needed) == 1 else 'them'}, as in functools.partial({_name(make)}, {bound})"
        )


def _collected(returned: Any, said: str, notes: list[str]) -> Iterator[Optimizer]:
    """The optimizers in what a factory returned, in order."""
    if isinstance(returned, Optimizer):
        yield returned
    elif _is_scheduler(returned):
        notes.append(_left_aside(returned))
    elif isinstance(returned, Mapping):
        yield from _of_mapping(returned, said, notes)
    elif isinstance(returned, tuple | list):
        for one in returned:
            if one is not None:  # as in (optimizer, None), without a scheduler
                yield from _collected(one, said, notes)
    elif isinstance(inner := getattr(returned, "optimizer", None), Optimizer):
        notes.append(f"the {type(inner).__name__} inside a {type(returned).__name__} was taken")
        yield inner
    else:
        raise UseError(f"{said} returned {_shown(returned)}: return its optimizer, or a list of several")


def _of_mapping(returned: Mapping[Any, Any], said: str, notes: list[str]) -> Iterator[Optimizer]:
    """The optimizers of a dictionary of Lightning's, or of one by the user's own names."""
    if "params" in returned:
        raise UseError(f"{said} returned parameter groups: return an optimizer of them, as in AdamW(groups)")
    for key, value in returned.items():
        if key in ("lr_scheduler", "scheduler"):
            inner = value.get("scheduler") if isinstance(value, Mapping) else value
            if inner is not None:
                notes.append(_left_aside(inner))
        elif not isinstance(value, str | bool | int | float | None):  # interval, frequency, monitor, …
            yield from _collected(value, said, notes)


def _is_scheduler(value: Any) -> bool:
    if isinstance(value, LRScheduler):
        return True
    return not isinstance(value, type) and all(
        hasattr(value, name) for name in ("step", "get_last_lr", "state_dict")
    )


def _left_aside(scheduler: Any) -> str:
    return f"a {type(scheduler).__name__} was returned too: learning rates are those that it starts from"


def _unschedule(group: dict[str, Any]) -> None:
    """Give a group the learning rate before its schedule: the highest, of those that go up and down."""
    if "initial_lr" not in group:
        return
    lr = group.pop("initial_lr")
    lr = group.pop("max_lr", lr)  # of a OneCycleLR or a CyclicLR
    for option in ("min_lr", "base_momentum", "max_momentum"):
        group.pop(option, None)
    set_lr(group, float(lr))


def _versions(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """By name: a tensor of the model, and how often it was written to."""
    return {name: (tensor, tensor._version) for name, tensor in canonical_parameters(model)}


def _check_unchanged(before: Mapping[str, tuple[Tensor, int]], model: nn.Module, said: str) -> None:
    """Refuse a factory that replaces tensors of the model, or writes to them: no other build has that."""
    after: dict[str, Tensor] = dict(canonical_parameters(model))
    for name in dict.fromkeys((*before, *after)):
        was, version = before.get(name, (None, 0))
        if after.get(name) is not was:
            how = "adds" if was is None else "replaces" if name in after else "removes"
            raise UseError(f"{said} {how} {name}: change the model where it is built, not its optimizer")
        if was is not None and was._version != version:
            raise UseError(
                f"{said} changes the values of {name}: initialise the model where it is built, not its "
                "optimizer"
            )


def _check_tensors(optimizers: Sequence[Optimizer], model: nn.Module, said: str) -> None:
    """Refuse optimizers of tensors that the model does not have."""
    own = {id(tensor) for tensor in model.parameters()}
    held = {
        id(tensor): tensor for one in optimizers for group in one.param_groups for tensor in group["params"]
    }
    foreign = [tensor for key, tensor in held.items() if key not in own]
    if not held:
        raise UseError(f"{said} returned an optimizer without tensors: give it those of the model")
    if foreign:
        raise UseError(
            f"{said} trains {counted(len(foreign), 'tensor')} that the model it was given does not have "
            f"({len(own & held.keys())} are its own), one of shape {tuple(foreign[0].shape)}: make the "
            "groups from the argument, not from a model that was built elsewhere or wrapped"
        )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float | Tensor) else math.nan


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return described(value)


def _unbound(make: Any) -> Any:
    """The function inside of partials."""
    while isinstance(make, functools.partial):
        make = make.func
    return make


def _name(make: Any) -> str:
    make = _unbound(make)
    plain = isinstance(make, str | int | float | None)
    return getattr(make, "__name__", None) or (repr(make) if plain else type(make).__name__)


def _place(error: BaseException) -> str:
    """The last line at which an error was raised, as file:line; outside of Python's library and packages."""
    frames = traceback.extract_tb(error.__traceback__)[1:] or traceback.extract_tb(error.__traceback__)
    library = (sysconfig.get_path("stdlib"), "<frozen")
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and not frame.filename.startswith(library)
    ]
    frame = (own or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
