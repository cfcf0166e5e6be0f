"""`theodolite study growing`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def study_growing(
    out: Annotated[
        Path, typer.Option(help="The records, one line of JSON each; figures go beside the file.")
    ] = Path("growing.jsonl"),
    part: Annotated[
        list[str] | None,
        typer.Option(help="growing, ranking, coverage or envelope alone; may be repeated."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda, which the processes share; coverage is always on the CPU.")
    ] = "cpu",
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes: on a GPU, one compiles while another computes.")
    ] = 1,
    small: Annotated[
        bool, typer.Option("--small", help="The built-in text, two blocks, some 40 steps: for a CPU.")
    ] = False,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run nothing: draw what a file holds.")
    ] = None,
) -> None:
    """Blocks where the signal is strongest: are they better than elsewhere, and can a certificate be trusted?

    A byte-level GPT on enwik8 that is grown in several ways at equal compute; the rank correlation of the
    signal with what a block gains; how often certificates are wrong on a problem whose truth is known; and
    the power law of successive growths. Runs what the file of records does not hold yet, the most telling
    cells first, so that it can be stopped and goes on where it was; then prints the claims and draws the
    figures.

    Exits with 1 if a cell failed.

    [bold]Examples[/bold]

      theodolite study growing --small

      theodolite study growing --device cuda --jobs 3 --part growing --part ranking

      theodolite study growing --draw docs/studies/growing.jsonl
    """
    import dataclasses
    import functools

    from theodolite.errors import UseError
    from theodolite.studies.growing import STUDY, cells, run
    from theodolite.studies.growing_claims import PARTS
    from theodolite.studies.study import conduct, report

    for name in part or ():
        if name not in PARTS:
            raise UseError(f"the study has no part {name!r}: it has {', '.join(PARTS)}")
    if draw is not None:
        print(report(STUDY, draw))
        return
    failed = conduct(
        dataclasses.replace(
            STUDY,
            cells=lambda small: [cell for cell in cells(small) if not part or cell["part"] in part],
            run=functools.partial(run, device=device),
        ),
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
