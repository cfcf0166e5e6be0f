"""`theodolite lr`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from theodolite.commands.options import Depth, Width, WorkloadName, look_up, sized
from theodolite.commands.output import print_result


def lr(
    workload: WorkloadName,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, muon-kimi, …: see docs/rules.md.")] = "adamw",
    width: Width = None,
    depth: Depth = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How many: initial weights and batches.")] = 3,
    low: Annotated[float, typer.Option(help="The lowest rate that is tried.")] = 1e-5,
    high: Annotated[float, typer.Option(help="The highest.")] = 10.0,
    steps: Annotated[int, typer.Option(min=1, max=10**6, help="At each rate.")] = 20,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="Write a page here; the same as JSON beside it.")
    ] = None,
) -> None:
    """Between which learning rates does training go forward, and where does it go farthest?

    Trains for a few steps at one rate, begins again from the same weights at a higher one, and so on until
    the loss rises. Prints an interval that all seeds agree on, and the best rate with its spread.

    It takes about fifteen short trainings for each seed. For the rate of a long training, and for what
    becomes of it when the network grows, use theodolite sweep within this interval.

    Exits with 1 if no rate lowers the loss.

    [bold]Examples[/bold]

      theodolite lr mlp-mixture

      theodolite lr gpt-sotu --optimizer muon-kimi --width 64 --depth 2

      theodolite lr model.py:workload --steps 50 --seeds 5 --out lr.html

      theodolite lr model.py:workload --optimizer sgd --low 1e-3 --high 100 --device cuda
    """
    from theodolite.lr_finder import LrRange, find_lr
    from theodolite.present.bar import Bar
    from theodolite.present.result import writable

    if out is not None:  # refuse before any work is done
        writable(out, LrRange.kind, (".html",))
        writable(out.with_suffix(".json"), LrRange.kind, (".json",))
    chosen = look_up(workload)
    with Bar() as bar:
        found = find_lr(
            chosen,
            optimizer=optimizer,
            size=sized(chosen.size, width, depth),
            seeds=seeds,
            low=low,
            high=high,
            steps=steps,
            device=device,
            progress=bar,
        )
    print_result(found.to_json() if json else found)
    if out is not None:
        page, data = found.save(out), found.save(out.with_suffix(".json"))
        print(f"The page is {page}, the same as data {data}", file=sys.stderr)
    if found.best is None:
        raise typer.Exit(1)
