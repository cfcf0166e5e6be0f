"""`theodolite study scale-vectors`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from theodolite_studies.commands.running_study import drawn


def study_scale_vectors(
    out: Annotated[Path, typer.Option(help="The folder of records and ledger; figures go there too.")] = Path(
        "scale-vectors"
    ),
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="plain, all, removed, peri, heterogeneous, both, direction, plain-256x8, all-256x8, "
            "plain-muon-kimi, all-muon-kimi or exact alone; may be repeated."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    engine: Annotated[str, typer.Option(help="auto, serial, processes, vectorised or ray.")] = "auto",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time; as many as there are cores.")
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="20 steps on the built-in text, two seeds: for a CPU.")
    ] = False,
    summary: Annotated[
        Path | None,
        typer.Option(help="Put all records into one small file, beside those it has; --draw can read it."),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run nothing: draw what a summary or a folder holds.")
    ] = None,
) -> None:
    """Do scale vectors help training, which of them may decay, and do three changes make them better?

    A byte-level GPT on enwik8, compared seed by seed; and the gradient flow of a scale vector, in float64.
    Makes what the folder does not hold yet, part by part in the order of their worth, so that it can be
    stopped and goes on where it was; then prints the claims and draws the figures.

    Exits with 1 if a run failed, with 130 after Ctrl-C.

    [bold]Examples[/bold]

      theodolite study scale-vectors --device cuda --part plain --part all

      theodolite study scale-vectors --part exact

      theodolite study scale-vectors --draw docs/studies/scale-vectors.jsonl
    """
    import dataclasses

    from theodolite.fleet.driver import check_engine
    from theodolite.fleet.engine import Resources
    from theodolite.present.bar import Bar
    from theodolite_studies.scale_vectors.report import report
    from theodolite_studies.scale_vectors.study import FULL, SMALL, make, write_summary

    if draw is not None:
        print(drawn(report, draw))
        if summary is not None:
            write_summary(draw, summary)
        return

    means = Resources(device=device)
    check_engine(engine, means)
    if jobs is not None:
        means = dataclasses.replace(means, jobs=jobs)
    made = make(
        out,
        setting=SMALL if small else FULL,
        parts=part or (),
        engine=engine,
        means=means,
        progress=Bar(),
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report(out))
    if small:
        print("\n--small has too few seeds and steps for a verdict: it shows how the study goes.")
    if summary is not None:
        write_summary(out, summary)
    if made is not None and not made.ok:
        raise typer.Exit(130 if made.stopped else 1)
