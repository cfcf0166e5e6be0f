"""`theodolite groups`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from theodolite.commands.options import (
    Depth,
    ExportFormat,
    ExportNames,
    Json,
    Roles,
    Width,
    WorkloadName,
    export_suffixes,
    look_up,
    names_of,
    number,
    roles_of,
    sized,
)
from theodolite.commands.output import print_export, print_result
from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite.optimizers import Policy
    from theodolite.planning.planner import Covers


def groups(
    workload: WorkloadName,
    optimizer: Annotated[
        str, typer.Option(help="muon, muon-kimi, soap, adamw, …: see docs/rules.md.")
    ] = "muon",
    lr: Annotated[
        float | None, typer.Option(parser=number, help="Its learning rate.", show_default=False)
    ] = None,
    adamw_lr: Annotated[
        float | None,
        typer.Option(
            parser=number,
            help="Instead of --lr: AdamW's learning rate, translated to Muon's.",
            show_default=False,
        ),
    ] = None,
    vector_lr: Annotated[
        float | None,
        typer.Option(parser=number, help="Learning rate of what a matrix optimizer leaves to AdamW."),
    ] = None,
    weight_decay: Annotated[float, typer.Option(parser=number, help="Weight decay of what decays.")] = 0.0,
    eps: Annotated[float | None, typer.Option(parser=number, help="eps; by default the optimizer's.")] = None,
    decay: Annotated[
        str, typer.Option(help="What decays: paper, independent, none, matrices, everything.")
    ] = "paper",
    covers: Annotated[
        str,
        typer.Option(help="Weights that a matrix optimizer trains: hidden or all; AdamW trains the rest."),
    ] = "hidden",
    width: Width = None,
    depth: Depth = None,
    role: Roles = None,
    no_decay: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors that do not decay; may be repeated."),
    ] = None,
    translation: Annotated[
        bool, typer.Option("--translation", help="Print the learning rates of AdamW and Muon by shape.")
    ] = False,
    json: Json = False,
    format: ExportFormat = None,
    name: ExportNames = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Save the groups here: .json, .html or .csv; with --format the text."),
    ] = None,
) -> None:
    """Which tensor goes to which optimizer, at which learning rate, and why?

    [bold]Examples[/bold]

      theodolite groups gpt-sotu --lr 0.02 --vector-lr 0.003

      theodolite groups model.py:workload --optimizer muon-kimi --adamw-lr 0.003 --weight-decay 0.1

      theodolite groups hf:config.json --adamw-lr 0.0003 --translation

      theodolite groups gpt-sotu --adamw-lr 0.004 --format torch --out groups_torch.py

      theodolite groups diffusers:transformer/config.json --optimizer soap --lr 0.001 --json
    """
    from theodolite.planning.grouping import groups as make
    from theodolite.present.result import writable
    from theodolite.surveying import SurveyContext
    from theodolite.workloads.lookup import config_file, config_size

    clashing = {"--json": json, "--translation": translation}
    suffixes = export_suffixes(format, name, [option for option, given in clashing.items() if given])
    names = names_of(name)
    chosen, size = look_up(workload, width, depth)
    if config := config_file(workload):  # chosen.size is the small one that is surveyed
        size = sized(config_size(config), width, depth)
    if lr is None and adamw_lr is None:
        raise UseError(
            f"--lr is missing: give the learning rate of {optimizer}, or as --adamw-lr the one of AdamW"
        )
    if out is not None:
        kind, ends = ("export", suffixes) if suffixes else ("parameter groups", (".json", ".html", ".csv"))
        writable(out, kind, ends)  # refused before any work is done
    made = make(
        chosen.build,
        SurveyContext(chosen, size).inputs,
        size=size,
        optimizer=optimizer,
        lr=lr,
        adamw_lr=adamw_lr,
        vector_lr=vector_lr,
        weight_decay=weight_decay,
        eps=eps,
        decay=cast("Policy", decay),
        covers=cast("Covers", covers),
        roles=chosen.roles_with(roles_of(role)),
        no_decay=no_decay or (),
    )
    if format is not None:
        print_export(made.export(format, names=names), out)
        return
    shown = made.translation if translation else made
    if json:
        print_result(shown.to_json(), end="")
    else:
        print_result(shown)
    if out is not None:
        print(f"The groups are {made.save(out)}", file=sys.stderr)
