"""`theodolite sweep`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from theodolite.commands.options import WorkloadName
from theodolite.commands.output import print_result
from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite.core.size import Size
    from theodolite.sweeping import Range, Sweep

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
        str | None, typer.Option(metavar="N,N,…", help="At the depth of the base; 128:1024 doubles.")
    ] = None,
    depths: Annotated[str | None, typer.Option(metavar="N,N,…", help="At the width of the base.")] = None,
    product: Annotated[
        bool, typer.Option("--product", help="All combinations of widths and depths.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="WIDTHxDEPTH", help="What the plan starts from; the least of those above."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, muon-kimi, …; several with commas.")] = "adamw",
    parameterization: Annotated[str, typer.Option(help="plan, standard or both.")] = "plan,standard",
    seeds: Annotated[int, typer.Option(help="How many.")] = 3,
    steps: Annotated[int | None, typer.Option(max=10**9, help="Of every run; 500 if not given.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps; a tenth of all if not given.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="constant, cosine, linear or wsd; linear if not given.")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="At base size; 0 if not given.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="float32, tf32, or bfloat16 for autocast; float32 if not given.")
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(max=10**6, help="Batches that a run is judged by; 16 if not given.")
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=X,X,…",
            help="A further axis, such as weight_decay=0,0.1 or init_scale=0.5:2; may be repeated.",
        ),
    ] = None,
    over: Annotated[str, typer.Option(help="The quantity whose optimum is sought: lr, or an axis.")] = "lr",
    search: Annotated[
        str | None,
        typer.Option(help="tpe: search the base with Optuna, then try around the best at every size."),
    ] = None,
    trials: Annotated[int, typer.Option(max=10**6, help="Of the search.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder of the ledger and the page.")] = Path("sweep"),
    engine: Annotated[str, typer.Option(help="auto, serial, processes, vectorised or ray.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time; as many as there are cores.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Most models in one vectorised program.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster, for --engine ray; auto for the one on this machine.")
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=AMOUNT", help="What a run takes of it, as in GPU=0.25; may be repeated."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="A run that takes longer has failed; no limit if not given."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Which base learning rate is best at each size, and does it transfer?

    Trains the network at every size, learning rate and seed, under the plan and under the
    standard parameterization. Prints where the optimum is, how far it moves when width or depth
    doubles, and what is lost by tuning at the base alone.

    Runs are kept as they end: the same command again goes on where it was stopped. Further values
    of --lr, --widths, --seeds, … are added to what is there.

    Exits with 1 if a run failed, with 130 after Ctrl-C.

    [bold]Examples[/bold]

      theodolite sweep gpt-sotu --widths 128,256,512 --depths 4,8,16 --lr 2^-12:2^-5

      theodolite sweep model.py:workload --widths 64:512 --lr 1e-4:1e-1 --steps 200 --jobs 8

      theodolite sweep gpt-enwik8 --widths 128:1024 --lr 2^-12:2^-5 --device cuda --precision bfloat16

      theodolite sweep model.py:workload --widths 64:512 --lr 2^-12:2^-5 --engine ray --address auto

      theodolite sweep gpt-sotu --lr 2^-8 --axis weight_decay=0.01:1 --over weight_decay

      theodolite sweep gpt-sotu --widths 128:512 --lr 2^-12:2^-5 --axis weight_decay=0.01:1:log --search tpe
    """
    from theodolite.present.bar import Bar
    from theodolite.present.result import writable
    from theodolite.sweeping import sweep as conduct
    from theodolite.sweeping.ranges import parse_axis, parse_whole_numbers

    axes = _axes(axis)
    options: dict[str, Any] = {"steps": steps, "warmup": warmup, "schedule": schedule}
    options |= {"weight_decay": weight_decay, "precision": precision, "held_out": held_out}
    fields = {name: value for name, value in options.items() if value is not None}
    for name in fields:
        if name in axes:
            option = name.replace("_", "-")
            raise UseError(f"{name} is given twice: as --{option} and as an --axis. Give one")
    if "steps" not in axes:
        fields.setdefault("steps", USUAL_STEPS)
    if (out / "sweep.json").exists():
        writable(out / "sweep.json", "sweep", (".json",))  # refused before any work is done
    made = conduct(
        workload,
        lr=cast("Any", parse_axis(lr)),
        widths=parse_whole_numbers(widths) if widths else (),
        depths=parse_whole_numbers(depths) if depths else (),
        product=product,
        base=_base(base),
        optimizer=_names(optimizer),
        parameterization=_names(parameterization),
        seeds=seeds,
        axes=axes,
        over=over,
        search=cast("Literal['tpe'] | None", search),
        trials=trials,
        out=out,
        engine=engine,
        device=device,
        jobs=jobs,
        chunk=chunk,
        address=address,
        per_run=_resources(resource),
        timeout=timeout,
        progress=Bar(),
        **fields,
    )
    print_result(made.to_json() if json else made)
    _finish(made, out)


def _finish(made: Sweep, out: Path) -> None:
    """Write the page, say what was run, and leave with the status that fits."""
    assert made.report is not None
    if made.families:
        page, data = made.save(out / "sweep.html"), made.save(out / "sweep.json")
        print(f"The page is {page}, the same as data {data}", file=sys.stderr)
    print(made.report, file=sys.stderr)
    if made.report.failed:
        print(f"Their tracebacks: theodolite ledger show {out} --failed", file=sys.stderr)
    if made.report.stopped:
        raise typer.Exit(130)
    if not made.report.ok:
        raise typer.Exit(1)


def _axes(given: list[str] | None) -> dict[str, list[Any] | Range]:
    from theodolite.sweeping.ranges import parse_axis

    found: dict[str, list[Any] | Range] = {}
    for text in given or ():
        name, equals, values = text.partition("=")
        if not name or not equals or not values:
            raise UseError(f"--axis {text}: write NAME=VALUES, for example --axis weight_decay=0,0.1")
        if name in found:
            raise UseError(f"--axis {name} is given twice: list all its values once")
        found[name] = parse_axis(values)
    return found


def _resources(given: list[str] | None) -> dict[str, float]:
    found = {}
    for text in given or ():
        name, _, amount = text.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            raise UseError(f"--resource {text}: write NAME=AMOUNT, for example --resource GPU=0.25") from None
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _base(text: str | None) -> Size | None:
    if text is None:
        return None
    from theodolite.core.size import Size

    width, _, depth = text.replace("×", "x").partition("x")
    try:
        return Size(int(width), int(depth))
    except ValueError as error:
        raise UseError(f"--base {text}: write WIDTHxDEPTH, for example --base 128x4") from error
