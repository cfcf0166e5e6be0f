"""What the commands of studies with cells have in common: run what is missing, or draw what is there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from theodolite.studies.study import Study

Device = Annotated[str, typer.Option(help="cpu, or cuda, which the processes share.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes: on a GPU, one prepares while another computes.")]
Draw = Annotated[Path | None, typer.Option(metavar="FILE", help="Run nothing: draw what a file holds.")]
RECORDS = "The records, one line of JSON each; figures go beside the file."


def carry_out(
    study: Study, out: Path, *, device: str | None = None, jobs: int, small: bool, draw: Path | None
) -> None:
    """Run the cells that the file does not hold yet, and print the claims; or only draw.

    `device` is for the studies that are told one.

    Exits with 1 if a cell failed.
    """
    import dataclasses
    import functools

    from theodolite.studies.study import conduct, report

    if draw is not None:
        print(report(study, draw))
        return
    run: Callable[..., Any] = study.run
    failed = conduct(
        study if device is None else dataclasses.replace(study, run=functools.partial(run, device=device)),
        out,
        small=small,
        jobs=jobs,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report(study, out))
    if small:
        print("\n--small has too few seeds and steps for a verdict: it shows how the study goes.")
    if failed:
        raise typer.Exit(1)
