"""`theodolite sweep`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from theodolite.commands.options import (
    Device,
    HorizonRule,
    Json,
    WorkloadName,
    number,
    pairs,
    parsed,
)
from theodolite.commands.output import print_result
from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite.core.size import Size

USUAL_STEPS = 500


def sweep(
    workload: WorkloadName,
    lr: Annotated[
        str,
        typer.Option(
            metavar="LOW:HIGH[:STEP] or X,X,…",
            help="Learning rates at base size: 2^-12:2^-5 is every octave, 2^-12:2^-5:0.5 every half.",
        ),
    ],
    widths: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Widths, at base depth; 128:1024 is every doubling.")
    ] = None,
    depths: Annotated[str | None, typer.Option(metavar="N,N,…", help="Depths, at base width.")] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Examples in a step; 8:256 is every doubling.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Targets seen in all, in place of --steps; 1e6:64e6 doubles."),
    ] = None,
    horizon: HorizonRule = "none",
    product: Annotated[bool, typer.Option("--product", help="Combine all of these.")] = False,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="WIDTHxDEPTH", help="Size to plan from; the smallest width and depth by default."
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, muon-kimi, …; several with commas.")] = "adamw",
    parameterization: Annotated[
        str, typer.Option(help="plan, standard, own (the workload's optimizer); several with commas.")
    ] = "plan,standard",
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
    steps: Annotated[int | None, typer.Option(max=10**9, help="Steps of each run; 500 by default.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Warm-up steps; a tenth of all by default.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, cosine, linear (default) or wsd.")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(parser=number, help="Weight decay at base size; 0 by default.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="float32 (default), tf32, or bfloat16 for autocast.")
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(max=10**6, help="Number of held-out batches; 16 by default.")
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=X,X,…",
            help="A further axis, such as weight_decay=0,0.1 or init_scale=0.5:2; may be repeated.",
        ),
    ] = None,
    over: Annotated[str, typer.Option(help="The quantity to optimise: lr, or an axis.")] = "lr",
    metric: Annotated[
        str | None,
        typer.Option(help="Metric of the workload to compare runs by; the held-out loss by default."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help="tpe: search the base with Optuna, then try around the best at every size."),
    ] = None,
    trials: Annotated[int, typer.Option(max=10**6, help="Trials of the search.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder of the ledger and the page.")] = Path("sweep"),
    engine: Annotated[str, typer.Option(help="auto, serial, processes, vectorised or ray.")] = "auto",
    device: Device = "cpu",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; one per core.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Most models in one vectorised program.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster; auto for the one on this machine.")
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=AMOUNT", help="What one run needs, such as GPU=0.25; may be repeated."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Limit for one run; a run that takes longer has failed."),
    ] = None,
    json: Json = False,
) -> None:
    """Which base learning rate is best at each size, and does it transfer?

    Trains the network at every size, learning rate and seed, under the plan and under the
    standard parameterization. Prints the optimum, how far it moves when width or depth doubles,
    and what is lost by tuning at base size alone.

    Finished runs are kept: the same command continues where it was stopped. Further values of
    --lr, --widths, --seeds, … add to them.

    Exits with 1 if a run failed, with 130 after Ctrl-C.

    [bold]Examples[/bold]

      theodolite sweep gpt-sotu --widths 128,256,512 --depths 4,8,16 --lr 2^-12:2^-5

      theodolite sweep model.py:workload --widths 64:512 --lr 1e-4:1e-1 --steps 200 --jobs 8

      theodolite sweep gpt-enwik8 --widths 128:1024 --lr 2^-12:2^-5 --device cuda --precision bfloat16

      theodolite sweep model.py:workload --widths 64:512 --lr 2^-12:2^-5 --engine ray --address auto

      theodolite sweep gpt-sotu --lr 2^-12:2^-5 --batches 4:64 --tokens 1e6:16e6 --parameterization plan

      theodolite sweep gpt-sotu --lr 2^-8 --axis weight_decay=0.01:1 --over weight_decay

      theodolite sweep gpt-sotu --widths 128:512 --lr 2^-12:2^-5 --axis weight_decay=0.01:1:log --search tpe

      theodolite sweep model.py:workload --widths 64:512 --lr 2^-12:2^-5 --metric "solver iterations"

      theodolite sweep model.py:workload --widths 64:512 --lr 2^-12:2^-5 --parameterization own,plan,standard
    """
    from theodolite.present.bar import Bar
    from theodolite.present.result import writable
    from theodolite.sweeping import sweep as conduct
    from theodolite.sweeping.ranges import parse_axis, parse_whole_numbers

    axes = pairs("--axis", axis, "NAME=X,X,…", "weight_decay=0,0.1", parse_axis)
    options: dict[str, Any] = {"steps": steps, "warmup": warmup, "schedule": schedule}
    options |= {"weight_decay": weight_decay, "precision": precision, "held_out": held_out}
    if horizon != "none":
        options["horizon"] = horizon
    fields = {name: value for name, value in options.items() if value is not None}
    for name in fields:
        if name in axes:
            option = name.replace("_", "-")
            raise UseError(f"{name} is given twice: as --{option} and as an --axis. Give one")
    if "steps" not in axes and not tokens:
        fields.setdefault("steps", USUAL_STEPS)
    if (out / "sweep.json").exists():
        writable(out / "sweep.json", "sweep", (".json",))  # refused before any work is done
    made = conduct(
        workload,
        lr=cast("Any", parsed("--lr", lr, parse_axis)),
        widths=parsed("--widths", widths, parse_whole_numbers) if widths else (),
        depths=parsed("--depths", depths, parse_whole_numbers) if depths else (),
        batches=parsed("--batches", batches, parse_whole_numbers) if batches else (),
        tokens=parsed("--tokens", tokens, parse_whole_numbers) if tokens else (),
        product=product,
        base=_base(base),
        optimizer=_names(optimizer),
        parameterization=_names(parameterization),
        seeds=seeds,
        axes=axes,
        over=over,
        metric=metric,
        search=cast("Literal['tpe'] | None", search),
        trials=trials,
        out=out,
        engine=engine,
        device=device,
        jobs=jobs,
        chunk=chunk,
        address=address,
        per_run=pairs("--resource", resource, "NAME=AMOUNT", "GPU=0.25", float),
        timeout=timeout,
        progress=Bar(),
        **fields,
    )
    print_result(made.to_json() if json else made)
    assert made.report is not None
    if made.families:
        page, data = made.save(out / "sweep.html"), made.save(out / "sweep.json")
        print(f"The page is {page}, its data are in {data}", file=sys.stderr)
    print(made.report, file=sys.stderr)
    if made.report.failed:
        print(f"Their tracebacks: theodolite ledger show {out} --failed", file=sys.stderr)
    if made.report.stopped:
        raise typer.Exit(130)
    if not made.report.ok:
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _base(text: str | None) -> Size | None:
    from theodolite.core.size import Size

    width, _, depth = (text or "").replace("×", "x").partition("x")
    try:
        return None if text is None else Size(int(width), int(depth))
    except ValueError as error:
        raise UseError(f"--base {text}: write WIDTHxDEPTH, for example --base 128x4") from error
