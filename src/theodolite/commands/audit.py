"""`theodolite audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from theodolite.commands.options import (
    Json,
    Roles,
    WorkloadName,
    look_up,
    page_and_data,
    pairs,
    parsed,
    roles_of,
)
from theodolite.commands.output import print_result


def audit(
    workload: WorkloadName,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME", help="Your function (model) -> optimizer; the workload's own by default."
        ),
    ] = None,
    base_width: Annotated[
        int | None,
        typer.Option(help="Width at which your numbers are right; the workload's own by default."),
    ] = None,
    base_depth: Annotated[int | None, typer.Option(help="The same for the depth.")] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Widths to compare; by default the base, 2 and 4 times it. 64:512 is every doubling.",
        ),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="The same for depths; a single one for widths alone.")
    ] = None,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Train for a few steps too, or read alone?")
    ] = True,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 4,
    seeds: Annotated[int, typer.Option(help="Number of seeds of the training.")] = 2,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=RULE",
            help="The rule of an optimizer that is not known, as in MyAdam=adamw; may be repeated.",
        ),
    ] = None,
    role: Roles = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a check fails.")] = False,
    out: Annotated[Path | None, typer.Option(help="A page to write; its data go beside it as JSON.")] = None,
    json: Json = False,
) -> None:
    """Is the parameterization that you wrote by hand right?

    Builds your network and makes your optimizer at several widths and depths, and holds how initial
    values, learning rates, weight decay and eps go with size against the rule of each optimizer,
    with the multipliers of your forward pass taken into account. For each mistake it says how far
    off it is at ten times the size, and the line that mends it. Then small networks train for a few
    steps: do activations and steps keep their size?

    [bold]Examples[/bold]

      theodolite audit model.py:workload --optimizer train.py:make_optimizer

      theodolite audit model.py:workload --base-width 64 --widths 64:512 --depths 4     width alone

      theodolite audit model.py:workload --no-train --strict     for a CI job; seconds

      theodolite audit model.py:workload --out audit.html

      theodolite audit model.py:workload --rule MyAdam=adamw     an optimizer not known here
    """
    from theodolite.present.bar import Bar
    from theodolite.surveying import Audit
    from theodolite.surveying import audit as conduct
    from theodolite.sweeping.ranges import parse_whole_numbers
    from theodolite.workloads.lookup import function_in_file

    save = None if out is None else page_and_data(out, Audit)
    chosen, base = look_up(workload, base_width, base_depth)
    make = None if optimizer is None else function_in_file(optimizer, "--optimizer")
    rules = pairs("--rule", rule, "CLASS=RULE", "MyAdam=adamw")
    with Bar() as bar:
        made = conduct(
            chosen,
            optimizer=make,
            base=base,
            widths=None if widths is None else parsed("--widths", widths, parse_whole_numbers),
            depths=None if depths is None else parsed("--depths", depths, parse_whole_numbers),
            train=train,
            steps=steps,
            seeds=seeds,
            rules=rules,
            roles=roles_of(role),
            progress=bar,
        )
    print_result(made.to_json() if json else made)
    if save is not None:
        typer.echo(save(made), err=True)
    if strict and made.at("fail"):
        raise typer.Exit(1)
