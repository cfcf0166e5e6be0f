"""`theodolite lr`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from theodolite.commands.options import (
    Depth,
    Device,
    Json,
    Width,
    WorkloadName,
    look_up,
    number,
    page_and_data,
)
from theodolite.commands.output import print_result


def lr(
    workload: WorkloadName,
    optimizer: Annotated[
        str, typer.Option(help="adamw, sgd, muon-kimi, …: see docs/rules.md; or own, the workload's.")
    ] = "adamw",
    width: Width = None,
    depth: Depth = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of seeds, of initial weights and batches.")
    ] = 3,
    low: Annotated[float, typer.Option(parser=number, help="Lowest rate to try.")] = 1e-5,
    high: Annotated[float, typer.Option(parser=number, help="Highest rate to try.")] = 10.0,
    steps: Annotated[int, typer.Option(min=1, max=10**6, help="Training steps at each rate.")] = 20,
    device: Device = "cpu",
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="A page to write; its data go beside it as JSON.")
    ] = None,
) -> None:
    """Which learning rates lower the loss, and which lowers it most?

    Trains for a few steps at one rate, starts again from the same weights at a higher one, and so on until
    the loss rises. Prints an interval that all seeds agree on, and the best rate with its spread.

    This takes about fifteen short trainings for each seed. For the best rate of a long training, and whether
    it stays the best when the network grows, use theodolite sweep within this interval.

    Exits with 1 if no rate lowers the loss.

    [bold]Examples[/bold]

      theodolite lr mlp-mixture

      theodolite lr gpt-sotu --optimizer muon-kimi --width 64 --depth 2

      theodolite lr model.py:workload --optimizer own

      theodolite lr model.py:workload --steps 50 --seeds 5 --out lr.html

      theodolite lr model.py:workload --optimizer sgd --low 1e-3 --high 100 --device cuda
    """
    from theodolite.lr_finder import LrRange, find_lr
    from theodolite.present.bar import Bar

    save = None if out is None else page_and_data(out, LrRange)
    chosen, size = look_up(workload, width, depth)
    with Bar() as bar:
        found = find_lr(
            chosen,
            optimizer=optimizer,
            size=size,
            seeds=seeds,
            low=low,
            high=high,
            steps=steps,
            device=device,
            progress=bar,
        )
    print_result(found.to_json() if json else found)
    if save is not None:
        print(save(found), file=sys.stderr)
    if found.best is None:
        raise typer.Exit(1)
