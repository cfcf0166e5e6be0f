"""`theodolite plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from theodolite.commands.options import (
    ExportFormat,
    ExportNames,
    HorizonRule,
    Json,
    Roles,
    WorkloadName,
    export_suffixes,
    look_up,
    names_of,
    number,
    pairs,
    roles_of,
    sized,
    whole_tokens,
)
from theodolite.commands.output import print_export, print_result
from theodolite.core.arguments import parse_number
from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite.optimizers import Policy
    from theodolite.planning.planner import Covers


def plan(
    workload: WorkloadName,
    width: Annotated[
        int | None, typer.Option(help="Width to plan for; the workload's or the config's own by default.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Depth to plan for.")] = None,
    base_width: Annotated[
        int | None, typer.Option(help="Width at which lr was tuned; the workload's own by default.")
    ] = None,
    base_depth: Annotated[int | None, typer.Option(help="Depth at which lr was tuned.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples in a step, to plan for.")] = None,
    base_batch: Annotated[
        int | None, typer.Option(help="Batch at which lr was tuned; the workload's own by default.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(parser=number, help="Targets seen in all of training, such as 2e9.")
    ] = None,
    base_tokens: Annotated[
        float | None, typer.Option(parser=number, help="Tokens with which lr was tuned.")
    ] = None,
    horizon: HorizonRule = "none",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, muon-kimi, …: see docs/rules.md.")] = "adamw",
    lr: Annotated[
        float | None,
        typer.Option(parser=number, help="Learning rate at base size; required.", show_default=False),
    ] = None,
    weight_decay: Annotated[float, typer.Option(parser=number, help="Weight decay at base size.")] = 0.0,
    eps: Annotated[
        float | None, typer.Option(parser=number, help="eps at base size; by default the optimizer's.")
    ] = None,
    decay: Annotated[
        str, typer.Option(help="What decays: paper, independent, none, matrices, everything.")
    ] = "paper",
    covers: Annotated[
        str,
        typer.Option(help="Weights that a matrix optimizer trains: hidden or all; AdamW trains the rest."),
    ] = "hidden",
    vector_lr: Annotated[
        float | None,
        typer.Option(parser=number, help="Base lr of the tensors that a matrix optimizer leaves to AdamW."),
    ] = None,
    init: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=STD", help="Initial std at base size; may be repeated."),
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
    json: Json = False,
    format: ExportFormat = None,
    name: ExportNames = None,
    out: Annotated[
        Path | None, typer.Option(help="Save the plan here, for Plan.load; with --format the text.")
    ] = None,
) -> None:
    """Which init, learning rate, decay and eps does every tensor need at another size?

    Tune at a small base size, plan for the large one.

    [bold]Examples[/bold]

      theodolite plan gpt-sotu --width 1024 --depth 16 --lr 0.004

      theodolite plan model.py:workload --width 1024 --lr 0.004 --weight-decay 0.1 --out plan.json

      theodolite plan hf:config.json --base-width 256 --base-depth 4 --lr 0.004 --optimizer muon-kimi

      theodolite plan diffusers:transformer/config.json --base-depth 4 --lr 0.001

      theodolite plan gpt-sotu --width 1024 --lr 0.004 --explain readout.weight

      theodolite plan gpt-sotu --width 1024 --lr 0.004 --batch 64 --tokens 2e9 --base-tokens 1e7 --horizon sde

      theodolite plan gpt-sotu --width 2048 --lr 0.004 --diff plan.json

      theodolite plan gpt-sotu --width 1024 --lr 0.004 --optimizer muon --format torch --out plan_torch.py

      theodolite plan gpt-sotu --width 1024 --lr 0.004 --format csv --name 'blocks.*=layers.*' --name '*=*'
    """
    from theodolite.planning import Plan
    from theodolite.planning import plan as make
    from theodolite.present.result import writable
    from theodolite.surveying import SurveyContext
    from theodolite.workloads.lookup import config_file, config_size

    clashing = {"--json": json, "--explain": explain, "--diff": diff}
    suffixes = export_suffixes(format, name, [option for option, given in clashing.items() if given])
    names = names_of(name)
    chosen, base = look_up(workload, base_width, base_depth)
    usual = chosen.size.network
    if config := config_file(workload):  # chosen.size is the small one that is surveyed
        usual = config_size(config)
    if batch is not None and base_batch is None:
        base_batch = chosen.size.batch or chosen.usual_batch
    base = base.at(batch=base_batch, tokens=whole_tokens("--base-tokens", base_tokens) or chosen.size.tokens)
    size = sized(usual, width, depth).at(batch=batch, tokens=whole_tokens("--tokens", tokens))
    if size.tokens is not None and base.tokens is None:
        raise UseError("--tokens is given without --base-tokens: say how many tokens lr was tuned with")
    if size in (base, base.network):
        raise UseError(
            f"from {base} to {size} there is nothing to plan. Give --width, --depth, --batch or --tokens to "
            "plan for, or --base-width or --base-depth to plan from"
        )
    if lr is None:
        raise UseError(f"--lr is missing: give the learning rate that is right at base size {base}")
    other = Plan.load(diff) if diff else None
    if out is not None:
        kind, ends = ("export", suffixes) if suffixes else ("plan", (".json", ".html", ".csv"))
        writable(out, kind, ends)  # refused before any work is done
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
        init=pairs("--init", init, "PATTERN=STD", "'embed.*=0.02'", parse_number) or None,
        roles=chosen.roles_with(roles_of(role)),
        no_decay=no_decay or (),
        horizon=horizon,
    )
    if format is not None:
        print_export(made.export(format, names=names), out)
        return
    if json:
        print_result(made.to_json(), end="")
    elif explain is not None:
        print(made.explain(explain))
    else:
        print(made if other is None else other.diff(made))
    if out is not None:
        print(f"The plan is {made.save(out)}", file=sys.stderr)
