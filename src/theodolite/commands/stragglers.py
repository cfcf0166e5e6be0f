"""`theodolite stragglers`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from theodolite.commands.options import Json
from theodolite.commands.output import print_result
from theodolite.core.arguments import parse_number
from theodolite.core.errors import UseError


def stragglers(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A .csv table: a row for each round, a column for each worker."),
    ],
    overhead: Annotated[
        float | None,
        typer.Option(
            help="Share of a step that does not grow with a worker's examples; 0 by default.",
            show_default=False,
        ),
    ] = None,
    heavier: Annotated[
        Path | None,
        typer.Option(help="Times with more examples on each worker: the overhead follows from them."),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(
            help="With --heavier: how many times as many examples each worker had; 2 by default.",
            show_default=False,
        ),
    ] = None,
    sending: Annotated[
        float, typer.Option(help="Share of a step that grows with the gradients that a worker sends.")
    ] = 0.0,
    models: Annotated[int, typer.Option(help="Models that can be trained in turn.")] = 4,
    mu: Annotated[
        str | None,
        typer.Option(
            metavar="X,X,…",
            help="A worker may be late after (1 + μ) times the fastest one's time: the values to choose "
            "from; 0,0.1,0.25,0.5,1 by default.",
            show_default=False,
        ),
    ] = None,
    missing: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Stands for times that are not there: after how long a worker counts as lost.",
        ),
    ] = None,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Write a page with figures (stragglers.html), or .json or .csv.")
    ] = None,
) -> None:
    """Would backup workers or gradient coding have saved time?

    Reads step times that were measured with an equal share of the batch on each worker.

    Computes what waiting for all, leaving some out, backup workers and gradient coding would have taken.

    Parameters are chosen on the first half of the rounds and judged on the second.

    [bold]Examples[/bold]

      theodolite stragglers times.csv --overhead 0.7

      theodolite stragglers times.csv --heavier twice.csv --load 2 --models 1

      theodolite stragglers times.csv --missing 60 --out stragglers.html
    """
    from theodolite.fleet import StragglerReport, overhead_share
    from theodolite.fleet import stragglers as compare
    from theodolite.present.bar import Bar
    from theodolite.present.result import writable

    if out is not None:
        writable(out, StragglerReport.kind, (".html", ".json", ".csv"))  # refused before any work is done
    if overhead is not None and heavier is not None:
        raise UseError("--overhead and --heavier both say how much of a step is fixed: give one of the two")
    if load is not None and heavier is None:
        raise UseError(
            f"--load is {load:g}, and there are no times with more examples: give them as --heavier"
        )
    options: dict[str, Any] = {}
    if heavier is not None:
        overhead = overhead_share(file, heavier, 2.0 if load is None else load, missing=missing)
    if mu is not None:
        options["mu"] = [parse_number(text) for text in mu.split(",")]
    with Bar() as bar:
        found = compare(
            file,
            overhead=overhead or 0.0,
            sending=sending,
            models=models,
            missing=missing,
            progress=bar,
            **options,
        )
    print_result(found.to_json() if json else found, end="" if json else "\n")
    if out is not None:
        print(f"Written to {found.save(out)}", file=sys.stderr)
