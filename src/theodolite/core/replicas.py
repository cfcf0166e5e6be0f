"""Replicas of a model under DistributedDataParallel: if one process fails, all of them raise.

Processes that average over replicas wait for each other, so one that leaves with an error would block the
others for ever. Therefore every exchange begins with a flag that says whether the process is well. A process
that fails sends this flag and its error before it raises. The others read them at their next exchange, or at
the end of the call, and raise too.
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
"""Length of the error text that is sent to the other processes."""


class OtherRankError(Exception):
    """Another process failed. The message says which one, and why.

    It is also a UseError, a torch.OutOfMemoryError or a RuntimeError, like the error of the other process:
    code that handles the one handles the other, so that all processes go on or none does.
    """

    _known_to_all = True


_KINDS = tuple(
    (kind, type("OtherRankError", (OtherRankError, base), {}))
    for kind, base in (
        (UseError, UseError),
        (torch.OutOfMemoryError, torch.OutOfMemoryError),
        (Exception, RuntimeError),
    )
)
"""Kinds of errors, and what the other processes raise."""


def group_of(model: object) -> Any:
    """The process group of a DistributedDataParallel model, compiled or not; None for any other model."""
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod  # type: ignore[attr-defined]
    return model.process_group if isinstance(model, nn.parallel.DistributedDataParallel) else None


def together(model: Any, act: Callable[[], T]) -> T:
    """Return `act()`. If it fails in one process with a replica, all of them raise.

    This costs an exchange of one number. `act` may contain exchanges that are guarded themselves.

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
    """Decorate a probe: if it fails in one process with a replica, it fails in all of them.

    Its first argument is a model, or an object with a model as `_model`.
    """

    @functools.wraps(probe)
    def guarded(*given: P.args, **named: P.kwargs) -> T:
        first = given[0] if given else named.get("model")
        model = first if isinstance(first, nn.Module) else getattr(first, "_model", None)
        return together(model, lambda: probe(*given, **named))

    return guarded


def _agree(group: Any, device: torch.device, error: Exception | None) -> None:
    """Exchange errors: raise if another process has one."""
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
        raise _KINDS[kind][1](f"rank {culprit} failed, so all ranks stop: {why}")


def _is_known(error: BaseException | None) -> bool:
    """Was this error, or the one that caused it, sent to the other processes already?"""
    while error is not None:
        if getattr(error, "_known_to_all", False):
            return True
        error = error.__cause__ or error.__context__
    return False
