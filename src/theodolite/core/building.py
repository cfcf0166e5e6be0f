"""Building networks, and restoring what it changes: random number generators, modes, threads."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.exclusive import LOCK
from theodolite.core.size import Size


class TooLargeError(UseError):
    """The tensors of a network have more elements than were allowed."""


def build_model(
    build: Build, size: Size, *, seed: int | None = None, device: str = "cpu", most: int | None = None
) -> nn.Module:
    """`build(width, depth)` on a device, with random numbers from the seed if given.

    The caller's generators stay as they are, and exceptions of `build` become a `UseError`. So does a
    build whose tensors have more than `most` elements in all, a `TooLargeError`, before it takes more memory.
    """
    called = f"build(width={size.width}, depth={size.depth})"
    try:
        limit = nullcontext() if most is None else _AtMost(most)
        with untouched_randomness(seed), torch.device(device), limit:
            model = build(size.width, size.depth)
    except _TooLarge:
        if most is None:  # the limit of a call around this one
            raise
        raise TooLargeError(f"{called} makes tensors of more than {most:,} elements") from None
    except UseError as error:  # the message already says what is wrong
        raise UseError(f"{called}: {error}") from error
    except Exception as error:
        raise UseError(f"{called} failed: {in_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise UseError(f"{called} returned a {type(model).__name__}, not a torch.nn.Module")
    lazy = [name for name, tensor in model.named_parameters() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise UseError(f"{called}: {lazy[0]} has no shape yet. Give lazy modules their sizes from width")
    return model


class _TooLarge(BaseException):
    """No `Exception`, which a build may catch."""


class _AtMost(TorchDispatchMode):
    """Stops a build before its tensors have more elements than this in all."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], (list, tuple)) and all(isinstance(one, int) for one in args[0]):
            self.left -= math.prod(args[0])  # the shape of a new tensor
            if self.left < 0:
                raise _TooLarge
        return func(*args, **(kwargs or {}))


def check_device(device: str) -> None:
    """Check that a device exists.

    >>> check_device("gpu")
    Traceback (most recent call last):
    theodolite.UseError: device is 'gpu': it is cpu, cuda or cuda:1
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda") or (found.type == "cpu" and found.index):
        raise UseError(f"device is {device!r}: it is cpu, cuda or cuda:1")
    if found.type == "cpu":
        return
    if not torch.cuda.is_available():
        raise UseError(f"device is {device!r}, but torch {torch.__version__} sees no GPU here: take cpu")
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise UseError(f"device is {device!r}, but there are {count} GPUs, counted from cuda:0")


def build_hollow(build: Build, size: Size) -> nn.Module:
    """The network on the meta device, without memory for its weights, or a real one if that fails.

    Tensors of one element are real if possible, as a forward pass may multiply by them.
    """
    for most_dims in (8, 0, -1):
        try:
            with _Hollow(most_dims):
                return build_model(build, size, device="meta")
        except UseError:  # real and meta tensors are combined, or the build reads values
            continue
    return build_model(build, size)  # if this fails too, show this error


class _Hollow(TorchFunctionMode):
    """Skips random initialisation of meta tensors, which would take most of the time of such a build.

    Tensors of one element and at most `most_dims` dimensions are made on the CPU. Those without dimensions
    can be combined with meta tensors.
    """

    def __init__(self, most_dims: int) -> None:
        super().__init__()
        self.most_dims = most_dims

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        made = func(*args, **kwargs)
        if func in _MAKING and made.is_meta and made.numel() == 1 and made.dim() <= self.most_dims:
            return func(*args, **kwargs | {"device": "cpu"})
        return made


_MAKING = {torch.tensor, torch.as_tensor, torch.full, torch.ones, torch.zeros, torch.empty}
_DRAWING = {
    Tensor.normal_,
    Tensor.uniform_,
    nn.init.normal_,
    nn.init.trunc_normal_,
    nn.init.uniform_,
    nn.init.kaiming_normal_,
    nn.init.kaiming_uniform_,
    nn.init.xavier_normal_,
    nn.init.xavier_uniform_,
}


@contextmanager
def untouched_randomness(seed: int | None = None) -> Iterator[None]:
    """Restore the random number generators of torch (on all devices in use), numpy and Python at the end.

    Holds the lock of the process, so a generator function must not yield inside.

    >>> before = torch.get_rng_state()
    >>> with untouched_randomness(seed=0):
    ...     first = torch.rand(1)
    >>> with untouched_randomness(seed=0):
    ...     assert torch.equal(first, torch.rand(1))
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with LOCK, torch.random.fork_rng(devices=devices):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            if seed is not None:
                seed_generators(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def seed_generators(seed: int) -> None:
    """Seed torch, numpy and Python.

    Without a GPU, `torch.manual_seed` takes milliseconds, as it records the stack for a later initialisation.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def in_one_line(error: BaseException) -> str:
    """An exception as in the last line of its traceback."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def kept_generators(data: object) -> Iterator[None]:
    """Restore the generators of a DataLoader and its samplers at the end.

    Persistent workers in the middle of an epoch continue afterwards: reading uses new ones.
    """
    if not isinstance(data, DataLoader):
        yield
        return
    samplers = [data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    states = {
        value: value.get_state()
        for owner in (data, *samplers)
        for value in getattr(owner, "__dict__", {}).values()
        if isinstance(value, torch.Generator)
    }
    iterator, data._iterator = data._iterator, None
    try:
        yield
    finally:
        data._iterator = iterator
        for generator, state in states.items():
            generator.set_state(state)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and restore the mode of each of its modules at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, so that results do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
