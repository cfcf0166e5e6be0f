"""`theodolite study growing`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite_studies.commands.running_study import RECORDS, Draw, Jobs, carry_out


def study_growing(
    out: Annotated[Path, typer.Option(help=RECORDS)] = Path("growing.jsonl"),
    part: Annotated[
        list[str] | None,
        typer.Option(help="growing, ranking, coverage or envelope alone; may be repeated."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda, which the processes share; coverage is always on the CPU.")
    ] = "cpu",
    jobs: Jobs = 1,
    small: Annotated[
        bool, typer.Option("--small", help="The built-in text, two blocks, some 40 steps: for a CPU.")
    ] = False,
    draw: Draw = None,
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

    from theodolite.core.errors import UseError
    from theodolite_studies.growing.claims import PARTS
    from theodolite_studies.growing.study import STUDY, cells

    for name in part or ():
        if name not in PARTS:
            raise UseError(f"the study has no part {name!r}: it has {', '.join(PARTS)}")
    chosen = dataclasses.replace(
        STUDY, cells=lambda small: [cell for cell in cells(small) if not part or cell["part"] in part]
    )
    carry_out(chosen, out, device=device, jobs=jobs, small=small, draw=draw)
