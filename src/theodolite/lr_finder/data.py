"""The first batches of what gives them, which is left as it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from theodolite.core.batches import Batch
from theodolite.core.building import kept_generators, untouched_randomness
from theodolite.core.calling import described
from theodolite.core.errors import UseError


def read(data: object, most: int) -> tuple[Batch, ...]:
    """The first batches. What gives them is left as it was."""
    if isinstance(data, tuple):
        return (_pair(data, "data"),)
    if isinstance(data, Iterator):
        raise UseError(
            f"data is {described(data)}, which reading would use up. Give a pair, a list of pairs or a "
            "DataLoader"
        )
    if isinstance(getattr(data, "dataset", data), IterableDataset):
        raise UseError(
            f"data is {described(data)}, and an IterableDataset may read on where it was: what is read here "
            f"would be missing later. Give its first batches: list(itertools.islice(data, {most}))"
        )
    if not isinstance(data, Iterable) or isinstance(data, Tensor | str | dict):
        raise UseError(
            f"data is {described(data)}: give a pair (inputs, targets), a list of pairs or a DataLoader"
        )
    with _kept(data):
        torch.manual_seed(0)  # the order of a loader that shuffles is the same each time
        read = list(itertools.islice(data, most))
    if not read:
        raise UseError("data is empty: give at least one batch, a pair (inputs, targets)")
    return tuple(_pair(batch, f"batch {index} of data") for index, batch in enumerate(read))


def _pair(batch: Any, what: str) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UseError(f"{what} is {described(batch)}, not a pair (inputs, targets)")
    tensors = [leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.numel() == 0 for tensor in tensors):
        raise UseError(f"{what} is empty: its inputs are {described(batch[0])}. Give at least one example")
    return batch[0], batch[1]


@contextmanager
def _kept(data: object) -> Iterator[None]:
    """What reading a DataLoader changes is as before at the end: its generators and those of its samplers.

    Persistent workers that are in the middle of an epoch go on with it: those that begin here end here.
    """
    with untouched_randomness(), kept_generators(data):
        if not isinstance(data, DataLoader):
            yield
            return
        iterator, data._iterator = data._iterator, None
        try:
            yield
        finally:
            data._iterator = iterator
