"""`theodolite study`: runs the studies of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from theodolite.core.errors import UseError

GROUP = "theodolite.studies"
"""The group of entry points. Each is a function that typer makes a command of."""
MISSING = "No studies are installed. In a clone of the repository: pip install -e studies"


def installed() -> dict[str, EntryPoint]:
    """The entry points of all studies, by name."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


class Studies(TyperGroup):
    """The command group. A study is imported when it is asked for.

    The types of a context and a command are those of click or, since typer 0.20 or so, of typer itself.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(installed())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One study as a command."""
        if (entry := installed().get(cmd_name)) is None:
            return None
        app = typer.Typer(rich_markup_mode="rich")
        app.command(cmd_name)(_loaded(entry))
        return typer.main.get_command(app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Say how to install the studies where there are none."""
        if not installed():
            ctx.fail(MISSING)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The same below `--help`."""
        super().format_help(ctx, formatter)
        if not installed():
            formatter.write_text(MISSING)


def _loaded(entry: EntryPoint) -> Callable[..., None]:
    """The function of a study. If its package cannot be imported, one that says so: the others still work."""
    try:
        return entry.load()
    except Exception as error:
        why = f"{entry.value} cannot be imported ({type(error).__name__}: {error})"

        def command() -> None:
            raise UseError(f"study {entry.name}: {why}. Repair or uninstall the package that provides it")

        command.__doc__ = f"Not available: {why}"
        return command


study_app = typer.Typer(cls=Studies, no_args_is_help=True, help="Claims of the papers, run again.")


@study_app.callback()
def _study() -> None:
    """Claims of the papers, run again."""
