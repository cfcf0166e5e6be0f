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
    from theodolite.planning.planner import Covers
    from theodolite.rules import Policy
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
study_app = typer.Typer(no_args_is_help=True, help="Claims of the papers, run again.")
app.add_typer(study_app, name="study")

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

      theodolite plan gpt-sotu --width 1024 --lr 0.004    how to train it eight times as wide

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
    from theodolite.surveying import survey as conduct
    from theodolite.writing import html_path

    html_path(out)
    chosen = _look_up(workload)
    with _progress() as tell:
        made = conduct(
            chosen,
            size=_size(chosen.size, width, depth),
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
    anatomy = Site(chosen, _size(chosen.size, width, depth), roles=_roles(role)).anatomy
    print(anatomy.to_json() if json else anatomy)


@app.command()
def plan(
    workload: WorkloadName,
    width: Annotated[
        int | None, typer.Option(help="To plan for; the workload's or the config's own if not given.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="The same for the depth.")] = None,
    base_width: Annotated[
        int | None,
        typer.Option(
            help="At which lr and the rest are right; the workload's own, or a small one of a config."
        ),
    ] = None,
    base_depth: Annotated[int | None, typer.Option(help="The same for the depth.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, muon-kimi, …: see docs/rules.md.")] = "adamw",
    lr: Annotated[float | None, typer.Option(help="Learning rate at base size.", show_default=False)] = None,
    weight_decay: Annotated[float, typer.Option(help="Weight decay at base size.")] = 0.0,
    eps: Annotated[float | None, typer.Option(help="eps at base size; the optimizer's usual one.")] = None,
    decay: Annotated[str, typer.Option(help="How weight decay scales: paper, independent, none.")] = "paper",
    covers: Annotated[
        str, typer.Option(help="Weights that a matrix optimizer trains: hidden or all. The rest gets AdamW.")
    ] = "hidden",
    vector_lr: Annotated[
        float | None, typer.Option(help="Base lr of what a matrix optimizer leaves to AdamW.")
    ] = None,
    init: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=STD", help="Std at base size, not the network's own; may be repeated."),
    ] = None,
    role: Roles = None,
    explain: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print where the numbers of one tensor come from.")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Print what differs from a saved plan.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Save the plan here, for Plan.load.")] = None,
) -> None:
    """Which init, learning rate, decay and eps does every tensor need at another size?

    Tune at a small base size, plan for the large one.

    [bold]Examples[/bold]

      theodolite plan gpt-sotu --width 1024 --depth 16 --lr 0.004

      theodolite plan model.py:workload --width 1024 --lr 0.004 --weight-decay 0.1 --out plan.json

      theodolite plan hf:config.json --base-width 256 --base-depth 4 --lr 0.004 --optimizer muon-kimi

      theodolite plan gpt-sotu --width 1024 --lr 0.004 --explain readout.weight

      theodolite plan gpt-sotu --width 2048 --lr 0.004 --diff plan.json
    """
    from theodolite.planning import Plan
    from theodolite.planning import plan as make
    from theodolite.planning.storing import plan_path, to_json
    from theodolite.surveying import Site

    chosen = _look_up(workload)
    size = _size(_own_size(workload, chosen), width, depth)
    base = _size(chosen.size, base_width, base_depth)
    if size == base:
        raise UseError(
            f"from {base} to {size} there is nothing to plan. Give --width or --depth to plan for, or "
            "--base-width or --base-depth to plan from"
        )
    if lr is None:
        raise UseError(f"--lr is missing: give the learning rate that is right at base size {base}")
    other = Plan.load(diff) if diff else None
    if out is not None:
        plan_path(out)  # refused before any work is done
    made = make(
        chosen.build,
        Site(chosen, size).inputs,
        size=size,
        base=base,
        optimizer=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        decay=cast("Policy", decay),
        covers=cast("Covers", covers),
        vector_lr=vector_lr,
        init=_stds(init),
        roles=_roles(role),
    )
    if json:
        print(to_json(made), end="")
    elif explain is not None:
        print(made.explain(explain))
    else:
        print(made if other is None else other.diff(made))
    if out is not None:
        print(f"The plan is {made.save(out)}", file=sys.stderr)


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


@study_app.command("coordinates")
def study_coordinates(
    out: Annotated[
        Path, typer.Option(help="The records, one line of JSON for each run; figures go beside it.")
    ] = Path("coordinates.jsonl"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, or cuda, which the processes share.")] = "cpu",
    network: Annotated[
        list[str] | None, typer.Option(help="One of the study's networks alone; may be repeated.")
    ] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="adamw or muon-kimi alone; may be repeated.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Widths up to 192 and depths up to 8.")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="Run nothing: draw what the file holds.")] = False,
) -> None:
    """Do stream, branches and logits keep their size from width 64 to 1024 and from depth 2 to 32?

    Runs what the file of records does not hold yet, so that it goes on where it was stopped; then prints the
    claims and draws the figures from the file.

    [bold]Examples[/bold]

      theodolite study coordinates --small --network gpt-pre --optimizer adamw

      theodolite study coordinates --jobs 14 --device cuda

      theodolite study coordinates --out docs/studies/coordinates.jsonl --draw
    """
    from theodolite.studies import reporting
    from theodolite.studies.coordinates import FULL, OPTIMIZERS, SMALL, conduct
    from theodolite.studies.networks import NETWORKS

    if not draw:
        conduct(
            out,
            grid=SMALL if small else FULL,
            networks=network or tuple(NETWORKS),
            optimizers=optimizer or OPTIMIZERS,
            jobs=jobs,
            device=device,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(reporting.report(out))


def _look_up(name: str) -> Workload:
    from theodolite.workloads import workload

    return workload(name)


def _size(usual: Size, width: int | None, depth: int | None) -> Size:
    given = {key: value for key, value in (("width", width), ("depth", depth)) if value is not None}
    return dataclasses.replace(usual, **given)


def _own_size(name: str, workload: Workload) -> Size:
    """The size one would train: that of a config, where there is one, and not the small one to look at."""
    if not name.startswith("hf:"):
        return workload.size
    from theodolite.workloads.hugging_face import config_size

    return config_size(name.removeprefix("hf:"))


def _roles(given: list[str] | None) -> dict[str, Role] | None:
    pairs = [text.rpartition("=") for text in given or ()]
    for text, (pattern, _, _) in zip(given or (), pairs, strict=True):
        if not pattern:
            raise UseError(f"--role {text}: write PATTERN=ROLE, for example --role 'blocks.*.scale=gain'")
    return {pattern: cast("Role", role) for pattern, _, role in pairs} or None


def _stds(given: list[str] | None) -> dict[str, float] | None:
    found = {}
    for text in given or ():
        pattern, _, std = text.rpartition("=")
        try:
            found[pattern] = float(std)
        except ValueError:
            pattern = ""
        if not pattern:
            raise UseError(f"--init {text}: write PATTERN=STD, for example --init 'embed.*=0.02'")
    return found or None


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
