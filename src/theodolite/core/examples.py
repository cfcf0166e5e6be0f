"""The independent examples of a sample: each index of dimension 0 of a batch is one sequence, one image.

Tokens of one sequence depend on each other. A standard error of a mean is over examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.core.batches import Batch, Batches
from theodolite.core.building import kept_generators, untouched_randomness
from theodolite.core.calling import described
from theodolite.core.errors import UseError


def num_examples(batch: Batch) -> int:
    """The number of examples of a batch: the length of its first input."""
    tensors = [leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    if not tensors or not tensors[0].ndim:
        raise UseError(f"the inputs are {described(batch[0])}: their dimension 0 has to be the examples")
    return tensors[0].shape[0]


def count_examples(batches: Batches) -> int:
    """The number of examples of all batches.

    >>> count_examples([(torch.zeros(3, 8), torch.zeros(3)), (torch.zeros(2, 8), torch.zeros(2))])
    5
    """
    return sum(num_examples(batch) for batch in each_batch(batches))


def take(batch: Batch, examples: Sequence[int] | slice) -> Batch:
    """Some examples of a batch. Tensors without a row for each example, such as positions, stay whole.

    >>> take((torch.tensor([[1], [2], [3]]), torch.tensor([4, 5, 6])), [0, 2])
    (tensor([[1],
            [3]]), tensor([4, 6]))
    """
    number = num_examples(batch)
    chosen = examples if isinstance(examples, slice) else list(examples)

    def cut(leaf: Any) -> Any:
        return leaf[chosen] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == number else leaf

    taken: Batch = tree_map(cut, batch)
    return taken


def fingerprints(batches: Batches) -> list[bytes]:
    """A hash of the inputs of every example: examples with the same inputs have the same hash.

    Values are compared, not dtypes. Copies that differ in one number are not recognised as copies.

    >>> first, second = fingerprints((torch.tensor([[1, 2], [1, 2]]), torch.tensor([0, 1])))
    >>> first == second
    True
    """
    found: list[bytes] = []
    for batch in each_batch(batches):
        number = num_examples(batch)
        leaves = [leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
        columns = [_one_dtype(leaf) for leaf in leaves if leaf.ndim and leaf.shape[0] == number]
        for index in range(number):
            made = hashlib.blake2b(digest_size=16)
            for column in columns:
                made.update(f"{column.dtype}{tuple(column.shape[1:])}".encode())
                made.update(column[index].numpy().tobytes())
            found.append(made.digest())
    return found


def each_batch(batches: Batches) -> Generator[Batch, None, None]:
    """The batches, one by one, the same in every pass: the random state that drawing them uses is restored.

    Batches without examples are left out.
    """
    pairs = batches_of(batches)
    empty = True
    with kept_generators(pairs):
        with untouched_randomness():
            waiting = iter(pairs)
        while True:
            with untouched_randomness():
                try:
                    pair = next(waiting)
                except StopIteration:
                    break
            if not _is_pair(pair):
                raise UseError(f"the batches hold {described(pair)}, not pairs (inputs, targets)")
            # pytrees do not look into mappings other than dicts, such as a tokenizer's
            inputs, targets = (dict(one) if isinstance(one, Mapping) else one for one in pair)
            if num_examples((inputs, targets)):
                empty = False
                yield inputs, targets
    if empty:
        raise UseError("the batches are empty: give at least one example")


def batches_of(batches: Batches) -> Any:
    """Batches that can be iterated again and again: a list of one for a single pair.

    Two pairs are two batches, not inputs and targets of two tensors each.
    """
    if _is_pair(batches) and not all(map(_is_pair, batches)):
        return [batches]
    if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
        raise UseError(
            f"the batches are {described(batches)}: give a pair (inputs, targets), a list of pairs or a "
            "DataLoader, which can be iterated more than once"
        )
    return batches


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _one_dtype(leaf: Tensor) -> Tensor:
    """The same numbers in one dtype for each kind, on the CPU."""
    leaf = leaf.detach().cpu()
    if leaf.is_complex():
        return leaf.to(torch.complex128).contiguous()
    return (leaf.double() + 0.0 if leaf.is_floating_point() else leaf.long()).contiguous()
