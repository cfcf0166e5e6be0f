"""The residual stream along a number that each example has: a time, a length, a class.

A mean over examples hides what differs between them. The batch is split into groups of similar numbers, and
the stream of each group is measured with the loss of that group alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from theodolite.core import arguments
from theodolite.core.batches import Batch
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.core.examples import num_examples, take
from theodolite.present.figure import Figure
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted, number
from theodolite.probes.scaling.activation_layout import ActivationLayout
from theodolite.probes.stream.maps import DRAWN, RATIOS, branch_values, depth_maps, why_no_ratio
from theodolite.probes.stream.result import Stream

GROUPS = 6
"""Most groups, unless told."""
FEWEST = 2
"""Fewest examples in a group."""


@dataclass(frozen=True)
class StreamGroup:
    """The stream of the examples whose numbers lie in a range."""

    low: float
    high: float
    """The smallest and the largest number in the group."""
    examples: int
    stream: Stream

    @property
    def cosines(self) -> tuple[float, float]:
        """The smallest and the largest cosine of the stream before and after a branch."""
        found = [one.cosine for one in self.stream.branches if not math.isnan(one.cosine)]
        return (min(found), max(found)) if found else (math.nan, math.nan)


@dataclass(frozen=True)
class StreamAlong(Result):
    """The residual stream in groups of examples. Made by `stream(…, along=values)`."""

    kind: ClassVar[str] = "residual stream in groups of examples"
    loads: ClassVar[bool] = True
    groups: tuple[StreamGroup, ...]
    """From the smallest numbers to the largest."""
    notes: tuple[str, ...]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The stream of each group."""
        return tuple(group.stream for group in self.groups)

    @property
    def growth_span(self) -> tuple[float, float]:
        """The smallest and the largest growth of the stream, last over first, among the groups."""
        return _span([one.growth.ratio for one in self.streams])

    @property
    def gradient_span(self) -> tuple[float, float]:
        """The smallest and the largest growth of its gradient, first over last, among the groups."""
        return _span([one.backward.ratio for one in self.streams])

    def values(self, name: str) -> tuple[tuple[float, ...], ...]:
        """One quantity of `BranchReading`, by group and by branch; nan where it was not measured."""
        return branch_values(self.streams, name)

    def blocks(self) -> Iterator[Block]:
        """A row for each group, and heat maps."""
        yield self.table()
        yield "\n".join(
            [
                "stream: last block over the start; gradient: the other way; f/h: last branch; cosine of the "
                "stream before and after a branch, smallest and largest",
                *why_no_ratio(self.streams, self._labels, "number"),
                *(f"note: {note}" for note in self.notes),
            ]
        )
        yield self.figure()

    def table(self) -> Table:
        """One row for each group."""
        rows = [
            (
                *(label, group.examples, one.loss, one.growth.ratio, one.backward.ratio),
                *(one.branches[-1].share, *group.cosines),
            )
            for label, group, one in zip(self._labels, self.groups, self.streams, strict=True)
        ]
        return Table(("number", "examples", "loss", *RATIOS, "f/h", "least cosine", "largest cosine"), rows)

    def figure(self, quantities: Sequence[str] = DRAWN) -> Figure:
        """A heat map of depth × number for each quantity."""
        return depth_maps(self.streams, self._labels, "number", quantities)

    @property
    def _labels(self) -> list[str]:
        """The ranges in as few digits as tell them apart."""
        ends = [tuple(dict.fromkeys((group.low, group.high))) for group in self.groups]
        digits = 3
        while True:
            labels = [" to ".join(number(end, digits) for end in pair) for pair in ends]
            if len(set(labels)) == len(labels) or digits >= 17:
                return labels
            digits += 1


def measure_groups(
    measure: Callable[[Batch, ActivationLayout | None], Stream],
    batch: Batch,
    along: Tensor | Sequence[float],
    groups: int,
) -> StreamAlong:
    """Measure each group of a batch; groups of one size share a layout."""
    arguments.whole("groups", groups, least=1)
    examples = _examples_of(batch)
    values = _checked(along, examples)
    members = _split(values, groups)
    layouts: dict[int, ActivationLayout | None] = {}
    found = []
    for chosen in members:
        here = measure(take(batch, chosen), layouts.get(len(chosen)))
        layouts[len(chosen)] = here.layout
        ends = [values[index] for index in chosen]
        found.append(StreamGroup(min(ends), max(ends), len(chosen), here))
    notes = [f"all {counted(examples, 'number')} are {number(values[0])}, so there is one group"]
    return StreamAlong(tuple(found), tuple(notes if len(set(values)) == 1 else ()))


def _examples_of(batch: Batch) -> int:
    """The number of examples, if every tensor of the targets has a row for each."""
    examples = num_examples(batch)
    for leaf in tree_leaves(batch[1]):
        if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != examples):
            raise UseError(
                f"the targets have {described(leaf)} and the inputs {counted(examples, 'example')}: a batch "
                "can be split only if dimension 0 of all targets is the examples. Give them that shape, and "
                "flatten them in the loss"
            )
    return examples


def _checked(along: Any, examples: int) -> list[float]:
    """The numbers as floats."""
    try:
        found = torch.as_tensor(along).detach().cpu()
        if found.is_complex():
            raise TypeError("a complex number has no order")
        found = found.double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UseError(f"along is {described(along)}: give one number for each example") from error
    if found.ndim != 1 or len(found) != examples:
        raise UseError(
            f"along has the shape {tuple(found.shape)}, but the batch has {counted(examples, 'example')}: "
            f"give one number for each, of shape ({examples},)"
        )
    bad = found.isfinite().logical_not().nonzero().flatten().tolist()
    if bad:
        raise UseError(f"along is {float(found[bad[0]])} for example {bad[0]}: give finite numbers")
    numbers: list[float] = found.tolist()
    return numbers


def _split(values: Sequence[float], groups: int) -> list[list[int]]:
    """The examples of each group, in the order of the batch. Equal numbers are never separated."""
    if len(values) < FEWEST:
        raise UseError(f"the batch has {counted(len(values), 'example')}: give at least {FEWEST}")
    members: dict[float, list[int]] = {}
    for index, value in sorted(enumerate(values), key=lambda pair: pair[1]):
        members.setdefault(value, []).append(index)
    if len(members) <= groups:
        for value, some in members.items():
            if len(some) < FEWEST:
                raise UseError(
                    f"only {counted(len(some), 'example')} of the batch has the number {value:g}: give at "
                    f"least {FEWEST} of each, or join neighbours, with fewer groups than the {len(members)} "
                    f"distinct numbers, as in groups={max(1, len(members) // 2)}"
                )
        return list(members.values())
    groups = max(1, min(groups, len(values) // FEWEST))
    found: dict[int, list[int]] = {}
    before = 0
    for some in members.values():  # the group that the middle of the equal numbers belongs to
        found.setdefault(int(groups * (before + len(some) / 2) / len(values)), []).extend(some)
        before += len(some)
    joined: list[list[int]] = []
    for some in found.values():
        if joined and min(len(joined[-1]), len(some)) < FEWEST:
            joined[-1] += some
        else:
            joined.append(some)
    return [sorted(some) for some in joined]


def _span(ratios: Sequence[float]) -> tuple[float, float]:
    found = [ratio for ratio in ratios if not math.isnan(ratio)]
    return (min(found), max(found)) if found else (math.nan, math.nan)
