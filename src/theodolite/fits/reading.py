"""Runs from a file or from rows: which columns a fit needs, and which rows count."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError

Row = Mapping[str, Any]
ALIASES = {"loss": "held_out"}
"""What a ledger calls it, where a table has no column of the name."""
SETTINGS = ("workload", "optimizer", "parameterization", "lr", "weight_decay", "steps")
"""In which runs of one size and seed may differ; a law is about runs that do not."""


def read(path: str | Path) -> list[Row]:
    """The rows of a CSV or Parquet file, or of a ledger, which may be named by its folder.

    Of a ledger only the runs that finished: the others have no loss.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _filled(path, _ledger(path))
    if not path.exists():
        raise UseError(
            f"there is no file or folder {path}: give a CSV or Parquet table with one row for each run, or "
            "the file or folder of a ledger, such as --out of theodolite sweep"
        )
    readers = {".csv": _csv, ".parquet": _parquet, ".sqlite": _ledger, ".db": _ledger}
    if path.suffix.lower() not in readers:
        raise UseError(
            f"{path}: a table ends in .csv or .parquet, a ledger in .sqlite or .db; "
            f"this ends in {path.suffix or path.name!r}. Rename it"
        )
    return _filled(path, readers[path.suffix.lower()](path))


def select(
    rows: Sequence[Row],
    wanted: Iterable[str],
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
    wanted, columns = tuple(wanted), columns or {}
    present = list(dict.fromkeys(key for row in rows for key in row))
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
    rows = _matching(rows, where or {}, present)
    if best:
        rows = _best(rows, names)
    else:
        _refuse_mixed(rows, names, present)
    return {name: [_number(row.get(column), column, row) for row in rows] for name, column in names.items()}


def _filled(path: Path, rows: list[Row]) -> list[Row]:
    if not rows:
        raise UseError(
            f"{path} has no rows of finished runs: there is nothing to fit. Give one row for each run"
        )
    return rows


def _matching(rows: Sequence[Row], where: Mapping[str, str], present: Sequence[str]) -> Sequence[Row]:
    for name, value in where.items():
        if name not in present:
            raise UseError(f"where {name}={value}: there is no column {name!r}; there are {_listed(present)}")
        kept = [row for row in rows if _equal(row.get(name), value)]
        if not kept:
            others = _listed(list(dict.fromkeys(str(row.get(name)) for row in rows)))
            raise UseError(f"where {name}={value}: no row is left; {name} is {others}")
        rows = kept
    return rows


def _best(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    loss = names["loss"]
    return [min(alike, key=lambda row: _number(row.get(loss), loss, row)) for alike in _alike(rows, names)]


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


def _equal(found: Any, value: str) -> bool:
    if str(found) == value:
        return True
    try:
        return float(found) == float(value)
    except (TypeError, ValueError):
        return False


def _number(value: Any, column: str, row: Row) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        said = "empty" if value in (None, "") else repr(value)
        first = ", ".join(f"{key}={cell}" for key, cell in list(row.items())[:3])
        raise UseError(
            f"{column} is {said} in the row {first}: it must be a number. Mend it, or leave the row out"
        ) from None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _csv(path: Path) -> list[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UseError(f"{path} cannot be read as CSV: {error}") from error


def _parquet(path: Path) -> list[Row]:
    from theodolite.fleet.optional import needed

    parquet, pyarrow = needed("pyarrow.parquet"), needed("pyarrow")
    try:
        return list(parquet.read_table(path).to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise UseError(f"{path} cannot be read as Parquet: {error}") from error


def _ledger(path: Path) -> list[Row]:
    from theodolite.fleet.ledger import Ledger

    with Ledger.read(path) as ledger:
        return [row for row in ledger.rows() if row["status"] == "finished"]
