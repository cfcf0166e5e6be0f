"""`theodolite study norm-placement`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def study_norm_placement(
    out: Annotated[
        Path, typer.Option(help="The records, one line of JSON each; figures go beside the file.")
    ] = Path("norm-placement.jsonl"),
    device: Annotated[str, typer.Option(help="cpu, or cuda, which the processes share.")] = "cpu",
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes: on a GPU, one compiles while another computes.")
    ] = 1,
    small: Annotated[
        bool,
        typer.Option("--small", help="The built-in text, depths 4 and 12, 60 steps: for a CPU."),
    ] = False,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run nothing: draw what a file holds.")
    ] = None,
) -> None:
    """Norms before, after or around the branches: how do stream and gradients grow, and how stable is it?

    A byte-level GPT on enwik8 over depths 4 to 32 and six learning rates, with the plan and without. Runs
    what the file of records does not hold yet, the most telling cells first, so that it can be stopped and
    goes on where it was; then prints the claims and draws the figures from the file.

    Exits with 1 if a cell failed.

    [bold]Examples[/bold]

      theodolite study norm-placement --small

      theodolite study norm-placement --device cuda --jobs 3

      theodolite study norm-placement --draw docs/studies/norm-placement.jsonl
    """
    import dataclasses
    import functools

    from theodolite.studies.norm_placement import STUDY, run
    from theodolite.studies.study import conduct, report

    if draw is not None:
        print(report(STUDY, draw))
        return
    failed = conduct(
        dataclasses.replace(STUDY, run=functools.partial(run, device=device)),
        out,
        small=small,
        jobs=jobs,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report(STUDY, out))
    if small:
        print("\n--small has too few seeds and steps for a verdict: it shows how the study goes.")
    if failed:
        raise typer.Exit(1)
