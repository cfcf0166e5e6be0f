"""`theodolite study depth-expansion`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite_studies.commands.running_study import RECORDS, Device, Draw, Jobs, carry_out


def study_depth_expansion(
    out: Annotated[Path, typer.Option(help=RECORDS)] = Path("depth-expansion.jsonl"),
    device: Device = "cpu",
    jobs: Jobs = 1,
    small: Annotated[
        bool,
        typer.Option("--small", help="Computed images, depths 1 and 3, widths 2 and 8: for a CPU."),
    ] = False,
    draw: Draw = None,
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
    from theodolite_studies.depth_expansion.study import STUDY

    carry_out(STUDY, out, device=device, jobs=jobs, small=small, draw=draw)
