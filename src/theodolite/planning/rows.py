"""`PlanRow`: how one tensor starts and is trained. Rows as a table, as parameter groups, and compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from theodolite.anatomy.names import gather, matching, ranges
from theodolite.anatomy.part import ROLES, UNTRAINED, Part
from theodolite.core import arguments
from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS
from theodolite.planning.init_distribution import InitDistribution
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, number

WITHOUT_EPS = frozenset(name for name, spec in OPTIMIZERS.items() if spec.eps is None)
"""Rules of optimizers that have no eps."""
WITH_EXTENT = {name: spec.extent.option for name, spec in OPTIMIZERS.items() if spec.extent}
"""Rules of optimizers that have an option in units of the weight, and its name."""


@dataclass(frozen=True)
class PlanRow:
    """One tensor: how it starts, and its hyperparameters."""

    name: str
    shape: tuple[int, ...]
    role: str
    block: int | None
    fan_in: int
    fan_out: int
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]
    """Blocks of outputs that are separate matrices, such as fused queries, keys and values."""
    scale_free: bool
    """Is it divided by a norm of itself, so that only its direction matters?"""
    init: InitDistribution
    rule: str = ""
    """The optimizer that trains it: the plan's own, or the one for its vectors; empty if none does."""
    multiplier: float = 1.0
    """In the forward pass, on the readout of a tied embedding; 1 where it was absorbed."""
    lr: float = 0.0
    weight_decay: float = 0.0
    eps: float = 0.0
    extent: float = 1.0
    """Factor on options in units of the weight: the radius of SSO, the clip of Sophia."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Where each column comes from, in words and numbers."""

    @classmethod
    def of(cls, part: Part, init: InitDistribution, **given: Any) -> PlanRow:
        """A row with the facts of a Part."""
        alike = {one.name: getattr(part, one.name) for one in fields(cls) if hasattr(part, one.name)}
        return cls(**alike, init=init, **given)

    @property
    def trained(self) -> bool:
        """Does the plan train it? It leaves `frozen` and `unused` tensors as they are."""
        return self.role not in UNTRAINED


def plan_table(rows: Iterable[PlanRow], *, folded: bool) -> Table:
    """The rows as a table; `folded` puts equal rows whose names differ only in numbers into one line."""
    rows = list(rows)
    trained = [row for row in rows if row.trained]
    several_rules = len({row.rule for row in trained}) > 1
    any_decay = any(row.weight_decay for row in trained)

    def cells(row: PlanRow) -> tuple[str | float | None, ...]:
        if not row.trained:
            return (row.role, None, None, str(row.init), *[None] * (3 + len(WITH_EXTENT)))
        return (
            row.role,
            row.rule if several_rules else None,
            None if row.multiplier == 1 else row.multiplier,
            str(row.init),
            row.lr,
            row.weight_decay if any_decay else None,
            None if row.rule in WITHOUT_EPS else row.eps,
            *(row.extent if row.rule == rule else None for rule in WITH_EXTENT),
        )

    numbers = [Column(name, show=_digits) for name in ("multiplier", "init", "lr", "decay", "eps")]
    extents = [Column(name, show=_times) for name in WITH_EXTENT.values()]
    lines = fold_rows(rows, cells) if folded else [(row.name, (row,)) for row in rows]
    return Table(
        ("tensor", "role", "rule", *numbers, *extents),
        [(pattern, *cells(members[0])) for pattern, members in lines],
    )


def _digits(value: float | str | None) -> str:
    return number(value) if isinstance(value, int | float) else value or ""


def _times(value: float | None) -> str:
    return "" if value is None else f"× {number(value)}"


def fold_rows(
    rows: Iterable[PlanRow], key: Callable[[PlanRow], Hashable], among: Iterable[PlanRow] = ()
) -> list[tuple[str, tuple[PlanRow, ...]]]:
    """Gather rows with equal keys whose names differ only in numbers, under the pattern of their names.

    Where a pattern also matches other rows, of these or of `among`, it says which numbers are meant.
    """
    rows = list(rows)
    names = {row.name for row in (*rows, *among)}
    found = []
    for pattern, members in gather(rows, key):
        pieces = pattern.split(".")
        if sum(_fits(name.split("."), pieces) for name in names) > len(members):
            place = pieces.index("*")
            pattern += f" ({ranges(int(row.name.split('.')[place]) for row in members)})"
        found.append((pattern, members))
    return found


def _fits(name: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(name) == len(pattern) and all(
        star in ("*", piece) for piece, star in zip(name, pattern, strict=True)
    )


LARGEST = float(np.finfo(np.float32).max) / 100
"""Largest planned number: weights in float32 are drawn several standard deviations from their mean."""


def check_row(row: PlanRow, where: str, rules: Sequence[str]) -> None:
    """Refuse numbers that no tensor can be drawn or trained with: people edit plans by hand."""
    arguments.one_of(f"{where}: role", row.role, ROLES)
    if row.trained or row.rule:
        arguments.one_of(f"{where}: rule", row.rule, rules)
    for name in ("lr", "weight_decay", "eps", "extent"):
        arguments.number(f"{where}: {name}", getattr(row, name), least=0, most=LARGEST)
    check_multiplier(row.multiplier, f"{where}: multiplier")
    for name in ("fan_in", "fan_out"):
        arguments.whole(f"{where}: {name}", getattr(row, name), least=1, most=2**63)
    for length in row.shape:
        arguments.whole(f"{where}: shape", length, least=0, most=2**63)
    axes = (*row.in_axes, *row.out_axes)
    if len(set(axes)) < len(axes) or not set(axes) <= set(range(len(row.shape))):
        raise UseError(
            f"{where}: in_axes and out_axes are {row.in_axes} and {row.out_axes}: give different dimensions "
            f"of the shape {row.shape}"
        )
    outputs = math.prod(row.shape[axis] for axis in row.out_axes)
    for first, last in (pair for block in row.rows for pair in block):
        if not 0 <= first < last <= outputs:
            raise UseError(f"{where}: rows holds {(first, last)}: give a range within {outputs} outputs")
    init = row.init
    arguments.number(f"{where}: init: std", init.std, least=0, most=LARGEST)
    for name in ("mean", "factor"):
        arguments.number(f"{where}: init: {name}", getattr(init, name), least=-LARGEST, most=LARGEST)
    if init.kind == "truncated" or init.bound is not None:
        # Within a bound, uniform values have the largest std.
        least = init.std * math.sqrt(3) * (1 - 1e-9) if init.kind == "truncated" else 0.0
        arguments.number(f"{where}: init: bound", init.bound, least=least, most=LARGEST)


def check_multiplier(factor: float, where: str) -> None:
    """Refuse a multiplier of zero, or one that is not finite."""
    if not arguments.number(where, factor, least=-LARGEST, most=LARGEST):
        raise UseError(f"{where} is {factor}: give a number other than 0")


Options = Mapping[str, Mapping[str, Any]]
"""By rule: the options that the caller gave its optimizer."""


def param_groups(
    rows: Mapping[str, PlanRow], tensors: Mapping[str, Tensor], options: Options
) -> list[dict[str, Any]]:
    """Plain parameter groups, equal rows merged, in the order of their first tensors: `Plan.param_groups`."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, tensor in tensors.items():
        held = _group_options(rows[name], options[rows[name].rule])
        group = groups.setdefault(_key(held), {"params": [], "param_names": [], **held})
        group["params"].append(tensor)
        group["param_names"].append(name)
    _name(rows, list(groups.values()))
    return list(groups.values())


def count_groups(rows: Iterable[PlanRow], options: Options) -> int:
    """The number of groups of these rows."""
    return len({_key(_group_options(row, options[row.rule])) for row in rows})


def trained_tensors(
    rows: Iterable[PlanRow], tensors: Mapping[str, Tensor], skip: Sequence[str], noun: str = "plan"
) -> dict[str, Tensor]:
    """The tensors of the rows that are not skipped; refuse those that were frozen after planning.

    `noun` is what errors call the rows.
    """
    if isinstance(skip, str):
        raise UseError(f"skip is {skip!r}: give a list of patterns, skip=[{skip!r}]")
    skipped: set[str] = set()
    for pattern in skip:
        found = matching(tensors, pattern)
        if not found:
            raise UseError(f"skip: no tensor's name matches {pattern!r}")
        skipped.update(found)
    kept = {row.name: tensors[row.name] for row in rows if row.name not in skipped}
    frozen = [name for name, tensor in kept.items() if not tensor.requires_grad]
    if frozen:
        more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
        train = "train" if noun.endswith("s") else "trains"
        raise UseError(
            f"{', '.join(frozen[:3])}{more}: frozen (requires_grad is False), but the {noun} {train} them. "
            f"Unfreeze them, or leave them out: {noun}.optimizer(model, skip={frozen!r})"
        )
    if not kept:
        raise UseError(f"skip={list(skip)!r} leaves no tensor to train")
    return kept


def _name(rows: Mapping[str, PlanRow], groups: Sequence[dict[str, Any]]) -> None:
    """Name each group: its roles, its rule if there are several, its first tensor if needed."""
    several_rules = len({group["rule"] for group in groups}) > 1
    for group in groups:
        roles = "+".join(dict.fromkeys(rows[name].role for name in group["param_names"]))
        group["name"] = f"{group['rule']}-{roles}" if several_rules else roles
    often = Counter(group["name"] for group in groups)
    for group in groups:
        if often[group["name"]] > 1:
            group["name"] += f":{group['param_names'][0]}"


def _group_options(row: PlanRow, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the group of a row holds beside its tensors."""
    own = {"lr": row.lr, "weight_decay": row.weight_decay, "rule": row.rule, "planned_lr": row.lr}
    options = {**given, **own}
    spec = OPTIMIZERS.get(row.rule)
    if spec is None:  # a rule of the user's
        return {**options, "eps": row.eps}
    options |= spec.fixed
    if spec.eps:
        options[spec.eps.option] = row.eps
    if spec.extent:
        value = given.get(spec.extent.option, spec.extent.usual)
        options[spec.extent.option] = None if value is None else value * row.extent
    layout = {"axes": (tuple(row.in_axes), tuple(row.out_axes)), "rows": row.rows}
    return {**options, **{option: layout[option] for option in spec.layout}}


def _key(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal but for rounding is equal: rows come to the same number in different ways."""
    values = (f"{value:.12e}" if isinstance(value, float) else repr(value) for value in options.values())
    return (*options, *values)


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
    for name, one in vars(row).items():
        two = getattr(other, name)
        if name not in idle and one != two:
            said = "decay" if name == "weight_decay" else name.replace("_", " ")
            yield f"{said} {change(one, two)}"


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
