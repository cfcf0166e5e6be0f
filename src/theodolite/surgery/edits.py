"""The edits that surgery consists of, each with its undo; and where a network holds a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from theodolite.anatomy.names import canonical_modules
from theodolite.surgery.vectors import ScaledGain, ScaledWeight


@dataclass(frozen=True)
class Held:
    """A tensor of a network: the module that holds it, and the attribute."""

    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """Its current value."""
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor


def held(model: nn.Module, name: str) -> Held:
    """Where the parameter or buffer with this canonical name is held."""
    prefix, _, attribute = name.rpartition(".")
    return Held(dict(canonical_modules(model))[prefix], attribute)


def holders(model: nn.Module, tensor: Tensor) -> list[Held]:
    """All places where a parameter is held: several, if modules share it."""
    found = {
        (id(module), attribute): Held(module, attribute)
        for _, module in canonical_modules(model)
        for attribute, one in module._parameters.items()
        if one is tensor
    }
    return list(found.values())


@dataclass
class Edits:
    """The edits made so far, to be undone if they do not keep the function."""

    undos: list[Callable[[], object]] = field(default_factory=list)

    def undo(self) -> None:
        """Undo everything, last first."""
        while self.undos:
            self.undos.pop()()

    @contextmanager
    def undone_on_failure(self) -> Iterator[Edits]:
        """Undo everything if something is raised."""
        try:
            yield self
        except BaseException:
            self.undo()
            raise

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Put other values into a tensor."""
        if tensor.is_meta:
            return
        before = tensor.detach().clone()
        _write(tensor, value)
        self.undos.append(lambda: _write(tensor, before))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        before = getattr(owner, name)
        setattr(owner, name, value)
        self.undos.append(lambda: setattr(owner, name, before))

    def freeze(self, where: Held, value: float) -> None:
        """Replace a parameter by a constant buffer of the same name."""
        module, name = where.module, where.attribute
        parameter = where.tensor
        assert isinstance(parameter, nn.Parameter)
        order = tuple(module._parameters)
        del module._parameters[name]
        module.register_buffer(name, torch.full_like(parameter, value, requires_grad=False))

        def undo() -> None:
            del module._buffers[name]
            module.register_parameter(name, parameter)
            _put_in_order(module, order)

        self.undos.append(undo)

    def thaw(self, where: Held, order: Sequence[str], *, trained: bool) -> None:
        """Replace a buffer by a parameter with the same values, at its place in the order of parameters."""
        module, name = where.module, where.attribute
        buffer = where.tensor
        persistent = name not in module._non_persistent_buffers_set
        del module._buffers[name]
        module.register_parameter(name, nn.Parameter(buffer.detach().clone(), requires_grad=trained))
        _put_in_order(module, order)

        def undo() -> None:
            del module._parameters[name]
            module.register_buffer(name, buffer, persistent=persistent)

        self.undos.append(undo)

    def parametrize(self, where: Held, how: nn.Module) -> None:
        """Compute a tensor from what is held now."""
        how.train(where.module.training)
        _register(where, how)
        self.undos.append(lambda: _remove(where))

    def unparametrize(self, where: Held) -> None:
        """Hold what a tensor was computed from."""
        (how,) = where.module.parametrizations[where.attribute]  # type: ignore[index]
        _remove(where)
        self.undos.append(lambda: _register(where, how))


def scaled_weights(model: nn.Module) -> dict[str, tuple[Held, ScaledWeight]]:
    """The weights with scale vectors in them, by name."""
    return {name: (where, how) for name, where, how in _parametrized(model) if isinstance(how, ScaledWeight)}


def scaled_gains(model: nn.Module) -> dict[str, tuple[Held, ScaledGain]]:
    """The gains of norms that have a magnitude of their own, by name."""
    return {name: (where, how) for name, where, how in _parametrized(model) if isinstance(how, ScaledGain)}


def _parametrized(model: nn.Module) -> Iterator[tuple[str, Held, nn.Module]]:
    for prefix, module in canonical_modules(model):
        for attribute, (how, *others) in getattr(module, "parametrizations", {}).items():
            if not others:
                yield (f"{prefix}.{attribute}" if prefix else attribute), Held(module, attribute), how


@torch.no_grad()
def _write(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def order_of(module: nn.Module) -> tuple[str, ...]:
    """The order of a module's parameters before any of them was parametrized."""
    for lists in getattr(module, "parametrizations", {}).values():
        for how in lists:
            if isinstance(how, (ScaledWeight, ScaledGain)):
                return how.order
    return tuple(module._parameters)


def _put_in_order(module: nn.Module, order: Sequence[str]) -> None:
    """An optimizer's state is loaded by the order of the parameters: it must not change."""
    held = dict(module._parameters)
    module._parameters.clear()
    module._parameters.update({name: held.pop(name) for name in order if name in held} | held)


def _register(where: Held, how: nn.Module) -> None:
    how.order = order_of(where.module)  # type: ignore[assignment]
    if parametrize.is_parametrized(where.module):
        where.module.__class__ = _own_class(where.module)
    parametrize.register_parametrization(where.module, where.attribute, how, unsafe=True)


def _remove(where: Held) -> None:
    """As torch's own function, which edits the class that copies of the module share, and so breaks them."""
    module, name = where.module, where.attribute
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    original, order = lists[name].original, order_of(module)
    del lists[name]
    if len(lists):
        module.__class__ = _own_class(module, without=name)
    else:
        del module.parametrizations
        module.__class__ = type(module).__bases__[0]
    assert isinstance(original, nn.Parameter)
    module.register_parameter(name, original)
    _put_in_order(module, order)


def _own_class(module: nn.Module, *, without: str = "") -> type[nn.Module]:
    """A copy of the class that parametrizations gave a module, for this module alone, less one property."""
    cls = type(module)
    kept = {key: value for key, value in vars(cls).items() if key not in (without, "__dict__", "__weakref__")}
    return type(cls.__name__, cls.__bases__, kept)
