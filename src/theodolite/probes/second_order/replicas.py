"""A model that several processes hold a copy of: what one of them cannot do, none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from theodolite.errors import UseError

T = TypeVar("T")


def group_of(model: object) -> Any:
    """The process group of a DistributedDataParallel, in or outside a compiled module; None of any other."""
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod  # type: ignore[attr-defined]
    return model.process_group if isinstance(model, nn.parallel.DistributedDataParallel) else None


def together(model: nn.Module, act: Callable[[], T]) -> T:
    """What `act` returns. Where it fails in one of the processes with a replica, all of them raise.

    Without this, those that went on would wait at their next exchange for the one that did not. It costs an
    exchange of one number. What is exchanged within `act` itself is not guarded.

    >>> together(nn.Linear(1, 1), lambda: 2)
    2
    """
    group = group_of(model)
    if group is None:
        return act()
    failed: Exception | None = None
    try:
        found = act()
    except Exception as error:
        failed = error
    flag = torch.tensor(float(failed is not None), device=next(model.parameters()).device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
    if failed is not None:
        raise failed
    if bool(flag):
        raise UseError("another process could not do its part, so none did. Its own error says why")
    return found
