"""`theodolite study`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

study_app = typer.Typer(no_args_is_help=True, help="Claims of the papers, run again.")


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
