"""`theodolite forecast`."""

from __future__ import annotations

import json as encoder
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from theodolite.commands.ledger import LedgerPath
from theodolite.commands.options import Json, number, pairs
from theodolite.commands.output import print_result
from theodolite.core.files import plain

MAKE = "make"
"""The command that is meant where none is named."""


class _ForecastGroup(TyperGroup):
    """`forecast LEDGER …` is `forecast make LEDGER …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "-h", "--help"}:
            args = [MAKE, *args]
        return super().parse_args(ctx, args)


forecast_app = typer.Typer(cls=_ForecastGroup, no_args_is_help=True, rich_markup_mode="rich")


@forecast_app.callback()
def forecast() -> None:
    """What will the loss be at the next scale, and was the forecast right?

    `theodolite forecast LEDGER …` makes a forecast; `theodolite forecast check` compares it with later runs.

    [bold]Examples[/bold]

      theodolite forecast sweep --width 512 --depth 4 --tokens 1e8 --tflops 40 --out forecast.json

      theodolite forecast check forecast.json target

      theodolite forecast make --help    all options of a forecast
    """


@forecast_app.command(MAKE)
def forecast_make(
    path: LedgerPath,
    width: Annotated[int, typer.Option(help="Width of the target.")],
    depth: Annotated[int, typer.Option(help="Depth of the target.")],
    tokens: Annotated[
        float | None,
        typer.Option(
            parser=number, metavar="N", help="Targets it sees in training; may be left out if all runs agree."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Examples in a step of the target.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(parser=number, metavar="X", help="Its base learning rate; the best one by default."),
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="Which, if the ledger has several.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="Only runs with this value; may be repeated."),
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Achieved TFLOP/s of the machine, to tell hours.")
    ] = None,
    draws: Annotated[int, typer.Option(max=10**6, help="Number of bootstrap samples.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    json: Json = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the forecast (.json, to check it later), a page (.html) or the table (.csv)."
        ),
    ] = None,
) -> None:
    """What will the loss be at the next scale?

    Fits a law to the planned runs of a ledger at one base learning rate, and forecasts a run at
    another size. The interval is checked, and widened if need be, by forecasting the largest runs
    from the smaller ones.

    Prints the cost of the run in FLOP, the best split of the same FLOP, and what the standard
    parameterization would lose, if the ledger has runs of it.

    [bold]Examples[/bold]

      theodolite forecast sweep --width 512 --depth 4 --tokens 1e8

      theodolite forecast sweep --width 512 --depth 4 --tokens 1e8 --tflops 40 --out forecast.json

      theodolite forecast sweep --width 512 --depth 4 --tokens 1e8 --lr 2^-7 --where weight_decay=0.1
    """
    from theodolite.core.size import Size
    from theodolite.forecasting import Forecast
    from theodolite.forecasting import forecast as make
    from theodolite.present.bar import Bar
    from theodolite.present.result import writable

    if out is not None:
        writable(out, Forecast.kind, (".json", ".html", ".csv"))  # refused before any work is done
    with Bar() as bar:
        made = make(
            path,
            Size(width, depth, batch=batch, tokens=_whole(tokens)),
            lr=lr,
            optimizer=optimizer,
            where=pairs("--where", where, "COLUMN=VALUE", "weight_decay=0.1"),
            tflops=tflops,
            draws=draws,
            seed=seed,
            progress=bar,
        )
    print_result(made.to_json() if json else made, end="" if json else "\n")
    if out is not None:
        print(f"Written to {made.save(out)}", file=sys.stderr)


@forecast_app.command("check")
def forecast_check(
    file: Annotated[Path, typer.Argument(metavar="FORECAST", help="The .json that forecast wrote.")],
    path: LedgerPath,
    json: Json = False,
) -> None:
    """Was the forecast right? Compare it with the runs of its target.

    Refuses a forecast that was edited. Only runs that ended after it was made count.

    Exits with 0 if the loss (the mean of several seeds) is inside the interval, with 1 if not.

    [bold]Example[/bold]

      theodolite forecast check forecast.json target
    """
    from theodolite.forecasting import check

    found = check(file, path)
    if json:
        content: dict[str, Any] = {
            "inside": found.inside,
            "actual": found.actual,
            "error": found.error,
            **found.to_dict(),
        }
        print_result(encoder.dumps(plain(content), indent=1, ensure_ascii=False))
    else:
        print_result(found)
    if not found.inside:
        raise typer.Exit(1)


def _whole(tokens: float | None) -> Any:
    """A count that may be written as 1e8."""
    return int(tokens) if tokens is not None and tokens == tokens // 1 else tokens
