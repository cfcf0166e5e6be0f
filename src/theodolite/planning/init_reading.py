"""Find the distribution that a network draws each of its tensors from, by recording its initialisation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.anatomy.names import canonical_parameters
from theodolite.anatomy.recording.trace import flat, written_by
from theodolite.anatomy.specimen import shapes_of
from theodolite.core.building import TooLargeError, build_hollow, build_model
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.planning.init_distribution import Affine, InitDistribution, truncated

QUICK_PARAMETERS = 16_000_000
"""Up to this size a network is built with values at once; a larger one is first read without values."""
MOST_REAL_PARAMETERS = 250_000_000
"""A larger network, above a gigabyte in float32, is never built with values."""

Distributions = dict[str, InitDistribution]
"""By canonical name of a tensor."""


def read_init(build: Build, size: Size, among: Container[str] | None = None) -> Distributions:
    """The distribution of every tensor, or of those whose canonical names are in `among`.

    The network is built once while its operations are recorded. What `normal_`, `uniform_`, a factor, a
    constant or a truncation does to the distribution of the entries is known exactly, so a std is the number
    in the network's source, not an estimate. A tensor that is filled in another way (orthogonal, a row of it
    zeroed, computed) is of kind `own`; its mean and std are measured.

    >>> from torch import nn
    >>> found = read_init(lambda width, depth: nn.Linear(width, width), Size(64, 1))["weight"]
    >>> found.kind, math.isclose(found.std, 1 / (3 * 64) ** 0.5, rel_tol=1e-15)
    ('uniform', True)
    """
    try:
        return read_with_values(build, size, among, most=QUICK_PARAMETERS)
    except TooLargeError:
        pass
    try:
        return read_without_values(build, size, among)
    except UseError as error:
        try:
            return read_with_values(build, size, among, most=MOST_REAL_PARAMETERS)
        except TooLargeError:
            raise error from None


def read_with_values(
    build: Build, size: Size, among: Container[str] | None = None, most: int | None = None
) -> Distributions:
    """Build a real network. Its values confirm what was recorded, or are measured instead."""
    with InitRecorder().with_truncation() as recorder:
        model = build_model(build, size, seed=0, most=most)
    found = {}
    for name, tensor in _chosen(model, among):
        recorded = recorder.distribution(tensor)
        # Values may also be written where no operation shows, through numpy.
        if recorded is None or not _confirmed(recorded, tensor.detach()):
            recorded = _measured(name, tensor.detach())
        found[name] = recorded
    return found


def read_without_values(build: Build, size: Size, among: Container[str] | None = None) -> Distributions:
    """Build a network of fake tensors, which take no memory."""
    # Not on meta: transformers initialises nothing there.
    with (
        warnings.catch_warnings(action="ignore"),
        FakeTensorMode(allow_non_fake_inputs=True),
        InitRecorder().with_truncation() as recorder,
    ):
        too_large = (
            f"With more than {MOST_REAL_PARAMETERS:,} parameters the network at {size} is not built with "
            "values: choose a smaller base size."
        )
        try:
            model = build_model(build, size)
        except UseError as error:
            raise UseError(f"{too_large} Without values {error}") from error
        found = {name: recorder.distribution(tensor) for name, tensor in _chosen(model, among)}
    unknown = [name for name, one in found.items() if one is None]
    if unknown:
        raise UseError(
            f"{unknown[0]} is initialised in a way that only its values show ({len(unknown)} such tensors). "
            f"{too_large}"
        )
    return {name: one for name, one in found.items() if one is not None}


def depth_in_init(build: Build, base: Size, at_base: Distributions) -> dict[str, float]:
    """The factor by which a tensor's initial size changes at twice the depth, for those where it does.

    A module whose fans differ there is another module: in the second half of a U-Net the same name stands for
    another block. GPT-2's `1/√(2L)` shows as `√½` on the projections that end a branch:

    >>> from functools import partial
    >>> from theodolite.models import GPT
    >>> build, size = partial(GPT, scaled_init=True), Size(64, 2)
    >>> found = depth_in_init(build, size, read_init(build, size))
    >>> {name: round(factor, 3) for name, factor in found.items() if name.startswith("blocks.0")}
    {'blocks.0.attention.branch.out.weight': 0.707, 'blocks.0.feed_forward.branch.down.weight': 0.707}
    """
    deeper = Size(base.width, 2 * base.depth)
    try:
        deep = read_init(build, deeper, at_base)
    except UseError:  # cannot be built or read: then there is nothing to compare with
        return {}
    found = {}
    for name, one in at_base.items():
        if name not in deep or not one.size or not deep[name].size:
            continue
        factor = deep[name].size / one.size
        # A measured std is uncertain; one that was read is not.
        doubt = 0.1 if "own" in (one.kind, deep[name].kind) else 1e-6
        if abs(math.log(factor)) > doubt:
            found[name] = factor
    if not found:
        return {}
    here, there = (shapes_of(build_hollow(build, size)) for size in (base, deeper))
    grown = (base.depth, deeper.depth)
    others = {
        name.rpartition(".")[0]
        for name, shape in here.items()
        if len(there.get(name, ())) != len(shape)
        or any(pair[0] != pair[1] and pair != grown for pair in zip(shape, there[name], strict=True))
    }
    return {name: factor for name, factor in found.items() if name.rpartition(".")[0] not in others}


def widened(values: Tensor) -> Tensor:
    """The values in float64 or complex128."""
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def std_of(values: Tensor) -> float:
    """The root mean square of `|v − mean|`, of real or complex values."""
    return (values - values.mean()).abs().square().mean().sqrt().item()


def _chosen(model: nn.Module, among: Container[str] | None) -> list[tuple[str, Tensor]]:
    return [(name, one) for name, one in canonical_parameters(model) if among is None or name in among]


def _measured(name: str, tensor: Tensor) -> InitDistribution:
    values = widened(tensor)
    if not values.isfinite().all():
        raise UseError(
            f"{name} starts with values that are not finite, as torch.empty may leave them: initialise it "
            "in build"
        )
    first = values.flatten()[0].item()
    if (values == first).all() and first == first.real:
        return InitDistribution("constant", mean=first.real)
    mean = values.mean().item()
    return InitDistribution("own", std=std_of(values), mean=abs(mean) if values.is_complex() else mean)


def _confirmed(expected: InitDistribution, values: Tensor) -> bool:
    """Do mean, std and bounds of the values fit the distribution? Eight standard errors are allowed."""
    if expected.kind == "constant":
        return bool((values == torch.full_like(values, expected.mean)).all())
    values, rounding = values.float(), torch.finfo(values.dtype).eps
    variance, mean = torch.var_mean(values, correction=0)
    doubt = 8 / math.sqrt(values.numel()) + rounding
    farthest = (values - expected.mean).abs().max().item()
    bounds = {"uniform": expected.std * math.sqrt(3), "truncated": expected.bound}
    bound = bounds.get(expected.kind) or math.inf
    return (
        abs(mean.item() - expected.mean) <= doubt * expected.std + rounding * abs(expected.mean)
        and abs(math.sqrt(variance.item()) / expected.std - 1) <= doubt
        and farthest <= bound * (1 + 2 * rounding) + rounding * abs(expected.mean)
    )


Change = Callable[[Affine | None], Affine | None]
"""What an operation makes of the distribution of its first argument; None is unknown."""


class InitRecorder(TorchDispatchMode):
    """Records how each range of each storage was last filled; None where that has no simple distribution.

    A dense tensor covers one range of its storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranges: dict[int, list[_Range]] = {}
        # While these live no later storage gets the address of an earlier one; they hold no memory.
        self._storages: list[StorageWeakRef] = []

    def read(self, tensor: Tensor) -> Affine | None:
        """The distribution that all entries have in common, or None."""
        if tensor.is_complex():
            return None
        found = {one.filled for one in self._overlapping(tensor)}
        filled = found.pop() if len(found) == 1 else None
        # One number in several places: entries are not independent.
        repeated = any(stride == 0 and size > 1 for size, stride in _strides(tensor))
        return None if repeated and filled and filled.z != "constant" else filled

    def distribution(self, tensor: Tensor) -> InitDistribution | None:
        """The distribution of a tensor: `own` where ranges of it differ, such as a row of zeros."""
        filled = self.read(tensor)
        if filled is not None:
            return filled.distribution()
        start, stop = _extent(tensor)
        parts = []
        for one in self._overlapping(tensor):
            if one.filled is None or stop - start != tensor.numel() or tensor.is_complex():
                return None
            share = (min(stop, one.stop) - max(start, one.start)) / (stop - start)
            parts.append((share, one.filled.distribution()))
        if not parts:
            return None
        mean = sum(share * one.mean for share, one in parts)
        variance = sum(share * (one.std**2 + (one.mean - mean) ** 2) for share, one in parts)
        return InitDistribution("own", std=math.sqrt(variance), mean=mean)

    @contextmanager
    def with_truncation(self) -> Iterator[InitRecorder]:
        """Record, and treat `torch.nn.init.trunc_normal_` as one operation.

        It draws again what fell outside, which only the values can tell; and it does nothing on meta.
        """
        original = torch.nn.init._no_grad_trunc_normal_

        def recorded(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
        ) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                original(tensor, mean, std, a, b, generator=generator)
            self._write(tensor, truncated(mean, std, a, b))
            return tensor

        torch.nn.init._no_grad_trunc_normal_ = recorded
        try:
            with self:
                yield self
        finally:
            torch.nn.init._no_grad_trunc_normal_ = original

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        change = self._change(func._schema.name.split("::")[1], args, kwargs)
        written = written_by(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in written:
            self._rewrite(tensor, change)
        results = result if len(func._schema.returns) > 1 else (result,)
        for declared, value in zip(func._schema.returns, results, strict=False):
            for leaf in flat(value, Tensor) if declared.alias_info is None else ():
                self._write(leaf, change(self.read(args[0]) if _takes_tensor(args) else None))
        return result

    def _overlapping(self, tensor: Tensor) -> list[_Range]:
        start, stop = _extent(tensor)
        held = self._ranges.get(_address(tensor), ())
        return [one for one in held if one.start < stop and start < one.stop]

    def _write(self, tensor: Tensor, filled: Affine | None) -> None:
        self._rewrite(tensor, lambda _: filled)

    def _rewrite(self, tensor: Tensor, change: Change) -> None:
        address, (start, stop) = _address(tensor), _extent(tensor)
        if address not in self._ranges:
            storage = tensor.untyped_storage()
            self._storages.append(StorageWeakRef(storage))
            self._ranges[address] = [_Range(0, storage.nbytes() // tensor.element_size(), None)]
        dense = stop - start == tensor.numel()
        changed = []
        for old in self._ranges[address]:
            inside = max(old.start, start), min(old.stop, stop)
            if inside[0] >= inside[1]:
                changed.append(old)
                continue
            pieces = (
                _Range(old.start, inside[0], old.filled),
                _Range(*inside, change(old.filled) if dense else None),
                _Range(inside[1], old.stop, old.filled),
            )
            changed += [piece for piece in pieces if piece.start < piece.stop]
        self._ranges[address] = changed

    def _change(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Change:
        """What an operation does to the distribution."""
        if name == "normal" and _takes_tensor(args):
            return lambda _: None  # not in place: the tensor holds a mean or a std for each entry
        name = name.rstrip("_")
        made = self._filled(name, args, kwargs)
        if made is not _NOT_A_FILL:
            return lambda _: made
        line = self._line(name, args, kwargs)
        if line is not None:
            return lambda old: old and old.moved(*line)
        if name in _COPIES:
            return lambda old: old
        if name == "erfinv":
            return lambda old: old and old.erfinv()
        if name in _FUNCTIONS:
            return lambda old: old and old.mapped(lambda x: _FUNCTIONS[name](x, *args[1:2]))
        if name == "clamp":
            low, high = ([*args[1:], None, None])[:2]
            low, high = kwargs.get("min", low), kwargs.get("max", high)
            return lambda old: old and old.clamped(low, high)
        return lambda _: None

    def _filled(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The distribution of what is filled anew, whatever was there."""
        if name in _CONSTANTS:
            return Affine("constant", _CONSTANTS[name])
        if name in ("full", "full_like", "new_full", "fill"):
            return self._constant(kwargs.get("fill_value", args[-1]))
        if name in ("rand", "rand_like"):
            return Affine("uniform", 0.5, 0.5)
        if name in ("randn", "randn_like"):
            return Affine("normal", 0.0, 1.0)
        if name in ("normal", "uniform"):
            numbers = [arg for arg in args if isinstance(arg, (int, float))]
            first = numbers[0] if numbers else kwargs.get("mean" if name == "normal" else "from", 0.0)
            second = numbers[1] if len(numbers) > 1 else kwargs.get("std" if name == "normal" else "to", 1.0)
            if name == "normal":
                return Affine("normal", first, second)
            return Affine("uniform", (first + second) / 2, (second - first) / 2)
        if name == "copy":
            # Before torch 2.15 `tensor[0, 0] = 1` is a copy of a tensor that holds the number.
            source = self.read(args[1]) or self._constant(args[1])
            same = args[0].numel() == args[1].numel() or (source and source.z == "constant")
            return source if same else None
        if name in ("cat", "stack"):
            joined = {self.read(tensor) for tensor in args[0]}
            apart = len({_address(tensor) for tensor in args[0]}) == len(args[0])
            return joined.pop() if len(joined) == 1 and apart else None
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
        if name == "div":
            return (1 / other, 0.0) if other else None
        alpha = kwargs.get("alpha", 1)
        lines = {"mul": (other, 0.0), "add": (1.0, alpha * other), "sub": (1.0, -alpha * other)}
        return lines.get(name, (-float(alpha), other))

    def _constant(self, value: Any) -> Affine | None:
        number = self._number(value)
        return None if number is None else Affine("constant", number)

    def _number(self, value: Any) -> float | None:
        """A number, given as such or as a tensor that is known to hold only it."""
        if isinstance(value, (int, float)):
            return float(value)
        if not isinstance(value, Tensor):
            return None
        filled = self.read(value)
        if filled is not None:
            return filled.shift if filled.z == "constant" else None
        fixed = getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
        if fixed is None or fixed.dim() > 0 or fixed.is_complex() or fixed.is_meta:
            return None
        return float(fixed.item())


@dataclass(frozen=True)
class _Range:
    """Elements of a storage, and what they were filled with."""

    start: int
    stop: int
    filled: Affine | None


_NOT_A_FILL = object()
_CONSTANTS = dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), 0.0) | dict.fromkeys(
    ("ones", "ones_like", "new_ones"), 1.0
)
# Views share the storage of their source and write nothing. `set_` points its tensor to another storage.
_COPIES = frozenset({"clone", "_to_copy", "_unsafe_view", "lift_fresh_copy", "set"})
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "mean": lambda x, *_: x,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "pow": pow,
}
"""Functions of a tensor that holds one number: the rms of a gain of ones is one."""


def _takes_tensor(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], Tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The range of its storage that a tensor lies in, in elements; empty if it has none."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start, start
    return start, start + int(sum((size - 1) * stride for size, stride in _strides(tensor))) + 1


def _strides(tensor: Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.stride(), strict=True)
