"""A model that several processes hold a copy of: what one of them cannot do, none does.

Processes that average over their copies wait for each other, so one that has left with an error would keep
the others waiting for ever. Therefore every exchange begins with a flag, by which each process says whether
it is well. One that fails sends the same flag before it leaves, wherever it failed, and with it its error.
The others are at their next exchange by then, or at the end of the probe: they read the flag and raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError

P = ParamSpec("P")
T = TypeVar("T")

MOST_BYTES = 500
"""Of an error's text that other processes are told."""


class OtherRankError(Exception):
    """Another process could not do its part, so none did. The message says which one, and why.

    It is a UseError, a torch.OutOfMemoryError or a RuntimeError as well, whichever the other's error is: what
    handles the one in its process handles the other here, so that both go on or neither does.
    """

    _known_to_all = True


class _OtherUseError(OtherRankError, UseError):
    pass


class _OtherOutOfMemoryError(OtherRankError, torch.OutOfMemoryError):
    pass


class _OtherRuntimeError(OtherRankError, RuntimeError):
    pass


_KINDS = (
    (UseError, _OtherUseError),
    (torch.OutOfMemoryError, _OtherOutOfMemoryError),
    (Exception, _OtherRuntimeError),
)


def group_of(model: object) -> Any:
    """The process group of a DistributedDataParallel, in or outside a compiled module; None of any other."""
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod  # type: ignore[attr-defined]
    return model.process_group if isinstance(model, nn.parallel.DistributedDataParallel) else None


def together(model: Any, act: Callable[[], T]) -> T:
    """What `act` returns. Where it fails in one of the processes with a replica, all of them raise.

    It costs an exchange of one number. `act` may hold exchanges that are guarded themselves.

    >>> together(nn.Linear(1, 1), lambda: 2)
    2
    """
    group = group_of(model)
    if group is None:
        return act()
    device = next(model.parameters()).device
    try:
        found = act()
    except Exception as error:
        if not _is_known(error):
            _agree(group, device, error)
            error._known_to_all = True  # type: ignore[attr-defined]
        raise
    _agree(group, device, None)
    return found


def on_all_ranks(probe: Callable[P, T]) -> Callable[P, T]:
    """A probe that fails in all processes with a replica if it fails in one of them.

    Its first argument is a model, or something that has one as `_model`.
    """

    @functools.wraps(probe)
    def guarded(*given: P.args, **named: P.kwargs) -> T:
        first = given[0] if given else named.get("model", named.get("measured"))
        model = first if isinstance(first, nn.Module) else getattr(first, "_model", None)
        return together(model, lambda: probe(*given, **named))

    return guarded


def _agree(group: Any, device: torch.device, error: Exception | None) -> None:
    """Tell the others that all is well, or what is not; raise if it is not with one of them."""
    told = -1.0
    if error is not None:
        kind = next(place for place, (own, _) in enumerate(_KINDS) if isinstance(error, own))
        told = float(len(_KINDS) * dist.get_rank(group) + kind)
    worst = torch.tensor(told, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    if float(worst) < 0:
        return
    culprit, kind = divmod(int(worst), len(_KINDS))
    said = (in_one_line(error) if error is not None else "").encode(errors="replace")[:MOST_BYTES]
    text = torch.zeros(MOST_BYTES, dtype=torch.uint8, device=device)
    text[: len(said)] = torch.tensor(list(said), dtype=torch.uint8, device=device)
    dist.broadcast(text, dist.get_global_rank(group, culprit), group=group)
    if error is None:
        why = bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")
        raise _KINDS[kind][1](f"rank {culprit} could not do its part, so none did: {why}")


def _is_known(error: BaseException | None) -> bool:
    """Have all processes heard of this error, or of the one that it was raised for?"""
    while error is not None:
        if getattr(error, "_known_to_all", False):
            return True
        error = error.__cause__ or error.__context__
    return False
