"""`theodolite survey` and `theodolite dissect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.commands.options import (
    Depth,
    HorizonRule,
    Json,
    Page,
    Roles,
    To,
    Width,
    WorkloadName,
    look_up,
    page_and_data,
    roles_of,
    target_of,
)
from theodolite.commands.output import print_result

STYLES = {"fail": "red", "warn": "yellow", "note": "blue", "error": "magenta", "ok": "green"}


def survey(
    workload: WorkloadName = "gpt-sotu",
    out: Page = Path("survey.html"),
    width: Width = None,
    depth: Depth = None,
    only: Annotated[list[str] | None, typer.Option(help="Run this section alone; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Skip this section; may be repeated.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Spend minutes instead of seconds, for better answers.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a check fails.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the batch and of all models.")] = 0,
    role: Roles = None,
    to: To = None,
    horizon: HorizonRule = "none",
) -> None:
    """Can this network be scaled, and what should be fixed first?

    Prints the findings, and writes one self-contained page.

    [bold]Examples[/bold]

      theodolite survey

      theodolite survey model.py:workload --width 512 --depth 8

      theodolite survey hf:config.json --only norms --out norms.html

      theodolite survey model.py:workload --strict      for a CI job

      theodolite survey model.py:workload --to width=1024,batch=512,tokens=2e9 --horizon sde
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from theodolite.present.bar import Bar
    from theodolite.surveying import Survey
    from theodolite.surveying import survey as conduct

    save = page_and_data(out, Survey)
    chosen, size = look_up(workload, width, depth)
    with Bar() as bar:
        made = conduct(
            chosen,
            size=size,
            only=only,
            skip=skip,
            deep=deep,
            seed=seed,
            roles=roles_of(role),
            to=target_of(to, size),
            horizon=horizon,
            progress=bar,
        )
    table = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(), padding=(0, 2))
    for finding in made.ranked:
        sentence = Text(finding.sentence)
        if finding.remedy and finding.level != "ok":
            sentence.append(f"\n→ {finding.remedy}", "dim")
        level = Text(finding.level, f"bold {STYLES[finding.level]}")
        table.add_row(level, Text(finding.code, "dim"), sentence)
    console = Console()
    console.print(Text(made.verdict, "bold"), Text(made.facts, "dim"), Text(), table, sep="\n")
    console.print(f"\n{save(made)}", style="dim", soft_wrap=True)
    if strict and made.at("fail"):
        raise typer.Exit(1)


def dissect(
    workload: WorkloadName,
    width: Width = None,
    depth: Depth = None,
    role: Roles = None,
    json: Json = False,
) -> None:
    """What is in this network: the role, fans, block and branch of every tensor.

    [bold]Examples[/bold]

      theodolite dissect gpt-sotu

      theodolite dissect hf:config.json --json > anatomy.json
    """
    from theodolite.surveying import SurveyContext

    anatomy = SurveyContext(*look_up(workload, width, depth), roles=roles_of(role)).anatomy
    print_result(anatomy.to_json() if json else anatomy)
