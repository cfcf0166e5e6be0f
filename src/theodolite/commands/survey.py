"""`theodolite survey` and `theodolite dissect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from theodolite.commands.options import (
    Depth,
    Roles,
    Width,
    WorkloadName,
    look_up,
    page_and_data,
    roles_of,
    sized,
)
from theodolite.commands.output import print_result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from theodolite.surveying import Survey

STYLES = {
    "fail": "bold red",
    "warn": "bold yellow",
    "note": "bold blue",
    "error": "bold magenta",
    "ok": "green",
}


def survey(
    workload: WorkloadName = "gpt-sotu",
    out: Annotated[Path, typer.Option(help="The page to write; the data go beside it as JSON.")] = Path(
        "survey.html"
    ),
    width: Width = None,
    depth: Depth = None,
    only: Annotated[list[str] | None, typer.Option(help="Run this section alone; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Skip this section; may be repeated.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Spend minutes instead of seconds, for better answers.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a check fails.")] = False,
    seed: Annotated[int, typer.Option(help="Of the batch and of the models.")] = 0,
    role: Roles = None,
) -> None:
    """Can this network be scaled, and what should be fixed first?

    Prints the findings, and writes one self-contained page.

    [bold]Examples[/bold]

      theodolite survey

      theodolite survey model.py:workload --width 512 --depth 8

      theodolite survey hf:config.json --only norms --out norms.html

      theodolite survey model.py:workload --strict      for a CI job
    """
    from rich.console import Console

    from theodolite.present.bar import Bar
    from theodolite.surveying import Survey
    from theodolite.surveying import survey as conduct

    save = page_and_data(out, Survey)
    chosen = look_up(workload)
    with Bar() as bar:
        made = conduct(
            chosen,
            size=sized(chosen.size, width, depth),
            only=only,
            skip=skip,
            deep=deep,
            seed=seed,
            roles=roles_of(role),
            progress=bar,
        )
    console = Console()
    console.print(_view(made))
    console.print(f"\n{save(made)}", style="dim", soft_wrap=True)
    if strict and made.at("fail"):
        raise typer.Exit(1)


def dissect(
    workload: WorkloadName,
    width: Width = None,
    depth: Depth = None,
    role: Roles = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What is in this network: the role, fans, block and branch of every tensor.

    [bold]Examples[/bold]

      theodolite dissect gpt-sotu

      theodolite dissect hf:config.json --json > anatomy.json
    """
    from theodolite.surveying import SurveyContext

    chosen = look_up(workload)
    context = SurveyContext(chosen, sized(chosen.size, width, depth), roles=roles_of(role))
    print_result(context.anatomy.to_json() if json else context.anatomy)


def _view(made: Survey) -> RenderableType:
    """The survey in colours: the verdict, then every finding, most serious first, with its remedy."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in made.ranked:
        sentence = Text(finding.sentence)
        if finding.remedy and finding.level != "ok":
            sentence.append(f"\n→ {finding.remedy}", "dim")
        table.add_row(Text(finding.level, STYLES[finding.level]), Text(finding.code, "dim"), sentence)
    return Group(Text(made.verdict, "bold"), Text(made.facts, "dim"), Text(), table)
