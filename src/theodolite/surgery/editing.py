"""The edits of which a surgery is made, each with its way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from theodolite.anatomy.names import canonical_modules
from theodolite.surgery.holding import Held
from theodolite.surgery.vectors import ScaledGain, ScaledWeight


@dataclass
class Edits:
    """What was changed so far, to be undone if it did not keep the function."""

    undos: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        """Take everything back, last first."""
        while self.undos:
            self.undos.pop()()

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Put other values into a tensor."""
        if tensor.is_meta:
            return
        before = tensor.detach().clone()
        _write(tensor, value)
        self.undos.append(lambda: _write(tensor, before))

    def freeze(self, where: Held, value: float) -> None:
        """Make a parameter a constant buffer; the network's state keeps its name."""
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
        """Make a buffer a parameter of the same values, at its place in the order of the module's."""
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
    """By name of a weight with scale vectors in it: where it is held, and the vectors."""
    return {name: (where, how) for name, where, how in _parametrized(model) if isinstance(how, ScaledWeight)}


def scaled_gains(model: nn.Module) -> dict[str, tuple[Held, ScaledGain]]:
    """By name of a norm's gain with a magnitude of its own: where it is held, and the magnitude."""
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
    """The names of a module's parameters in their order, as it was before any of them was parametrized."""
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
    """As torch's own, which breaks copies of the module: they share its class, and it edits that."""
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
    """The class that parametrizations gave a module, for this one alone, less one property."""
    cls = type(module)
    kept = {key: value for key, value in vars(cls).items() if key not in (without, "__dict__", "__weakref__")}
    return type(cls.__name__, cls.__bases__, kept)
