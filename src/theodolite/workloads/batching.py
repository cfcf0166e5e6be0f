"""Batches of another size than a workload's own: consecutive ones are one stream of examples, cut anew."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from theodolite.core.batches import Batch, targets_in
from theodolite.core.calling import see_inside
from theodolite.core.errors import UseError
from theodolite.core.examples import num_examples, take

if TYPE_CHECKING:
    from theodolite.workloads.definition import Workload


@dataclass(frozen=True)
class Resized:
    """Batches with `num` examples, from those of a workload.

    Step s takes the examples s·num to (s+1)·num of the stream that the workload's own batches make one after
    the other. So a batch k times as large is k of them, and a smaller one a part of one. If the workload's
    function has an argument `num`, it draws them itself.
    """

    source: Workload
    num: int

    def __call__(self, seed: int, step: int) -> Batch:
        """The batch of a step: a pure function of seed and step."""
        own = self.source
        if takes_num(own.batch):
            batches = functools.partial(own.batch, num=self.num)  # type: ignore[call-arg]
            drawn = dataclasses.replace(own, batch=batches).draw(seed, step)
            found = num_examples(drawn)
            if found != self.num:
                raise UseError(
                    f"workload {own.name!r}: batch({seed}, {step}, {self.num}) has {found} examples. Return "
                    "as many as num says, along dimension 0 of the inputs"
                )
            return drawn
        usual = usual_batch(own)
        first, last = step * self.num, (step + 1) * self.num
        pieces = []
        for place in range(first // usual, -(-last // usual)):
            batch = own.draw(seed, place)
            if num_examples(batch) != usual:
                raise UseError(
                    f"workload {own.name!r}: batch({seed}, {place}) has {num_examples(batch)} examples and "
                    f"batch(0, 0) {usual}: batches of {self.num} are cut from batches of one size. Give "
                    "batch a third argument num and draw that many"
                )
            pieces.append((batch, max(first - place * usual, 0), min(last - place * usual, usual)))
        if len(pieces) > 1:
            return _joined(own, pieces)
        batch, start, stop = pieces[0]
        return take(see_inside(batch), slice(start, stop))


@dataclass(frozen=True)
class HeldOutOf:
    """The held-out batches of a workload, in its own size whatever is trained on."""

    source: Workload

    def __call__(self, seed: int, step: int) -> Batch:
        """A held-out batch."""
        return self.source.draw_held_out(step)


def takes_num(batch: Callable[..., Any]) -> bool:
    """Does a batch function draw as many examples as its argument `num` says?

    >>> takes_num(lambda seed, step: None), takes_num(lambda seed, step, num=32: None)
    (False, True)
    """
    try:
        return "num" in inspect.signature(batch).parameters
    except (TypeError, ValueError):  # a function without a signature, such as one of C
        return False


@functools.lru_cache(maxsize=256)
def usual_batch(workload: Workload) -> int:
    """The number of examples in a batch of the workload as it is."""
    return num_examples(workload.draw(0, 0))


@functools.lru_cache(maxsize=256)
def targets_per_example(workload: Workload) -> float:
    """The number of targets that an example has: 256 for a sequence of 256 tokens, 1 for a class."""
    batch = workload.draw(0, 0)
    return targets_in(batch) / num_examples(batch)


def _joined(workload: Workload, pieces: list[tuple[Batch, int, int]]) -> Batch:
    """One batch of the examples from start to stop of several batches of one size.

    What has no row for each example, such as positions, is that of the first.
    """
    number = usual_batch(workload)
    flat = [tree_flatten(see_inside(batch)) for batch, _, _ in pieces]
    if any(structure != flat[0][1] for _, structure in flat):
        raise UseError(
            f"workload {workload.name!r}: its batches are not all made of the same things, so that they do "
            "not go into one batch. Give batch a third argument num and draw that many"
        )
    leaves = []
    for column in zip(*(values for values, _ in flat), strict=True):
        rows = all(isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == number for leaf in column)
        if rows and len({leaf.shape[1:] for leaf in column}) > 1:
            shapes = " and ".join(dict.fromkeys(str(tuple(leaf.shape)) for leaf in column))
            raise UseError(
                f"workload {workload.name!r}: its batches have tensors of the shapes {shapes}, which do not "
                "go into one batch. Pad them to one length, or give batch a third argument num"
            )
        cut = ((leaf, slice(start, stop)) for leaf, (_, start, stop) in zip(column, pieces, strict=True))
        leaves.append(torch.cat([leaf[part] for leaf, part in cut]) if rows else column[0])
    joined: Batch = tree_unflatten(leaves, flat[0][1])
    return joined
