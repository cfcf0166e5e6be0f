"""What passes through a block: the stream among its arguments, and in what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """One call of a block.

    >>> import torch
    >>> call = Call((torch.ones(2, 4), None), {"mask": torch.zeros(2)}, (torch.ones(2, 4), "weights"))
    >>> call.stream_in.shape, call.stream_out.shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    >>> call.run(lambda stream, rest, mask: stream + 1, call.stream_out)
    tensor([[2., 2., 2., 2.],
            [2., 2., 2., 2.]])
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    """What it returned; before it is called, nothing."""

    @property
    def stream_out(self) -> Tensor | None:
        """The stream after the block: what it returns, or the first of several things."""
        return stream_of(self.output)

    @property
    def stream_in(self) -> Tensor | None:
        """The stream that the block reads: its first tensor of numbers that are not whole."""
        return next((one for one in (*self.args, *self.kwargs.values()) if _is_stream(one)), None)

    def run(self, block: Callable[..., Any], stream: Tensor) -> Any:
        """Call another block as this one was called, on another stream; the stream that it returns."""
        mine = self.stream_in

        def given(value: Any) -> Any:
            return stream if value is mine else value

        returned = block(
            *(given(arg) for arg in self.args), **{key: given(arg) for key, arg in self.kwargs.items()}
        )
        return stream_of(returned)


def stream_of(returned: Any) -> Tensor | None:
    """The stream in what a block returned.

    >>> stream_of(("no tensor", None)) is None
    True
    """
    if isinstance(returned, (tuple, list)) and returned:
        returned = returned[0]
    return returned if _is_stream(returned) else None


def with_stream(returned: Any, stream: Tensor) -> Any:
    """What a block returned, with another stream in it."""
    if isinstance(returned, (tuple, list)):
        return type(returned)([stream, *returned[1:]])
    return stream


@contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """No keys and values are kept while a Hugging Face model runs: a copy of a block would write into those
    of its original, which has the same number."""
    configs = {id(one): one for module in model.modules() if (one := getattr(module, "config", None))}
    before = [(one, one.use_cache) for one in configs.values() if getattr(one, "use_cache", None)]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            config.use_cache = value


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


Change = Callable[[Call, Tensor], Tensor | None]
"""From a call and the stream at a point to the stream that the network goes on with; None for the same."""


@contextmanager
def watched(block: nn.Module, change: Change, *, follows: bool) -> Iterator[None]:
    """Look at the stream behind a block, or before it, whenever it is called; and change it."""

    def behind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = Call(args, kwargs, output)
        stream = call.stream_out
        changed = None if stream is None else change(call, stream)
        return None if changed is None else with_stream(output, changed)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(args, kwargs, None)
        stream = call.stream_in
        changed = None if stream is None else change(call, stream)
        if changed is None:
            return None
        new = [changed if arg is stream else arg for arg in args]
        return tuple(new), {key: changed if arg is stream else arg for key, arg in kwargs.items()}

    handle = (
        block.register_forward_hook(behind, with_kwargs=True)
        if follows
        else block.register_forward_pre_hook(before, with_kwargs=True)
    )
    try:
        yield
    finally:
        handle.remove()
