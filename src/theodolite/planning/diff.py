"""`PlanDiff`: what one plan does differently from another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.rows import WITH_EXTENT, WITHOUT_EPS, PlanRow, fold_rows
from theodolite.present.result import Block, Result
from theodolite.present.text import number


@dataclass(frozen=True)
class PlanDiff(Result):
    """The differences from one plan to another. Numbers come with the factor between them."""

    kind: ClassVar[str] = "plan difference"
    loads: ClassVar[bool] = True

    base: tuple[str, ...]
    """Differences in what holds for the whole plan, one sentence each."""
    tensors: Mapping[str, tuple[str, ...]]
    """By what differs: the tensors, by patterns of their names."""

    def blocks(self) -> Iterator[Block]:
        """What differs, each with the tensors it is about."""
        if not self.base and not self.tensors:
            yield "the plans are the same"
        if self.base:
            yield "\n".join(self.base)
        for change, patterns in self.tensors.items():
            yield "\n".join([change, *(f"    {pattern}" for pattern in patterns)])


def compare_rows(
    rows: Iterable[PlanRow], others: Iterable[PlanRow], *, same_size: bool
) -> dict[str, tuple[str, ...]]:
    """What differs between rows of equal names, and which names occur once; by what differs, the patterns."""
    ours, theirs = ({row.name: row for row in each} for each in (rows, others))
    changes = {
        name: ", ".join(_changes(row, theirs[name], same_size))
        for name, row in ours.items()
        if name in theirs
    }
    found: dict[str, tuple[str, ...]] = {}
    differing = [ours[name] for name, words in changes.items() if words]
    for pattern, members in fold_rows(differing, lambda row: changes[row.name], among=ours.values()):
        words = changes[members[0].name]
        found[words] = (*found.get(words, ()), pattern)
    for words, one, two in (("only in the first", ours, theirs), ("only in the second", theirs, ours)):
        alone = [row for name, row in one.items() if name not in two]
        if alone:
            folded = fold_rows(alone, lambda row: None, among=two.values())
            found[words] = tuple(pattern for pattern, _ in folded)
    return found


def _changes(row: PlanRow, other: PlanRow, same_size: bool) -> Iterator[str]:
    """What differs, without columns that neither optimizer reads or that follow from others."""
    rules = {row.rule, other.rule}
    idle = {"name", "reasons"}
    if row.shape != other.shape:
        idle |= {"fan_in", "fan_out", "in_axes", "out_axes"}
    if not same_size:
        idle.add("shape")
    if rules <= WITHOUT_EPS:
        idle.add("eps")
    if not rules & WITH_EXTENT.keys():
        idle.add("extent")
    for field in dataclasses.fields(PlanRow):
        one, two = getattr(row, field.name), getattr(other, field.name)
        if field.name not in idle and one != two:
            name = "decay" if field.name == "weight_decay" else field.name.replace("_", " ")
            yield f"{name} {change(one, two)}"


def change(one: Any, two: Any) -> str:
    """One value and the other, and the factor between them.

    >>> change(0.1, 0.2), change((2, 3), None)
    ('0.1 → 0.2 (× 2)', '2×3 → none')
    """
    if isinstance(one, float | int) and isinstance(two, float | int):
        written, sizes = (number(one), number(two)), (one, two)
    elif isinstance(one, InitDistribution) and isinstance(two, InitDistribution):
        written, sizes = (str(one), str(two)), (one.std, two.std)
    else:
        return f"{_brief(one)} → {_brief(two)}"
    if written[0] == written[1]:  # they differ in later digits
        written = repr(one), repr(two)
    related = all(sizes) and not math.isclose(*sizes)
    return f"{written[0]} → {written[1]}" + (f" (× {number(sizes[1] / sizes[0])})" if related else "")


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return "×".join(map(str, value)) or "()"
    return "none" if value is None else str(value)
