"""The command line. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

import theodolite
from theodolite.errors import UseError

if TYPE_CHECKING:
    from theodolite.anatomy.part import Role
    from theodolite.size import Size
    from theodolite.workloads import Workload

app = typer.Typer(
    name="theodolite",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(no_args_is_help=True, help="The data sets: which there are, fetch one, where it lies.")
app.add_typer(data_app, name="data")

WorkloadName = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD", help="A built-in name, file.py:name, or hf:config.json.", show_default=True
    ),
]
Width = Annotated[int | None, typer.Option(help="Width to look at; the workload's own if not given.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role", metavar="PATTERN=ROLE", help="What tensors are that cannot be classified; may be repeated."
    ),
]
Depth = Annotated[int | None, typer.Option(help="Depth to look at; the workload's own if not given.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error of use is one message and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no × or √ shows ? in their place
    try:
        app(args=None if arguments is None else list(arguments), prog_name="theodolite")
    except UseError as error:
        print(f"theodolite: {error}", file=sys.stderr)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"theodolite {theodolite.__version__}")
        raise typer.Exit


@app.callback()
def _theodolite(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Survey a neural network before somebody pays to make it bigger.

    [bold]Examples[/bold]

      theodolite survey                      the built-in GPT on built-in text

      theodolite survey model.py:workload    yours

      theodolite survey hf:config.json       a Hugging Face config

      theodolite dissect gpt-sotu            what every tensor is

      theodolite data list                   data sets, and which are here
    """


@app.command()
def survey(
    workload: WorkloadName = "gpt-sotu",
    out: Annotated[Path, typer.Option(help="The page; the same as JSON goes beside it.")] = Path(
        "survey.html"
    ),
    width: Width = None,
    depth: Depth = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Examine this section alone; may be repeated.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this section out; may be repeated.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Spend minutes where seconds give a rougher answer.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a finding says fail.")] = False,
    seed: Annotated[int, typer.Option(help="Of the batch and of the models that are built.")] = 0,
    role: Roles = None,
) -> None:
    """Is this network fit to be scaled, and what is wrong with it?

    Prints the findings, and writes one self-contained page.

    [bold]Examples[/bold]

      theodolite survey

      theodolite survey model.py:workload --width 512 --depth 8

      theodolite survey hf:config.json --only norms --out norms.html

      theodolite survey model.py:workload --strict      for a CI job
    """
    from rich.console import Console

    from theodolite.report.terminal import view
    from theodolite.report.writing import html_path
    from theodolite.surveying import survey as conduct

    html_path(out)
    chosen = _look_up(workload)
    with _progress() as tell:
        made = conduct(
            chosen,
            size=_size(chosen, width, depth),
            only=only,
            skip=skip,
            deep=deep,
            seed=seed,
            roles=_roles(role),
            progress=tell,
        )
    console = Console()
    console.print(view(made))
    page = made.save(out)
    console.print(
        f"\nThe page is {page}, the same as data {page.with_suffix('.json')}", style="dim", soft_wrap=True
    )
    if strict and made.at("fail"):
        raise typer.Exit(1)


@app.command()
def dissect(
    workload: WorkloadName,
    width: Width = None,
    depth: Depth = None,
    role: Roles = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What is in this network: every tensor's role, fans, block and branch.

    [bold]Examples[/bold]

      theodolite dissect gpt-sotu

      theodolite dissect hf:config.json --json > anatomy.json
    """
    from theodolite.surveying import Site

    chosen = _look_up(workload)
    anatomy = Site(chosen, _size(chosen, width, depth), roles=_roles(role)).anatomy
    print(anatomy.to_json() if json else anatomy)


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


def _look_up(name: str) -> Workload:
    from theodolite.workloads import workload

    return workload(name)


def _size(workload: Workload, width: int | None, depth: int | None) -> Size:
    given = {key: value for key, value in (("width", width), ("depth", depth)) if value is not None}
    return dataclasses.replace(workload.size, **given)


def _roles(given: list[str] | None) -> dict[str, Role] | None:
    pairs = [text.rpartition("=") for text in given or ()]
    for text, (pattern, _, _) in zip(given or (), pairs, strict=True):
        if not pattern:
            raise UseError(f"--role {text}: write PATTERN=ROLE, for example --role 'blocks.*.scale=gain'")
    return {pattern: cast("Role", role) for pattern, _, role in pairs} or None


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None] | None]:
    """A bar on standard error while something goes on; nothing where that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def tell(title: str, done: float) -> None:
            bar.update(task, description=title, completed=done)

        yield tell
