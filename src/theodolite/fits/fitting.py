"""`fit`: a form by its name, on runs from a file, a ledger or rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from theodolite.core.arguments import one_of
from theodolite.core.errors import UseError
from theodolite.core.optional import needed
from theodolite.fits.allocation import allocation
from theodolite.fits.isoflop import isoflop
from theodolite.fits.laws import chinchilla, depth_expansion, power
from theodolite.fits.result import Fit
from theodolite.fleet.ledger import Ledger

Row = Mapping[str, Any]
ALIASES = {"loss": "held_out"}
"""What a ledger calls it, where a table has no column of the name."""
SETTINGS = ("workload", "optimizer", "parameterization", "lr", "weight_decay", "steps")
"""In which runs of one size and seed may differ; a law is about runs that do not."""


@dataclass(frozen=True)
class FormChoice:
    """A form that can be named: what fits it, from which columns, with which options of its own."""

    fit: Callable[..., Fit]
    needs: tuple[str, ...]
    """Columns besides the loss; `compute` stands in for one of parameters and tokens."""
    also: tuple[str, ...] = ()
    """Columns that it takes if they are there."""
    options: tuple[str, ...] = ()


FORMS: Mapping[str, FormChoice] = {
    "chinchilla": FormChoice(chinchilla, ("parameters", "tokens"), also=("compute",)),
    "power": FormChoice(power, ("x",), options=("offset",)),
    "isoflop": FormChoice(isoflop, ("parameters", "tokens"), also=("compute",), options=("budgets",)),
    "allocation": FormChoice(allocation, ("width", "depth"), also=("parameters",)),
    "depth-expansion": FormChoice(depth_expansion, ("depth",), options=("growth",)),
}


def fit(
    form: str,
    source: str | Path | Sequence[Row],
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    best: bool = False,
    **options: Any,
) -> Fit:
    """Fit a form to the runs of a CSV, a Parquet file, a ledger, or a sequence of rows.

    `columns` says what the source calls the columns that the form needs, `where` which rows count, and `best`
    that of runs of one size only the one of the lowest loss does. Further options are those of the form's own
    function: `drop_worst`, `draws`, `seed`, `progress`, and `offset`, `budgets` or `growth`.

    >>> rows = [{"N": 4.0**k, "loss": 2 + 2.0**-k} for k in range(1, 8)]
    >>> round(fit("power", rows, columns={"x": "N"}, draws=20)["alpha"].value, 4)
    0.5
    """
    choice = FORMS[one_of("form", form, FORMS)]
    for name in {name for other in FORMS.values() for name in other.options} & set(options):
        if name not in choice.options:
            having = next(other for other, one in FORMS.items() if name in one.options)
            raise UseError(f"{form} has no option {name}; {having} has. Leave it out")
    rows = read(source) if isinstance(source, str | Path) else list(source)
    if not rows:
        raise UseError(f"{form}: there are no rows. Give one for each run")
    wanted = (*choice.needs, *choice.also, "loss")
    table = select(rows, wanted, columns=columns, where=where, best=best)
    missing = [name for name in choice.needs if name not in table]
    if len(missing) > ("compute" in table):
        raise UseError(
            f"{form} needs a column {missing[0]}; there are {_listed(_names(rows))}. Say which it is: "
            f'--columns {missing[0]}="…", or columns={{"{missing[0]}": "…"}}'
        )
    return choice.fit(**table, **options)


def read(path: str | Path) -> list[Row]:
    """The rows of a CSV or Parquet file, or of a ledger, which may be named by its folder.

    Of a ledger only the runs that finished: the others have no loss.
    """
    path = Path(path).expanduser()
    readers = {".csv": _csv, ".parquet": _parquet, ".sqlite": _ledger, ".db": _ledger}
    if not path.exists():
        raise UseError(
            f"there is no file or folder {path}: give a CSV or Parquet table with one row for each run, or "
            "the file or folder of a ledger, such as --out of theodolite sweep"
        )
    if not path.is_dir() and path.suffix.lower() not in readers:
        raise UseError(
            f"{path}: a table ends in .csv or .parquet, a ledger in .sqlite or .db; "
            f"this ends in {path.suffix or path.name!r}. Rename it"
        )
    rows = (_ledger if path.is_dir() else readers[path.suffix.lower()])(path)
    if not rows:
        raise UseError(f"{path} has no rows of finished runs. Give one row for each run")
    return rows


def select(
    rows: Sequence[Row],
    wanted: Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    best: bool = False,
) -> dict[str, list[Any]]:
    """Of the wanted columns those that are there, by the names a fit gives them.

    `columns` says what the table calls them: {"parameters": "Model Size"}. `where` keeps the rows that have
    these values. `best` keeps, of rows that agree in all the wanted columns but the loss and in the seed, the
    one of the lowest loss: the best learning rate of each size. Without it such rows are refused if they
    differ in a setting, such as the learning rate.

    >>> rows = [{"N": 1, "held_out": 3.0, "lr": 1}, {"N": 1, "held_out": 2.5, "lr": 2}]
    >>> select(rows, ["x", "loss"], columns={"x": "N"}, best=True)
    {'x': [1.0], 'loss': [2.5]}
    """
    columns, present = columns or {}, _names(rows)
    for name, column in columns.items():
        if name not in wanted:
            raise UseError(f"this form has no {name}; it knows {', '.join(wanted)}")
        if column not in present:
            raise UseError(f"there is no column {column!r} for {name}; there are {_listed(present)}")
    names = {name: columns.get(name, name) for name in wanted}
    names |= {n: alias for n, alias in ALIASES.items() if names.get(n) not in present and alias in present}
    names = {name: column for name, column in names.items() if column in present}
    if "loss" not in names:
        raise UseError(
            f"there is no column loss; there are {_listed(present)}. Say which it is: "
            f'--columns loss="{present[-1]}", or columns={{"loss": "{present[-1]}"}}'
        )
    for name, value in (where or {}).items():
        if name not in present:
            raise UseError(f"where {name}={value}: there is no column {name!r}; there are {_listed(present)}")
        cells = [row.get(name) for row in rows]
        is_kept = [str(cell) == value or _cell(cell) == _cell(value) for cell in cells]
        if not any(is_kept):
            others = _listed(list(dict.fromkeys(map(str, cells))))
            raise UseError(f"where {name}={value}: no row is left; {name} is {others}")
        rows = [row for row, kept in zip(rows, is_kept, strict=True) if kept]
    loss = names["loss"]
    if best:
        rows = [min(each, key=lambda row: _number(row.get(loss), loss, row)) for each in _alike(rows, names)]
    else:
        _refuse_mixed(rows, names, present)
    return {name: [_number(row.get(column), column, row) for row in rows] for name, column in names.items()}


def _refuse_mixed(rows: Sequence[Row], names: Mapping[str, str], present: Sequence[str]) -> None:
    settings = [name for name in SETTINGS if name in present and name not in names.values()]
    for alike in _alike(rows, names):
        values = {name: list(dict.fromkeys(_cell(row.get(name)) for row in alike)) for name in settings}
        differ = {name: found for name, found in values.items() if len(found) > 1}
        if differ:
            same = [column for name, column in names.items() if name != "loss"] + ["seed"]
            shared = ", ".join(f"{name} {alike[0][name]}" for name in same if name in alike[0])
            said = "; ".join(f"{name} is {_listed(found)}" for name, found in differ.items())
            one = {name: str(found[0]) for name, found in differ.items()}
            pairs = ",".join(f"{name}={value}" for name, value in one.items())
            raise UseError(
                f"{len(alike)} runs have {shared}, and differ: {said}. A fit would mix them. Take the best "
                f"with --best (best=True), or some with --where {pairs} (where={one})"
            )


def _alike(rows: Sequence[Row], names: Mapping[str, str]) -> list[list[Row]]:
    """Rows that agree in all that is asked for but the loss, and in the seed."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (*(row.get(column) for name, column in names.items() if name != "loss"), row.get("seed"))
        found.setdefault(key, []).append(row)
    return list(found.values())


def _cell(value: Any) -> Any:
    """A number as such, however a table writes it."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _number(value: Any, column: str, row: Row) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        said = "empty" if value in (None, "") else repr(value)
        first = ", ".join(f"{key}={cell}" for key, cell in list(row.items())[:3])
        raise UseError(
            f"{column} is {said} in the row {first}: it must be a number. Correct it, or leave the row out"
        ) from None


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _csv(path: Path) -> list[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UseError(f"{path} cannot be read as CSV: {error}") from error


def _parquet(path: Path) -> list[Row]:
    parquet, pyarrow = needed("pyarrow.parquet"), needed("pyarrow")
    try:
        return list(parquet.read_table(path).to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise UseError(f"{path} cannot be read as Parquet: {error}") from error


def _ledger(path: Path) -> list[Row]:
    with Ledger.read(path) as ledger:
        return [row for row in ledger.rows() if row["status"] == "finished"]
