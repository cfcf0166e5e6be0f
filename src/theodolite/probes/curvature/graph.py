"""What autograd has recorded behind a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def nodes_behind(output: Tensor) -> Iterator[Any]:
    """Every node of a tensor's graph, once.

    >>> x = torch.ones(2, requires_grad=True)
    >>> [type(node).__name__ for node in nodes_behind(x.exp().sum())]
    ['SumBackward0', 'ExpBackward0', 'AccumulateGrad']
    """
    waiting: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [above for above, _ in node.next_functions]


def own_functions(output: Tensor) -> list[Any]:
    """The nodes that come from an `autograd.Function` of the model's own."""
    own = torch.autograd.function.BackwardCFunction
    return [node for node in nodes_behind(output) if isinstance(node, own)]
