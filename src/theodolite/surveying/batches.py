"""Fewer examples of a batch."""

from __future__ import annotations

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.core.batches import Batch
from theodolite.fleet.training import targets_in


def examples_in(batch: Batch) -> int | None:
    """How many examples there are; None unless all tensors have them along the first dimension.

    >>> import torch
    >>> examples_in((torch.zeros(256, 8), torch.zeros(256))), examples_in((torch.zeros(2), torch.zeros(3)))
    (256, None)
    """
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if any(leaf.ndim == 0 for leaf in leaves):
        return None
    lengths = {len(leaf) for leaf in leaves}
    return lengths.pop() if len(lengths) == 1 else None


def first_of(batch: Batch, examples: int) -> Batch:
    """The first examples, one at least; the batch itself where it is not known what an example is."""
    if examples_in(batch) is None:
        return batch
    kept = max(1, examples)
    fewer: Batch = tree_map(lambda leaf: leaf[:kept] if isinstance(leaf, Tensor) else leaf, batch)
    return fewer


def few(batch: Batch, targets: int) -> Batch:
    """The first examples of a batch, with about so many targets.

    >>> import torch
    >>> inputs, labels = few((torch.zeros(256, 8), torch.zeros(256)), 128)
    >>> len(inputs), len(labels)
    (128, 128)
    """
    return first_of(batch, targets * (examples_in(batch) or 1) // max(1, targets_in(batch)))


def amount(batch: Batch, whole: Batch) -> int | str:
    """How many targets are in a batch, and of how many where it was cut.

    >>> import torch
    >>> whole = torch.zeros(256, 8), torch.zeros(256)
    >>> amount(few(whole, 128), whole), amount(whole, whole)
    ('128 of 256', 256)
    """
    kept, before = targets_in(batch), targets_in(whole)
    return kept if kept == before else f"{kept} of {before}"
