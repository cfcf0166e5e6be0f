"""`PlanRow`: how one tensor starts and is trained; the rows of a plan as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from theodolite.anatomy.names import gather, ranges
from theodolite.anatomy.part import ROLES, UNTRAINED
from theodolite.core.arguments import number, one_of, whole
from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS
from theodolite.planning.init_distribution import InitDistribution
from theodolite.present import text
from theodolite.present.text import Column, Table

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
    return text.number(value) if isinstance(value, int | float) else value or ""


def _times(value: float | None) -> str:
    return "" if value is None else f"× {text.number(value)}"


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
"""Of a planned number: weights are drawn in float32, several standard deviations from their mean."""


def check_row(row: PlanRow, where: str, rules: Sequence[str]) -> None:
    """Refuse numbers that no tensor can be drawn or trained with: people edit plans by hand."""
    one_of(f"{where}: role", row.role, ROLES)
    if row.trained or row.rule:
        one_of(f"{where}: rule", row.rule, rules)
    for name in ("lr", "weight_decay", "eps", "extent"):
        number(f"{where}: {name}", getattr(row, name), least=0, most=LARGEST)
    check_multiplier(row.multiplier, f"{where}: multiplier")
    for name in ("fan_in", "fan_out"):
        whole(f"{where}: {name}", getattr(row, name), least=1, most=2**63)
    for length in row.shape:
        whole(f"{where}: shape", length, least=0, most=2**63)
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
    number(f"{where}: init: std", init.std, least=0, most=LARGEST)
    for name in ("mean", "factor"):
        number(f"{where}: init: {name}", getattr(init, name), least=-LARGEST, most=LARGEST)
    if init.kind == "truncated" or init.bound is not None:
        # Within a bound, uniform values have the largest std.
        least = init.std * math.sqrt(3) * (1 - 1e-9) if init.kind == "truncated" else 0.0
        number(f"{where}: init: bound", init.bound, least=least, most=LARGEST)


def check_multiplier(factor: float, where: str) -> None:
    """Refuse a multiplier of zero, or one that is not finite."""
    if not number(where, factor, least=-LARGEST, most=LARGEST):
        raise UseError(f"{where} is {factor}: give a number other than 0")
