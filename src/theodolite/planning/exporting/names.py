"""The name map: what the tensors of a plan are called in the trainer, and which of them are fused there."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from theodolite.anatomy.names import starred
from theodolite.core.errors import UseError
from theodolite.planning.rows import PlanRow

EXAMPLE = '{"layers.*": "model.layers.*"}'


@dataclass(frozen=True)
class Renamed:
    """The rows and the multipliers of a plan under the trainer's names."""

    rows: Mapping[str, PlanRow]
    multipliers: Mapping[str, float]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Rule:
    """One entry of a name map. A star stands for any text; surplus stars number the members of a stack."""

    pattern: str
    target: str

    def applied(self, name: str) -> str | None:
        """The new name; None if the name does not match."""
        pieces = map(re.escape, self.pattern.split("*"))
        found = re.fullmatch("(.+?)".join(pieces), name)
        if found is None:
            return None
        first, *rest = self.target.split("*")
        return first + "".join(star + piece for star, piece in zip(found.groups(), rest, strict=False))


def renamed(
    rows: Mapping[str, PlanRow], multipliers: Mapping[str, float], names: Mapping[str, str] | None
) -> Renamed:
    """Apply a name map; the first rule whose pattern matches a name applies.

    Tensors that get one name are fused: a rule that drops a star stacks them along a new first dimension,
    several rules put theirs one after the other along the outputs. They must be trained alike.
    """
    if names is None:
        return Renamed(rows, multipliers)
    rules = _checked(names)
    members: dict[str, list[tuple[int, PlanRow]]] = {}
    used: set[int] = set()
    for row in rows.values():
        place, new = _applied(rules, row.name)
        used.add(place)
        members.setdefault(new, []).append((place, row))
    factors = {_module(rules, name, used): factor for name, factor in multipliers.items()}
    if idle := [rule.pattern for place, rule in enumerate(rules) if place not in used]:
        earlier = " that an earlier rule has left over" if len(rules) > 1 else ""
        raise UseError(
            f"names: {idle[0]!r} matches no tensor{earlier}; there are {', '.join(list(rows)[:4])}, …"
        )
    made, notes = {}, []
    for new, some in members.items():
        made[new], said = _fused(new, some)
        notes += said
    return Renamed(made, factors, tuple(dict.fromkeys(notes)))


def _checked(names: Any) -> list[_Rule]:
    if not isinstance(names, Mapping) or not names:
        raise UseError(f"names is {names!r}: give the trainer's names by the plan's, as in {EXAMPLE}")
    rules = []
    for pattern, target in names.items():
        if not isinstance(pattern, str) or not isinstance(target, str) or not pattern or not target:
            raise UseError(f"names: {pattern!r}: {target!r} is no pair of names. Write them as in {EXAMPLE}")
        if target.count("*") > pattern.count("*"):
            raise UseError(
                f"names: {target!r} has more stars than {pattern!r}: a star stands for the same text on both "
                "sides"
            )
        rules.append(_Rule(pattern, target))
    return rules


def _applied(rules: Sequence[_Rule], name: str) -> tuple[int, str]:
    for place, rule in enumerate(rules):
        if (found := rule.applied(name)) is not None:
            return place, found
    raise UseError(
        f"names: no rule matches {name}. Add one; a last rule from '*' to '*' keeps the names of all others"
    )


def _module(rules: Sequence[_Rule], module: str, used: set[int]) -> str:
    """The new name of a module, by that of its weight, which may have no row because it is tied."""
    try:
        place, new = _applied(rules, f"{module}.weight")
    except UseError:
        raise UseError(
            f"names: the plan multiplies the input of the module {module}, and no rule matches "
            f"{module}.weight. Add one, for example {{'{module}.*': '{module}.*'}}"
        ) from None
    used.add(place)
    return new.rpartition(".")[0]


def _fused(new: str, members: Sequence[tuple[int, PlanRow]]) -> tuple[PlanRow, list[str]]:
    """One row for the members of a fused tensor, with what to know about it."""
    rows = [row for _, row in members]
    if len(rows) == 1:
        return replace(rows[0], name=new), []
    first = rows[0]
    for other in rows[1:]:
        _same_training(new, first, other)
    by_rule: dict[int, list[PlanRow]] = {}
    for place, row in sorted(members, key=lambda one: one[0]):
        by_rule.setdefault(place, []).append(row)
    stacked = [some[0] if len(some) == 1 else _stack(new, some) for some in by_rule.values()]
    whole = stacked[0] if len(stacked) == 1 else _joined(new, stacked)
    said, notes = starred(new, steps=True), []
    if len(stacked) > 1:
        parts = [starred(row.name, steps=True) for row in stacked]
        if len(set(parts)) < len(parts):  # stars would hide which tensors these are
            said, parts = new, [row.name for row in stacked]
        notes.append(
            f"{said}: taken to hold {', '.join(parts)} one after the other along its outputs, {whole.shape}."
        )
    if len(by_rule) < len(rows):
        notes.append(f"{said}: taken to be a stack of {len(rows) // len(stacked)} tensors, {whole.shape}.")
    if len({row.init for row in rows}) > 1:
        whole = replace(whole, init=replace(whole.init, kind="own"))
        notes.append(f"{said}: its parts start differently, so that initialize cannot draw it.")
    return replace(whole, name=new), notes


def _same_training(new: str, one: PlanRow, other: PlanRow) -> None:
    for field, said in (
        ("rule", "rule"),
        ("lr", "lr"),
        ("weight_decay", "weight decay"),
        ("eps", "eps"),
        ("extent", "extent"),
        ("multiplier", "multiplier"),
        ("in_axes", "in_axes"),
        ("out_axes", "out_axes"),
    ):
        left, right = getattr(one, field), getattr(other, field)
        if left != right and not (
            isinstance(left, float) and isinstance(right, float) and math.isclose(left, right, rel_tol=1e-12)
        ):
            raise UseError(
                f"names: {one.name} and {other.name} would both be {new}, but are trained differently: "
                f"{said} {left} and {right}. Give them different names, or keep them apart in the trainer"
            )


def _stack(new: str, rows: Sequence[PlanRow]) -> PlanRow:
    """Rows of one rule, as a stack along a new first dimension."""
    _same_shapes(new, rows, list(range(len(rows[0].shape))))
    first = rows[0]
    return replace(
        first,
        shape=(len(rows), *first.shape),
        in_axes=tuple(axis + 1 for axis in first.in_axes),
        out_axes=tuple(axis + 1 for axis in first.out_axes),
    )


def _joined(new: str, rows: Sequence[PlanRow]) -> PlanRow:
    """Rows of several rules, one after the other along their outputs."""
    first = rows[0]
    if len(first.out_axes) != 1:
        raise UseError(
            f"names: {first.name} and {rows[1].name} would both be {new}: their outputs are not one "
            "dimension, along which they could be joined. Give them different names"
        )
    axis = first.out_axes[0]
    _same_shapes(new, rows, [one for one in range(len(first.shape)) if one != axis])
    shape = list(first.shape)
    shape[axis] = sum(row.shape[axis] for row in rows)
    start, blocks = 0, []
    for row in rows:
        own = row.rows or (((0, row.shape[axis]),),)
        blocks += [tuple((start + low, start + high) for low, high in block) for block in own]
        start += row.shape[axis]
    return replace(first, shape=tuple(shape), rows=tuple(blocks) if first.in_axes else ())


def _same_shapes(new: str, rows: Sequence[PlanRow], axes: Sequence[int]) -> None:
    first = rows[0]
    for other in rows[1:]:
        if len(other.shape) != len(first.shape) or any(
            first.shape[axis] != other.shape[axis] for axis in axes
        ):
            raise UseError(
                f"names: {first.name} and {other.name} would both be {new}, but have the shapes "
                f"{first.shape} and {other.shape}, which do not fit together. Give them different names"
            )
