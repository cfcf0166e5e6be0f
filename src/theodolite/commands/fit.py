"""`theodolite fit`."""

from __future__ import annotations

import json as encoder
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.commands.options import Json, pairs
from theodolite.commands.output import print_result
from theodolite.core.arguments import parse_number
from theodolite.core.errors import UseError
from theodolite.core.files import plain

if TYPE_CHECKING:
    from theodolite.fits import Fit, FitEstimate


def fit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .csv or .parquet table, or a ledger (.sqlite).")
    ],
    form: Annotated[
        str, typer.Option(help="chinchilla, power, isoflop, allocation or depth-expansion.")
    ] = "chinchilla",
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COLUMN,…",
            help="What the file calls parameters, tokens, compute, loss, x, width, depth; may be repeated.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="Only rows with this value; may be repeated."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Keep only the best run of each size and seed.")
    ] = False,
    drop_worst: Annotated[
        int, typer.Option(min=0, help="Number of points with the highest loss to leave out.")
    ] = 0,
    no_offset: Annotated[
        bool, typer.Option("--no-offset", help="power: without the irreducible loss E.")
    ] = False,
    budgets: Annotated[
        str | None,
        typer.Option(
            metavar="C,C,…", help="isoflop: the compute budgets, if they do not follow from the runs."
        ),
    ] = None,
    growth: Annotated[
        float | None,
        typer.Option(help="depth-expansion: r where depth grows as width^r.", show_default=False),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE,…", help="Predict there, or split that budget; may be repeated."),
    ] = None,
    draws: Annotated[int, typer.Option(max=10**6, help="Number of bootstrap samples.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Write a page with figures (fit.html), or .json or .csv.")
    ] = None,
) -> None:
    """What does the loss do at the next scale?

    Fits a scaling law to runs. Every constant and every prediction has an interval.

    The largest runs are predicted from the others, and warnings say what the data cannot determine.

    [bold]Forms[/bold], and the columns each needs besides loss

      chinchilla       L = E + A·N^-α + B·D^-β           two of parameters, tokens, compute

      power            L = E + A·x^-α                    x

      isoflop          the best size at each budget      two of parameters, tokens, compute

      allocation       the best depth at each size       width, depth (and parameters)

      depth-expansion  what each further block brings    depth

    [bold]Examples[/bold]

      theodolite fit runs.csv --columns parameters="Model Size",compute="Training FLOP"

      theodolite fit runs.csv --drop-worst 5 --at compute=1e24 --at parameters=7e10,tokens=1.4e12

      theodolite fit runs.csv --form power --columns x=tokens --out fit.html

      theodolite fit sweep.sqlite --form allocation --best --where parameterization=plan
    """
    from theodolite.fits import Fit
    from theodolite.fits import fit as make
    from theodolite.fits.result import estimates_table
    from theodolite.present.bar import Bar
    from theodolite.present.result import writable

    if out is not None:
        writable(out, Fit.kind, (".html", ".json", ".csv"))  # refused before any work is done
    options: dict[str, Any] = {"drop_worst": drop_worst, "draws": draws, "seed": seed}
    if no_offset:
        options["offset"] = False
    if budgets is not None:
        options["budgets"] = [parse_number(text) for text in budgets.split(",")]
    if growth is not None:
        options["growth"] = growth
    places = [pairs("--at", text.split(","), "NAME=VALUE", "compute=1e24", parse_number) for text in at or ()]
    renamed = [pair for text in columns or () for pair in text.split(",")]
    with Bar() as bar:
        made = make(
            form,
            file,
            columns=pairs("--columns", renamed, "NAME=COLUMN", 'parameters="Model Size"'),
            where=pairs("--where", where, "COLUMN=VALUE", "optimizer=adamw"),
            best=best,
            progress=bar,
            **options,
        )
    predicted = [(place, _predict(made, place)) for place in places]
    if json:
        content = {name: value for name, value in made.to_dict().items() if name != "samples"}
        content["predictions"] = [plain({"at": place, **found}) for place, found in predicted]
        print_result(encoder.dumps(content, indent=1, ensure_ascii=False))
    else:
        print(made)
        for place, found in predicted:
            where_ = ", ".join(f"{name} {value:g}" for name, value in place.items())
            print(f"\nat {where_}\n{estimates_table(found, 'prediction')}")
    if out is not None:
        print(f"Written to {made.save(out)}", file=sys.stderr)


def _predict(made: Fit, place: dict[str, float]) -> dict[str, FitEstimate]:
    """A prediction, or the best split of a budget, whichever these names ask for."""
    if set(place) == {made.form.optimal_at}:
        return dict(made.optimal(**place))
    if made.form.predict is not None and set(place) == set(made.form.predicts):
        return {"loss": made.predict(**place)}
    known = [",".join(f"{name}=…" for name in made.form.predicts)] if made.form.predict else []
    known += [f"{made.form.optimal_at}=…"] if made.form.optimal_at else []
    raise UseError(f"{made.name} knows --at {' or --at '.join(known)}, not {', '.join(place)}")
