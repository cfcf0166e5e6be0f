"""Batches: pairs of inputs and targets, one or several, on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.core.calling import described, see_inside
from theodolite.core.errors import UseError

Batch = tuple[Any, Any]
"""`(inputs, targets)`. Inputs are a tensor, a tuple, a mapping, or an object with tensors in it."""
Batches = Batch | Iterable[Batch]
"""One batch or several."""


def on_device(batch: Batch, device: str) -> Batch:
    """The batch with its tensors on a device."""
    moved: Batch = tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, see_inside(batch)
    )
    return moved


def differentiable(batch: Any, device: str) -> Batch:
    """A pair (inputs, targets) on a device; tensors made in inference mode, which autograd refuses, are
    copied."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise UseError(f"batch is {described(batch)}: give a pair (inputs, targets)")
    copied: Batch = tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf,
        on_device((batch[0], batch[1]), device),
    )
    return copied


def in_float64(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def targets_in(batch: Batch) -> int:
    """The number of targets in a batch: the elements of their first tensor.

    Further tensors, such as masks or weights of the targets, do not count.
    """
    return next((leaf.numel() for leaf in tree_leaves(batch[1]) if isinstance(leaf, Tensor)), 0)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU if it has none."""
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
