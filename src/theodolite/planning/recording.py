"""Watching an initialisation: which operations filled each tensor, and so by which law."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from theodolite.planning.law import Law
from theodolite.planning.spread import Spread, clamped, constant, erfinv, truncated


class Recorder(TorchDispatchMode):
    """Notes for every storage how each stretch of it was last filled; None where that has no simple law.

    A storage is one line of numbers; a tensor that is dense covers one stretch of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stretches: dict[int, list[_Stretch]] = {}
        # While these live no later storage gets the address of an earlier one; they hold no memory.
        self._storages: list[StorageWeakRef] = []

    def read(self, tensor: Tensor) -> Spread | None:
        """The law of all entries alike, or None."""
        if tensor.is_complex():
            return None
        start, stop = _extent(tensor)
        found = {
            stretch.spread
            for stretch in self._stretches.get(_address(tensor), ())
            if stretch.start < stop and start < stretch.stop
        }
        spread = found.pop() if len(found) == 1 else None
        # One number in several places: they are not drawn each for itself.
        repeated = any(stride == 0 and size > 1 for size, stride in _strides(tensor))
        return None if repeated and spread and spread.z != "constant" else spread

    def law(self, tensor: Tensor) -> Law | None:
        """The law of a tensor; the network's own where stretches of it differ, as a row of zeros does."""
        spread = self.read(tensor)
        if spread is not None:
            return spread.law()
        start, stop = _extent(tensor)
        laws = []
        for stretch in self._stretches.get(_address(tensor), ()):
            if stretch.start < stop and start < stretch.stop:
                if stretch.spread is None or stop - start != tensor.numel() or tensor.is_complex():
                    return None
                share = (min(stop, stretch.stop) - max(start, stretch.start)) / (stop - start)
                laws.append((share, stretch.spread.law()))
        if not laws:
            return None
        mean = sum(share * law.mean for share, law in laws)
        variance = sum(share * (law.std**2 + (law.mean - mean) ** 2) for share, law in laws)
        return Law("own", std=math.sqrt(variance), mean=mean)

    @contextmanager
    def with_truncation(self) -> Iterator[Recorder]:
        """Record, and see `torch.nn.init.trunc_normal_` as the one law it is.

        It draws again what fell outside, which only the values can tell; and it does nothing on meta.
        """
        original = torch.nn.init._no_grad_trunc_normal_

        def noted(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
        ) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                original(tensor, mean, std, a, b, generator=generator)
            self.write(tensor, truncated(mean, std, a, b))
            return tensor

        torch.nn.init._no_grad_trunc_normal_ = noted
        try:
            with self:
                yield self
        finally:
            torch.nn.init._no_grad_trunc_normal_ = original

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        change = self._change(func._schema.name.split("::")[1], args, kwargs)
        written = _written(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in written:
            self._rewrite(tensor, change)
        for declared, value in zip(func._schema.returns, _results(func, result), strict=False):
            if declared.alias_info is None:
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        self.write(leaf, change(self.read(args[0]) if _takes(args) else None))
        return result

    def write(self, tensor: Tensor, spread: Spread | None) -> None:
        """From here on its entries are of this law."""
        self._rewrite(tensor, lambda _: spread)

    def _rewrite(self, tensor: Tensor, change: Callable[[Spread | None], Spread | None]) -> None:
        address, (start, stop) = _address(tensor), _extent(tensor)
        if address not in self._stretches:
            self._storages.append(StorageWeakRef(tensor.untyped_storage()))
            self._stretches[address] = [_Stretch(0, _length(tensor), None)]
        dense = stop - start == tensor.numel()
        changed = []
        for old in self._stretches[address]:
            inside = max(old.start, start), min(old.stop, stop)
            if inside[0] >= inside[1]:
                changed.append(old)
                continue
            spread = change(old.spread) if dense else None
            changed += [
                stretch
                for stretch in (
                    _Stretch(old.start, inside[0], old.spread),
                    _Stretch(*inside, spread),
                    _Stretch(inside[1], old.stop, old.spread),
                )
                if stretch.start < stretch.stop
            ]
        self._stretches[address] = changed

    def _change(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[Spread | None], Spread | None]:
        """What an operation makes of the law of its first argument."""
        if name == "normal" and _takes(args):
            return lambda _: None  # not in place: the tensor holds a mean or a std for each entry
        name = name.rstrip("_")
        made = self._filled(name, args, kwargs)
        if made is not _NOT_A_FILL:
            return lambda _: made
        line = self._line(name, args, kwargs)
        if line is not None:
            return lambda spread: spread and spread.moved(*line)
        if name in _SAME:
            return lambda spread: spread
        if name == "erfinv":
            return erfinv
        if name in _OF_A_NUMBER:
            return lambda spread: constant(spread, _OF_A_NUMBER[name](*args[1:2]))
        if name == "clamp":
            low, high = ([*args[1:], None, None])[:2]
            low, high = kwargs.get("min", low), kwargs.get("max", high)
            return lambda spread: clamped(spread, low, high)
        return lambda _: None

    def _filled(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The law of what is filled anew, whatever was there."""
        if name in _CONSTANTS:
            return Spread("constant", _CONSTANTS[name])
        if name in ("full", "full_like", "new_full", "fill"):
            value = self._number(kwargs.get("fill_value", args[-1]))
            return None if value is None else Spread("constant", value)
        if name in ("rand", "rand_like"):
            return Spread("uniform", 0.5, 0.5)
        if name in ("randn", "randn_like"):
            return Spread("normal", 0.0, 1.0)
        if name in ("normal", "uniform"):
            numbers = [arg for arg in args if isinstance(arg, (int, float))]
            first = numbers[0] if numbers else kwargs.get("mean" if name == "normal" else "from", 0.0)
            second = numbers[1] if len(numbers) > 1 else kwargs.get("std" if name == "normal" else "to", 1.0)
            if name == "normal":
                return Spread("normal", first, second)
            return Spread("uniform", (first + second) / 2, (second - first) / 2)
        if name == "copy":
            source = self.read(args[1])
            same = args[0].numel() == args[1].numel() or (source and source.z == "constant")
            return source if same else None
        if name in ("cat", "stack"):
            laws = {self.read(tensor) for tensor in args[0]}
            apart = len({_address(tensor) for tensor in args[0]}) == len(args[0])
            return laws.pop() if len(laws) == 1 and apart else None
        return _NOT_A_FILL

    def _line(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, float] | None:
        """Factor and shift, where the operation is linear in its first argument with numbers for the rest."""
        if name == "neg":
            return -1.0, 0.0
        if name not in ("mul", "div", "add", "sub", "rsub") or kwargs.get("rounding_mode") is not None:
            return None
        other = self._number(args[1])
        if other is None or (isinstance(args[1], Tensor) and args[1].numel() > args[0].numel()):
            return None
        alpha = kwargs.get("alpha", 1)
        if name == "mul":
            return other, 0.0
        if name == "div":
            return (1 / other, 0.0) if other else None
        if name == "rsub":
            return -float(alpha), other
        return 1.0, alpha * other if name == "add" else -alpha * other

    def _number(self, value: Any) -> float | None:
        """A number, given as such or as a tensor that is known to hold only it."""
        if isinstance(value, (int, float)):
            return float(value)
        if not isinstance(value, Tensor):
            return None
        spread = self.read(value)
        if spread is not None:
            return spread.shift if spread.z == "constant" else None
        fixed = getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
        return float(fixed.item()) if fixed is not None and fixed.dim() == 0 else None


@dataclass(frozen=True)
class _Stretch:
    start: int
    stop: int
    spread: Spread | None


_NOT_A_FILL = object()
_CONSTANTS = dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), 0.0) | dict.fromkeys(
    ("ones", "ones_like", "new_ones"), 1.0
)
# Not the views that stay in their storage: nothing is written there. Nor does `set_`, which goes to another.
_SAME = frozenset({"clone", "_to_copy", "_unsafe_view", "lift_fresh_copy", "set"})
_OF_A_NUMBER: dict[str, Callable[..., Callable[[float], float]]] = {
    "mean": lambda *_: lambda x: x,
    "sqrt": lambda *_: math.sqrt,
    "exp": lambda *_: math.exp,
    "pow": lambda power: lambda x: x**power,
}
"""What is made of a tensor that holds one number: the rms of a gain of ones is one."""


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _results(func: Any, result: Any) -> Sequence[Any]:
    return result if len(func._schema.returns) > 1 else (result,)


def _takes(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], Tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _length(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The stretch of its storage a tensor lies in, in elements; empty if it has none."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start, start
    return start, start + int(sum((size - 1) * stride for size, stride in _strides(tensor))) + 1


def _strides(tensor: Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.stride(), strict=True)
