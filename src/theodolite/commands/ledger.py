"""`theodolite ledger`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from theodolite.core.metric_names import metrics_in
from theodolite.present.text import Column, Table, cell, counted

ledger_app = typer.Typer(
    no_args_is_help=True, help="The runs of a study: show them, and take them to other tools and back."
)

SHOWN = 40
"""Runs that `show` lists, unless told otherwise."""
COLUMNS = ["workload", "width", "depth", "batch", "planned_tokens", "optimizer", "parameterization"]
COLUMNS += ["horizon", "lr", "weight_decay", "seed", "steps"]
LedgerPath = Annotated[
    Path, typer.Argument(metavar="LEDGER", help="The folder of a study, or its ledger.sqlite.")
]


@ledger_app.command("show")
def ledger_show(
    path: LedgerPath,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed runs, with tracebacks.")] = False,
    every: Annotated[bool, typer.Option("--all", help=f"All runs, not the last {SHOWN}.")] = False,
) -> None:
    """List the runs of a ledger, also while it is being written.

    [bold]Examples[/bold]

      theodolite ledger show transfer

      theodolite ledger show transfer --failed

      sqlite3 transfer/ledger.sqlite 'SELECT width, lr, held_out FROM results'    the same with SQLite's shell
    """
    from theodolite.fleet.ledger import Ledger

    with Ledger.read(path) as ledger:
        rows = ledger.rows()
        print(f"{ledger.name}: {_counted(rows)}")
    if failed:
        for row in (row for row in rows if row["status"] == "failed"):
            print(f"\n{row['identity']}, attempt {row['attempts']}\n{row['error']}")
    if failed or not rows:
        return
    same = [name for name in COLUMNS if len({row.get(name) for row in rows}) == 1]
    if same:
        said = [name for name in same if rows[0].get(name) not in (None, "none")]
        print(", ".join(f"{name} {cell(rows[0][name])}" for name in said))
    others, metrics = [name for name in COLUMNS if name not in same], metrics_in(rows)
    lines = [
        (
            row["identity"],
            *(row.get(name) for name in others),
            f"diverged at {row['step']}" if row["status"] == "diverged" else row["status"],
            row["held_out"],
            *(row.get(name) for name in metrics),
            row["seconds"],
        )
        for row in (rows if every else rows[-SHOWN:])
    ]
    seconds = Column("seconds", show="{:.1f}".format)
    table = Table(("run", *others, "status", "held_out", *metrics, seconds), lines)
    # In a pipe, identities must not be cut to the width of a terminal.
    print(f"\n{table.text(None if sys.stdout.isatty() else 200)}")
    if len(rows) > SHOWN and not every:
        print(f"These are the last {SHOWN}; --all shows all")


@ledger_app.command("export")
def ledger_export(
    path: LedgerPath,
    to: Annotated[Path, typer.Argument(metavar="FILE", help="A .parquet or a .csv.")],
) -> None:
    """Write a ledger as two tables that other tools read: every attempt, and every value of every step.

    [bold]Examples[/bold]

      theodolite ledger export transfer transfer.csv          transfer.csv and transfer.metrics.csv

      theodolite ledger export transfer transfer.parquet      the same as Parquet; needs theodolite\\[frame]
    """
    from theodolite.fleet.ledger import Ledger

    with Ledger.read(path) as ledger:
        for file in ledger.export(to):
            print(file)


@ledger_app.command("import")
def ledger_import(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="The .parquet or .csv that export wrote.")],
    path: Annotated[Path, typer.Argument(metavar="LEDGER", help="A new folder, or a new .sqlite.")],
) -> None:
    """Make a new ledger from an export. A study can continue with it.

    [bold]Example[/bold]

      theodolite ledger import transfer.csv transfer-again
    """
    from theodolite.fleet.ledger import Ledger

    with Ledger.import_(source, path) as ledger:
        print(f"{ledger.path}: {_counted(ledger.rows())}")


@ledger_app.command("salvage")
def ledger_salvage(
    damaged: LedgerPath,
    path: Annotated[Path, typer.Argument(metavar="NEW", help="A new folder, or a new .sqlite.")],
) -> None:
    """Make a new ledger from the intact runs of a damaged one, which stays as it is.

    Attempts that do not match their digest are named and left out. To run them again, put the new ledger in
    the place of the old one and repeat the study's command.

    [bold]Example[/bold]

      theodolite ledger salvage transfer/ledger.sqlite salvaged.sqlite
    """
    from theodolite.fleet.ledger import Ledger

    with Ledger.salvage(damaged, path, said=print) as ledger:
        print(f"{ledger.path}: {_counted(ledger.rows())}")


def _counted(rows: list[dict[str, Any]]) -> str:
    found = Counter(row["status"] for row in rows)
    parts = [f"{found[status]} {status}" for status in ("finished", "diverged", "failed") if found[status]]
    return f"{counted(len(rows), 'run')}: {', '.join(parts)}" if rows else "no runs yet"
