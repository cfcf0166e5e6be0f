"""`theodolite data`."""

from __future__ import annotations

from typing import Annotated

import typer

data_app = typer.Typer(no_args_is_help=True, help="List the data sets, fetch one, print its path.")


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and which of them are on this machine."""
    from theodolite import data
    from theodolite.present.text import Table

    rows = [
        (source.name, "yes" if data.present(source.name) else "no", source.what, source.licence)
        for source in data.catalogue()
    ]
    print(Table(("name", "here", "what", "licence"), rows))


@data_app.command("fetch")
def data_fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See: data list.")],
) -> None:
    """Fetch data sets into the data folder, unless they are there already."""
    from theodolite import data
    from theodolite.present.bar import Bar

    for name in names:
        with Bar() as bar:
            found = data.fetch(name, progress=bar)
        print(found)


@data_app.command("path")
def data_path(name: Annotated[str, typer.Argument(metavar="NAME", help="See: data list.")]) -> None:
    """Print the path of a data set on this machine."""
    from theodolite import data

    print(data.path(name))
