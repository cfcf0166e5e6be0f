"""`theodolite data`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

data_app = typer.Typer(no_args_is_help=True, help="The data sets: which there are, fetch one, where it lies.")


@data_app.command("list")
def data_list() -> None:
    """The data sets, and which of them are on this machine."""
    from rich.console import Console
    from rich.table import Table

    from theodolite import data

    table = Table(box=None, pad_edge=False)
    for column in ("name", "here", "what", "licence"):
        table.add_column(column, no_wrap=column in ("name", "here"))
    for source in data.catalogue():
        table.add_row(source.name, "yes" if data.present(source.name) else "no", source.what, source.licence)
    Console().print(table)


@data_app.command("fetch")
def data_fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See: data list.")],
) -> None:
    """Bring data sets into the data folder; what is there already is left alone."""
    from theodolite import data

    for name in names:
        print(data.fetch(name, progress=sys.stderr.isatty()))


@data_app.command("path")
def data_path(name: Annotated[str, typer.Argument(metavar="NAME", help="See: data list.")]) -> None:
    """Where a data set lies on this machine."""
    from theodolite import data

    print(data.path(name))
