"""What one plan does otherwise than another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from theodolite.planning.law import Law
from theodolite.planning.plan import Plan, Row
from theodolite.planning.table import WITH_EXTENT, WITHOUT_EPS, folded, law_in_brief, number


def diff(plan: Plan, other: Plan) -> str:
    """The differences from `plan` to `other`: in the base values, tensor by tensor, and in the tensors.

    Numbers come with the factor between them. Tensors that differ in the same way stand together.
    """
    differences: dict[str, list[str]] = {}
    for words, pattern in _differences(plan, other):
        differences.setdefault(words, []).append(pattern)
    lines = list(_base_lines(plan, other))
    for words, patterns in differences.items():
        lines += [words, *(f"    {pattern}" for pattern in patterns)]
    return "\n".join(lines) or "the plans are the same"


_BASE_VALUES = {
    "size": "size",
    "base": "base size",
    "optimizer_name": "optimizer",
    "lr": "base lr",
    "weight_decay": "base weight decay",
    "eps": "base eps",
    "policy": "decay policy",
    "options": "options",
    "vector_options": "vector options",
    "multipliers": "multipliers",
}


def _base_lines(plan: Plan, other: Plan) -> Iterator[str]:
    for field, name in _BASE_VALUES.items():
        one, two = getattr(plan, field), getattr(other, field)
        if one != two:
            yield f"{name}: {_change(one, two)}"


def _differences(plan: Plan, other: Plan) -> Iterator[tuple[str, str]]:
    """What differs, and the pattern of the tensors in which it does."""
    rows, theirs = list(plan.rows.values()), list(other.rows.values())
    changes = {
        row.name: ", ".join(_changes(row, other.rows[row.name], same_size=plan.size == other.size))
        for row in rows
        if row.name in other.rows
    }
    differing = [plan.rows[name] for name, words in changes.items() if words]
    for pattern, members in folded(differing, lambda row: changes[row.name], among=rows):
        yield changes[members[0].name], pattern
    for words, ours, among in (("only in the first", rows, theirs), ("only in the second", theirs, rows)):
        names = {row.name for row in among}
        alone = [row for row in ours if row.name not in names]
        for pattern, _ in folded(alone, lambda row: None, among=among):
            yield words, pattern


def _changes(row: Row, other: Row, same_size: bool) -> Iterator[str]:
    """What differs, in words; the reasons follow from the rest."""
    for field in dataclasses.fields(Row):
        one, two = getattr(row, field.name), getattr(other, field.name)
        if field.name not in ("name", "reasons", *_idle(row, other, same_size)) and one != two:
            name = "decay" if field.name == "weight_decay" else field.name.replace("_", " ")
            yield f"{name} {_change(one, two)}"


def _idle(row: Row, other: Row, same_size: bool) -> list[str]:
    """The columns that neither row's optimizer reads, and those that follow from what is said anyway."""
    rules = {row.rule, other.rule}
    idle = ["fan_in", "fan_out", "in_axes", "out_axes"] if row.shape != other.shape else []
    if not same_size:
        idle.append("shape")
    if rules <= WITHOUT_EPS:
        idle.append("eps")
    return idle if rules & WITH_EXTENT.keys() else [*idle, "extent"]


def _change(one: Any, two: Any) -> str:
    """One value and the other, and the factor between them."""
    if isinstance(one, float | int) and isinstance(two, float | int):
        factor = f" (× {number(two / one)})" if one and two and not math.isclose(one, two) else ""
        written = (number(one), number(two))
        if written[0] == written[1]:  # they differ in later digits
            written = (repr(one), repr(two))
        return f"{written[0]} → {written[1]}{factor}"
    if isinstance(one, Law) and isinstance(two, Law):
        if law_in_brief(one) != law_in_brief(two):
            ratio = f" (× {number(two.std / one.std)})" if one.std and two.std else ""
            return f"{law_in_brief(one)} → {law_in_brief(two)}{ratio}"
        return f"{one!r} → {two!r}"
    return f"{_brief(one)} → {_brief(two)}"


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return "×".join(map(str, value)) or "()"
    return "none" if value is None else str(value)
