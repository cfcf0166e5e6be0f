"""Which residual branches repeat with depth, and how many more of them there are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from theodolite.anatomy import Anatomy, Branch
from theodolite.anatomy.names import starred
from theodolite.anatomy.part import Part


@dataclass(frozen=True)
class Repeating:
    """The residual branches that there are more of in a deeper network, at the target and at base size."""

    here: tuple[Branch, ...]
    there: tuple[Branch, ...]
    lone: tuple[Branch, ...]
    """Those at the target size that do not repeat: there are as many at every depth."""
    single: frozenset[str] = frozenset()
    """Tensors that there are as many of at every depth."""

    @property
    def ratio(self) -> float:
        """How many times more branches there are."""
        return len(self.here) / len(self.there) if self.there else 1.0

    def counts(self, part: Part) -> tuple[int, int]:
        """Between which branches a tensor's branch counts, at the target and at base size; 1 by itself."""
        alone = any((part.block, part.branch) == (one.block, one.branch) for one in self.lone)
        alone |= part.on_stream and part.name in self.single
        return (1, 1) if alone else (len(self.here), len(self.there))

    def depth(self, part: Part) -> float:
        """The ratio for a tensor: 1 in a branch that does not repeat."""
        return 1.0 if self.counts(part) == (1, 1) else self.ratio


def lone_branches(anatomy: Anatomy, others: Iterable[Anatomy]) -> frozenset[tuple[int, int]]:
    """By block and number: the branches of a network that do not repeat in networks of other depths."""
    found: set[tuple[int, int]] = set()
    for other in others:
        found |= {(one.block, one.branch) for one in repeating(anatomy, other).lone}
    return frozenset(found)


def repeating(target: Anatomy, base: Anatomy) -> Repeating:
    """Find the branches that repeat.

    Depth adds members to a list: tensors whose names differ from others in a number. A branch that has no
    tensor in such a list is alone, as the convolution of positions before the blocks of wav2vec 2.0. Where
    depth adds no names, or more branches without, as where blocks share their weights, every branch repeats.
    """
    here, there = _lists(target), _lists(base)
    longer = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}

    def is_in_list(name: str) -> bool:
        return any(before in longer for before, _ in _numbers(name))

    def repeats(branch: Branch) -> bool:
        return any(map(is_in_list, branch.ends or branch.parts))

    more, fewer = (tuple(filter(repeats, one.branches)) for one in (target, base))
    num_lone = len(target.branches) - len(more)
    if not more or not fewer or num_lone != len(base.branches) - len(fewer):
        return Repeating(target.branches, base.branches, ())
    lone = tuple(one for one in target.branches if not repeats(one))
    counts, counts_at_base = (Counter(map(starred, one)) for one in (target, base))
    single = (name for name in target if counts[starred(name)] == counts_at_base[starred(name)])
    return Repeating(more, fewer, lone, frozenset(single))


def _lists(names: Iterable[str]) -> dict[str, set[str]]:
    """By what stands before a number in a name: the numbers."""
    found: dict[str, set[str]] = {}
    for name in names:
        for before, number in _numbers(name):
            found.setdefault(before, set()).add(number)
    return found


def _numbers(name: str) -> list[tuple[str, str]]:
    """The numbers in a name, each with what stands before it.

    >>> _numbers("blocks.3.conv2.weight")
    [('blocks.', '3'), ('blocks.3.conv', '2')]
    """
    return [(name[: found.start()], found[0]) for found in re.finditer(r"\d+", name)]
