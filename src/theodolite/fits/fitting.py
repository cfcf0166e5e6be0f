"""`fit`: a form by its name, on runs from a file, a ledger or rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.fits.allocation import allocation
from theodolite.fits.chinchilla import chinchilla
from theodolite.fits.depth_expansion import depth_expansion
from theodolite.fits.isoflop import isoflop
from theodolite.fits.power import power
from theodolite.fits.reading import Row, read, select
from theodolite.fits.result import Fit


@dataclass(frozen=True)
class Choice:
    """A form that can be named: what fits it, from which columns, with which options of its own."""

    fit: Callable[..., Fit]
    columns: tuple[str, ...]
    options: tuple[str, ...] = ()


FORMS: Mapping[str, Choice] = {
    "chinchilla": Choice(chinchilla, ("parameters", "tokens", "compute", "loss")),
    "power": Choice(power, ("x", "loss"), options=("offset",)),
    "isoflop": Choice(isoflop, ("parameters", "tokens", "compute", "loss"), options=("budgets",)),
    "allocation": Choice(allocation, ("width", "depth", "parameters", "loss")),
    "depth-expansion": Choice(depth_expansion, ("depth", "loss"), options=("growth",)),
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
    if form not in FORMS:
        raise UseError(f"there is no form {form!r}; there are {', '.join(FORMS)}")
    choice = FORMS[form]
    for name in {name for other in FORMS.values() for name in other.options} & set(options):
        if name not in choice.options:
            having = next(other for other, one in FORMS.items() if name in one.options)
            raise UseError(f"{form} has no option {name}; {having} has. Leave it out")
    rows = read(source) if isinstance(source, str | Path) else list(source)
    if not rows:
        raise UseError(f"{form}: there are no rows. Give one for each run")
    table = select(rows, choice.columns, columns=columns, where=where, best=best)
    _refuse_missing(form, table, rows)
    return choice.fit(**table, **options)


def _refuse_missing(form: str, table: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Name the columns a form cannot do without, and those that are there."""
    if {"tokens", "compute"} <= set(FORMS[form].columns):
        missing = (
            [] if len({"parameters", "tokens", "compute"} & set(table)) >= 2 else ["parameters", "tokens"]
        )
        missing = [name for name in missing if name not in table]
    else:
        missing = [name for name in FORMS[form].columns if name not in (*table, "parameters")]
    if missing:
        there = ", ".join(map(repr, dict.fromkeys(key for row in rows for key in row)))
        say = f'--columns {missing[0]}="…", or columns={{"{missing[0]}": "…"}}'
        raise UseError(f"{form} needs a column {missing[0]}; there are {there}. Say which it is: {say}")
