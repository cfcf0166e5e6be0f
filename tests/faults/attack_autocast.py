"""Every public call inside `torch.autocast`, which keeps weights it has cast until its block ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import calls
from .attack import Attack

FOLLOWS = ("signal",)
"""Calls that compute as the caller's autocast says, by themselves; all others leave it."""

Enter = Callable[[], AbstractContextManager[Any]]


def _plain() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def _nested() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
    return stack


def _uncached() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


WAYS: tuple[Enter, ...] = (_plain, _nested, _uncached)
SHORT = {**calls.PROBES, **calls.OTHERS}


def _tries(count: int, folder: Path) -> Iterator[str | None]:
    every = [(name, way) for way in WAYS for name in SHORT] + [(name, _plain) for name in calls.LONG]
    for number in range(count):
        name, way = every[number % len(every)]
        fault = _inside(name, way)
        yield None if fault is None else f"{name}: {fault}"


def _expected(name: str) -> Any:
    """The numbers of outside; of a call that follows autocast, those in one that keeps nothing."""
    if name not in FOLLOWS:
        return calls.expected(name)
    with _uncached():
        return SHORT[name](calls.network())


def _inside(name: str, way: Enter) -> str | None:
    """Call it where autocast has kept other weights than the network has now."""
    expected, model = _expected(name), calls.network()
    with way():
        _fill(model)
        before = _flags()
        try:
            found = {**SHORT, **calls.LONG}[name](model)
        except Exception as error:
            return f"raises {type(error).__name__}: {error}"
        after = _flags()
        stale = _forward(model)
    if after != before:
        return f"autocast was {before} before and {after} after"
    with _uncached():
        fresh = _forward(model)
    if name != "tempered" and not torch.equal(stale, fresh):  # that one changes no weight
        return "the caller's next forward pass computes with old weights"
    return calls.differences(found, expected, tolerance=1e-4)


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Let the surrounding autocast keep the weights times 3; the network then has its own again."""
    own = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.mul_(3)
    with torch.enable_grad():  # what needs no gradient is not kept
        _forward(model)
    for parameter, value in zip(model.parameters(), own, strict=True):
        parameter.copy_(value)


def _forward(model: nn.Module) -> torch.Tensor:
    modes = [module.training for module in model.modules()]
    found: torch.Tensor = model.eval()(calls.BATCH[0])
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return found.detach()


def _flags() -> tuple[Any, ...]:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    cached = torch.is_autocast_cache_enabled()
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), cached, nesting


ATTACKS = [
    Attack(
        "every public call is made inside `torch.autocast`, which has kept other weights",
        "the numbers of outside; the block's flags as before; no old weights after it",
        _tries,
        few=len(SHORT),
        many=len(WAYS) * len(SHORT) + len(calls.LONG),
    )
]
