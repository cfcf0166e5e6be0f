"""`theodolite study norm-placement`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite_studies.commands.running_study import RECORDS, Device, Draw, Jobs, carry_out


def study_norm_placement(
    out: Annotated[Path, typer.Option(help=RECORDS)] = Path("norm-placement.jsonl"),
    device: Device = "cpu",
    jobs: Jobs = 1,
    small: Annotated[
        bool,
        typer.Option("--small", help="The built-in text, depths 4 and 12, 60 steps: for a CPU."),
    ] = False,
    draw: Draw = None,
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
    from theodolite_studies.norm_placement.study import STUDY

    carry_out(STUDY, out, device=device, jobs=jobs, small=small, draw=draw)
