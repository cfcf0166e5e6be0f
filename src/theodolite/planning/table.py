"""A Plan for reading in a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from theodolite.anatomy.names import gather, ranges
from theodolite.optimizers import OPTIMIZERS
from theodolite.planning.caveats import LOUD
from theodolite.planning.grouping import num_groups
from theodolite.planning.law import Law
from theodolite.planning.plan import Plan, Row

WITHOUT_EPS = frozenset(name for name, spec in OPTIMIZERS.items() if spec.eps is None)
"""Rules of optimizers that have no eps."""
WITH_EXTENT = {name: spec.extent.option for name, spec in OPTIMIZERS.items() if spec.extent}
"""Rules of optimizers that have an option in units of the weight, and its name."""


def table(plan: Plan, width: int | None = None) -> str:
    """What is trained with what, as a table that fits a terminal.

    Tensors whose lines would be equal and whose names differ in numbers only share one. Columns that would
    say the same on every line are left out.
    """
    width = width or min(max(shutil.get_terminal_size((100, 24)).columns, 40), 140)
    columns = shown_columns(plan)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("tensor", overflow="fold")
    for column in columns:
        grid.add_column(column, no_wrap=True, justify="left" if column in ("role", "rule") else "right")
    for pattern, rows in folded(plan.rows.values(), lambda row: cells(row, columns)):
        grid.add_row(pattern, *cells(rows[0], columns))
    console = Console(width=width, no_color=True, highlight=False, emoji=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(grid)
    body = "\n".join(line.rstrip() for line in captured.get().splitlines())
    loud, quiet = (
        "".join(
            f"\n\n{textwrap.fill(note, width, subsequent_indent='  ')}"
            for note in plan.notes
            if note.startswith(LOUD) == is_loud
        )
        for is_loud in (True, False)
    )
    head = "\n".join(textwrap.fill(line, width) for line in heading(plan))
    return f"{head}{loud}\n\n{body}{quiet}"


def heading(plan: Plan) -> tuple[str, str]:
    """The rule and the sizes (width × depth); the values at base size, and how much there is."""
    wider, deeper = plan.size.width / plan.base.width, plan.size.depth / plan.base.depth
    grown = f"width × {number(wider)}, depth × {number(deeper)}"
    others = sorted({row.rule for row in plan.trained} - {plan.optimizer_name})
    beside = f" beside {' and '.join(others)}" if others else ""
    at_base = f"at base size lr {number(plan.lr)}"
    if plan.weight_decay and plan.policy != "none":
        at_base += f", weight decay {number(plan.weight_decay)} ({plan.policy})"
    groups = num_groups(plan)
    counted = f"{len(plan.trained)} tensors in {groups} group{'' if groups == 1 else 's'}"
    return f"{plan.optimizer_name}{beside}, {plan.base} → {plan.size} ({grown})", f"{at_base}; {counted}"


def folded(
    rows: Iterable[Row], key: Callable[[Row], Hashable], among: Iterable[Row] = ()
) -> list[tuple[str, tuple[Row, ...]]]:
    """Rows of one key whose names differ in numbers only, with the pattern of their names.

    Where a pattern fits other rows too, of these or of `among`, it says which numbers are meant.
    """
    rows = list(rows)
    names = {row.name for row in (*rows, *among)}
    return [
        (f"{pattern} ({_starred_numbers(pattern, members)})", members)
        if sum(_fits(name, pattern) for name in names) > len(members)
        else (pattern, members)
        for pattern, members in gather(rows, key)
    ]


def shown_columns(plan: Plan) -> tuple[str, ...]:
    """The columns in which something is to be seen."""
    rows = plan.trained
    rules = {row.rule for row in rows}
    optional = {
        "rule": len(rules) > 1,
        "multiplier": any(row.multiplier != 1 for row in rows),
        "decay": any(row.weight_decay for row in rows),
        "eps": bool(rules - WITHOUT_EPS),
        **{word: rule in rules for rule, word in WITH_EXTENT.items()},
    }
    order = ("role", "rule", "multiplier", "init", "lr", "decay", "eps", *WITH_EXTENT.values())
    return tuple(column for column in order if optional.get(column, True))


def cells(row: Row, columns: tuple[str, ...]) -> tuple[str, ...]:
    """What a row shows in these columns."""
    shown = columns if row.trained else ("role", "init")
    return tuple(_CELLS[column](row) if column in shown else "" for column in columns)


def number(value: float) -> str:
    """A number in three digits; a large whole one in full.

    >>> [number(value) for value in (2**-8, 512.0, 1e-8, 4096, 1.25e6)]
    ['0.00391', '512', '1e-08', '4096', '1.25e+06']
    """
    if float(value).is_integer() and abs(value) < 1e5:
        return str(int(value))
    return f"{value:.3g}"


def law_in_brief(law: Law) -> str:
    """How a tensor starts, in a word and a number.

    >>> law_in_brief(Law("normal", std=0.02)), law_in_brief(Law("constant", mean=1.0))
    ('normal 0.02', '1')
    """
    if law.kind == "constant":
        return number(law.mean)
    if law.kind == "kept":
        return "as built"
    centre = f"{number(law.mean)} ± " if law.mean else ""
    return f"{law.kind} {centre}{number(law.std)}"


def _fits(name: str, pattern: str) -> bool:
    pieces, stars = name.split("."), pattern.split(".")
    return len(pieces) == len(stars) and all(
        star in ("*", piece) for piece, star in zip(pieces, stars, strict=True)
    )


def _starred_numbers(pattern: str, rows: Iterable[Row]) -> str:
    place = pattern.split(".").index("*")
    return ranges(int(row.name.split(".")[place]) for row in rows)


def _extent(rule: str) -> Callable[[Row], str]:
    return lambda row: f"× {number(row.extent)}" if row.rule == rule else ""


_CELLS: Mapping[str, Callable[[Row], str]] = {
    "role": lambda row: row.role,
    "rule": lambda row: row.rule,
    "multiplier": lambda row: "" if row.multiplier == 1 else number(row.multiplier),
    "init": lambda row: law_in_brief(row.init),
    "lr": lambda row: number(row.lr),
    "decay": lambda row: number(row.weight_decay),
    "eps": lambda row: "" if row.rule in WITHOUT_EPS else number(row.eps),
    **{word: _extent(rule) for rule, word in WITH_EXTENT.items()},
}
