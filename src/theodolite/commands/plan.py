"""`theodolite plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from theodolite.commands.options import Roles, WorkloadName, look_up, own_size, roles_of, sized, stds_of
from theodolite.commands.output import print_result
from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite.optimizers import Policy
    from theodolite.planning.planner import Covers


def plan(
    workload: WorkloadName,
    width: Annotated[
        int | None, typer.Option(help="To plan for; the workload's or the config's own if not given.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="The same for the depth.")] = None,
    base_width: Annotated[
        int | None,
        typer.Option(
            help="At which lr and the rest are right; the workload's own, or a small one of a config."
        ),
    ] = None,
    base_depth: Annotated[int | None, typer.Option(help="The same for the depth.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, muon-kimi, …: see docs/rules.md.")] = "adamw",
    lr: Annotated[float | None, typer.Option(help="Learning rate at base size.", show_default=False)] = None,
    weight_decay: Annotated[float, typer.Option(help="Weight decay at base size.")] = 0.0,
    eps: Annotated[float | None, typer.Option(help="eps at base size; the optimizer's usual one.")] = None,
    decay: Annotated[
        str, typer.Option(help="What decays: paper, independent, none, matrices, everything.")
    ] = "paper",
    covers: Annotated[
        str, typer.Option(help="Weights that a matrix optimizer trains: hidden or all. The rest gets AdamW.")
    ] = "hidden",
    vector_lr: Annotated[
        float | None, typer.Option(help="Base lr of what a matrix optimizer leaves to AdamW.")
    ] = None,
    init: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=STD", help="Std at base size, not the network's own; may be repeated."),
    ] = None,
    role: Roles = None,
    no_decay: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors that do not decay; may be repeated."),
    ] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print where the numbers of one tensor come from.")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Print what differs from a saved plan.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Save the plan here, for Plan.load.")] = None,
) -> None:
    """Which init, learning rate, decay and eps does every tensor need at another size?

    Tune at a small base size, plan for the large one.

    [bold]Examples[/bold]

      theodolite plan gpt-sotu --width 1024 --depth 16 --lr 0.004

      theodolite plan model.py:workload --width 1024 --lr 0.004 --weight-decay 0.1 --out plan.json

      theodolite plan hf:config.json --base-width 256 --base-depth 4 --lr 0.004 --optimizer muon-kimi

      theodolite plan gpt-sotu --width 1024 --lr 0.004 --explain readout.weight

      theodolite plan gpt-sotu --width 2048 --lr 0.004 --diff plan.json
    """
    from theodolite.planning import Plan
    from theodolite.planning import plan as make
    from theodolite.present.result import writable
    from theodolite.surveying import SurveyContext

    chosen = look_up(workload)
    size = sized(own_size(workload, chosen), width, depth)
    base = sized(chosen.size, base_width, base_depth)
    if size == base:
        raise UseError(
            f"from {base} to {size} there is nothing to plan. Give --width or --depth to plan for, or "
            "--base-width or --base-depth to plan from"
        )
    if lr is None:
        raise UseError(f"--lr is missing: give the learning rate that is right at base size {base}")
    other = Plan.load(diff) if diff else None
    if out is not None:
        writable(out, "plan", (".json", ".html", ".csv"))  # refused before any work is done
    made = make(
        chosen.build,
        SurveyContext(chosen, size).inputs,
        size=size,
        base=base,
        optimizer=optimizer,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        decay=cast("Policy", decay),
        covers=cast("Covers", covers),
        vector_lr=vector_lr,
        init=stds_of(init),
        roles=roles_of(role),
        no_decay=no_decay or (),
    )
    if json:
        print_result(made.to_json(), end="")
    elif explain is not None:
        print(made.explain(explain))
    else:
        print(made if other is None else other.diff(made))
    if out is not None:
        print(f"The plan is {made.save(out)}", file=sys.stderr)
