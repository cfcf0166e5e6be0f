"""`theodolite study depth-expansion`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def study_depth_expansion(
    out: Annotated[
        Path, typer.Option(help="The records, one line of JSON each; figures go beside the file.")
    ] = Path("depth-expansion.jsonl"),
    device: Annotated[str, typer.Option(help="cpu, or cuda, which the processes share.")] = "cpu",
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes: on a GPU, one prepares while another computes.")
    ] = 1,
    small: Annotated[
        bool,
        typer.Option("--small", help="Computed images, depths 1 and 3, widths 2 and 8: for a CPU."),
    ] = False,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run nothing: draw what a file holds.")
    ] = None,
) -> None:
    """What is left of the signal for one more block as a network gets deeper, and does width help to see it?

    ResNets of 6n + 2 layers on CIFAR-10, n from 1 to 9 and 4 to 32 channels, trained on all images and to
    the end on some. Runs what the file of records does not hold yet, the most telling cells first, so that it
    can be stopped and goes on where it was; then prints the claims and draws the figures from the file.

    Exits with 1 if a cell failed.

    [bold]Examples[/bold]

      theodolite study depth-expansion --small

      theodolite study depth-expansion --device cuda --jobs 3

      theodolite study depth-expansion --draw docs/studies/depth-expansion.jsonl
    """
    import dataclasses
    import functools

    from theodolite.studies.depth_expansion import STUDY, run
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
