"""`theodolite survey` and `theodolite dissect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.commands.options import (
    Depth,
    Roles,
    Width,
    WorkloadName,
    look_up,
    roles_of,
    sized,
)
from theodolite.commands.output import print_result


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

    from theodolite.core.files import html_path
    from theodolite.present.bar import Bar
    from theodolite.surveying import survey as conduct
    from theodolite.surveying.terminal import view

    html_path(out)
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
    console.print(view(made))
    page = made.save(out)
    console.print(
        f"\nThe page is {page}, the same as data {page.with_suffix('.json')}", style="dim", soft_wrap=True
    )
    if strict and made.at("fail"):
        raise typer.Exit(1)


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

    chosen = look_up(workload)
    anatomy = Site(chosen, sized(chosen.size, width, depth), roles=roles_of(role)).anatomy
    print_result(anatomy.to_json() if json else anatomy)
