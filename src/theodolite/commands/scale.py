"""`theodolite scale`."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from theodolite.commands.options import Device, Json, WorkloadName, look_up, number, parsed, target_of
from theodolite.commands.output import print_result
from theodolite.core.arguments import is_number
from theodolite.core.errors import UseError


def scale(
    workload: WorkloadName,
    to: Annotated[
        str,
        typer.Option(
            metavar="NAME=N,…",
            help="The target: width=1024,depth=16,batch=512,tokens=2e9. Without tokens it has 4000 steps.",
        ),
    ],
    budget: Annotated[
        str, typer.Option(metavar="PERCENT", help="Part of the target's FLOP for all small runs.")
    ] = "3%",
    base: Annotated[
        str | None,
        typer.Option(metavar="width=N,depth=N", help="The smallest network; up to 8 × 4 times smaller."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, muon-kimi, …: see docs/rules.md.")] = "adamw",
    lr: Annotated[
        str | None,
        typer.Option(metavar="LOW:HIGH", help="Learning rates to try at the base; 2^-9:2^-4 by default."),
    ] = None,
    weight_decay: Annotated[float, typer.Option(parser=number, help="Weight decay at the base.")] = 0.0,
    schedule: Annotated[
        str,
        typer.Option(help="wsd (runs of several lengths share their beginning), cosine, linear, constant."),
    ] = "wsd",
    tflops: Annotated[
        float | None, typer.Option(help="Achieved TFLOP/s where the target will be trained, for its hours.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of everything that is made.")] = Path("scale"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run and how long it takes, and stop.")
    ] = False,
    engine: Annotated[str, typer.Option(help="auto, serial, processes or vectorised.")] = "auto",
    device: Device = "cpu",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; one per core.")] = None,
    json: Json = False,
) -> None:
    """From a small network to the launch of a large one: survey, learning rate, transfer, forecast, plan.

    Says what it will run and how long that takes. Then it surveys the network, finds the best learning
    rate at the smallest size and how it follows the number of tokens (and the batch, if the target's is
    larger), checks that it holds for larger networks, fits a law to planned runs, and forecasts the loss of
    the target. It ends with the launch sheet: one page with verdict, learning rate, forecast, risks,
    commands and the plan of every tensor.

    The same command goes on where it was stopped.

    [bold]Examples[/bold]

      theodolite scale gpt-sotu --to width=256,depth=4 --budget 5%

      theodolite scale model.py:workload --to width=1024,depth=16,batch=512,tokens=2e9 --tflops 400

      theodolite scale model.py:workload --to width=1024,tokens=2e9 --dry-run
    """
    from theodolite.launching import prepare
    from theodolite.launching import scale as conduct
    from theodolite.launching.scale import RATES
    from theodolite.present.bar import Bar

    chosen, start = look_up(workload)
    target, small = target_of(to, start), target_of(base, start, "--base")
    assert target is not None
    rates = RATES if lr is None else _rates(lr)
    todo = prepare(
        chosen,
        target,
        budget=_share(budget),
        base=small,
        rates=rates,
        schedule=schedule,
        workers=(jobs or os.cpu_count() or 1) if device == "cpu" else 1,
        device=device,
    )
    print(todo, file=sys.stderr)
    if dry_run:
        return
    with Bar() as bar:
        made = conduct(
            workload,
            target,
            prepared=todo,
            optimizer=optimizer,
            lr=rates,
            weight_decay=weight_decay,
            schedule=schedule,
            out=out,
            tflops=tflops,
            engine=engine,
            device=device,
            jobs=jobs,
            progress=bar,
        )
    print_result(made.to_json() if json else made)
    print(
        f"The launch sheet is {out / 'launch.html'}, its data are in {out / 'launch.json'}", file=sys.stderr
    )


def _rates(text: str) -> list[float]:
    """Learning rates: `2^-9:2^-4` or `0.001,0.003,0.01`."""
    from theodolite.sweeping.ranges import parse_axis

    found = parsed("--lr", text, parse_axis)
    if not isinstance(found, list) or not all(is_number(rate) for rate in found):
        raise UseError(
            f"--lr {text}: give learning rates, for example --lr 2^-9:2^-4 or --lr 0.001,0.003,0.01"
        )
    return found


def _share(text: str) -> float:
    """A part of the target: `3%` or `0.03`."""
    part = text.strip()
    try:
        share = float(part[:-1]) / 100 if part.endswith("%") else float(part)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UseError(f"--budget {text}: write a percentage up to 100%, for example --budget 3%")
    return share
