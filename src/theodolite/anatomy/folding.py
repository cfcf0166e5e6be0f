"""Equal tensors of equal blocks, folded into one line: `blocks.*.attn.proj.weight`.

Names are folded for reading only; what a tensor is comes from its Part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

from theodolite.anatomy.part import Part

MANY = 4
"""From this many equal tensors in one branch on (experts held one by one), they are folded too."""


@dataclass(frozen=True)
class Fold:
    """Parts that differ in nothing but their block."""

    pattern: str
    parts: tuple[Part, ...]

    @property
    def part(self) -> Part:
        """Any one of them, to ask what all are."""
        return self.parts[0]

    @property
    def blocks(self) -> str:
        """Which blocks they sit in, as ranges; empty outside of the blocks."""
        return ranges(part.block for part in self.parts if part.block is not None)

    @property
    def numel(self) -> int:
        """Elements in all of them."""
        return sum(part.numel for part in self.parts)


def fold(parts: Iterable[Part]) -> list[Fold]:
    """Group the parts that differ only in their block, in the order in which they first come.

    >>> from theodolite.anatomy.part import Part
    >>> gain = Part("blocks.0.norm", (8,), "norm", "gain", 1, 8, False, True, (), (0,), block=0)
    >>> one, = fold([gain, dataclasses.replace(gain, name="blocks.1.norm", block=1, beside="blocks.0.out")])
    >>> one.pattern, one.blocks
    ('blocks.*.norm', '0–1')
    """
    folds = gather(parts, lambda part: dataclasses.replace(part, name="", block=None, tied=(), beside=None))
    return [Fold(pattern, members) for pattern, members in folds]


def left_alone(parts: Iterable[Part]) -> str:
    """How many of the parts are not trained, and which; empty if all are.

    >>> table = Part("positions", (9, 8), "add", "frozen", 1, 8, False, True, (), (1,))
    >>> left_alone([table, dataclasses.replace(table, name="spare", role="unused")])
    '1 tensor is frozen (positions), and 1 tensor is used by nothing in the forward pass (spare)'
    """
    held = list(parts)
    said = []
    for role, what in (("frozen", "frozen"), ("unused", "used by nothing in the forward pass")):
        folds = fold(part for part in held if part.role == role)
        if folds:
            count = sum(len(one.parts) for one in folds)
            names = ", ".join(one.pattern for one in folds[:3]) + (", …" if len(folds) > 3 else "")
            said.append(f"{count} tensor{' is' if count == 1 else 's are'} {what} ({names})")
    return ", and ".join(said)


class Placed(Protocol):
    """What can be folded: it has a name and sits in a block, or in none."""

    @property
    def name(self) -> str:
        """Canonical."""

    @property
    def block(self) -> int | None:
        """Counted from 0."""


Item = TypeVar("Item", bound=Placed)


def gather(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[tuple[str, tuple[Item, ...]]]:
    """Patterns, each with the items it stands for: those of one key whose names differ in numbers only."""
    alike: dict[Hashable, list[Item]] = {}
    order: dict[str, int] = {}
    for item in items:
        order[item.name] = len(order)
        starred = ".".join("*" if piece.isdigit() else piece for piece in item.name.split("."))
        alike.setdefault((starred, key(item)), []).append(item)
    folds = [
        (starred_name([item.name for item in members]), tuple(members))
        for group in alike.values()
        for members in _columns(group)
    ]
    return sorted(folds, key=lambda one: order[one[1][0].name])


def starred_name(names: Sequence[str]) -> str:
    """One pattern for names of equal length: a star where they differ.

    >>> starred_name(["h.0.mlp.0.w", "h.1.mlp.0.w"])
    'h.*.mlp.0.w'
    """
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as ranges.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    >>> ranges(range(0, 24, 2))
    '0, 2, …, 22'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    steps = {later[0] - earlier[0] for earlier, later in pairwise(runs)}
    if len(runs) > 3 and len(steps) == 1 and all(len(run) == 1 for run in runs):
        return f"{runs[0][0]}, {runs[1][0]}, …, {runs[-1][0]}"
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _columns(group: list[Item]) -> list[list[Item]]:
    """Split a group that has several members in each block into the first of each, the second of each, …"""
    places: dict[int | None, list[Item]] = {}
    for item in group:
        places.setdefault(item.block, []).append(item)
    counts = {len(members) for members in places.values()}
    if len(counts) != 1 or (count := counts.pop()) >= MANY or (None in places and count > 1):
        return [group]
    return [list(column) for column in zip(*places.values(), strict=True)]
