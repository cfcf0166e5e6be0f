"""The command line. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer

import theodolite
from theodolite.commands.audit import audit
from theodolite.commands.data import data_app
from theodolite.commands.fit import fit
from theodolite.commands.forecast import forecast_app
from theodolite.commands.groups import groups
from theodolite.commands.grow import grow
from theodolite.commands.ledger import ledger_app
from theodolite.commands.lr import lr
from theodolite.commands.output import only_results
from theodolite.commands.plan import plan
from theodolite.commands.scale import scale
from theodolite.commands.stragglers import stragglers
from theodolite.commands.study import study_app
from theodolite.commands.survey import dissect, survey
from theodolite.commands.sweep import sweep
from theodolite.core.errors import UseError

LONGEST = 1200
"""Characters of an error; of a longer one the middle is left out."""
app = typer.Typer(
    name="theodolite",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (survey, audit, dissect, plan, groups, lr, sweep, scale, grow, fit, stragglers):
    app.command()(command)
app.add_typer(forecast_app, name="forecast")
app.add_typer(data_app, name="data")
app.add_typer(ledger_app, name="ledger")
app.add_typer(study_app, name="study")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error of use is one line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no × or √ shows ? in their place
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _require_homes(words)
        options = {word.partition("=")[0] for word in words}
        for_program = bool(options & {"--json", "--format"}) and not options & {"-h", "--help"}
        with only_results() if for_program else contextlib.nullcontext():
            _commands()(args=words, prog_name="theodolite")
    except UseError as error:
        _refuse(str(error))
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        _refuse(f"{error.filename}: {error.strerror}. Give another path")
    except MemoryError as error:
        _refuse(f"out of memory ({error}): ask for less at once")
    except Exception as error:
        error.add_note("Please report this as a fault of Theodolite, with these lines and the command.")
        raise


@functools.cache
def _commands() -> Callable[..., object]:
    """Made from the signatures of all commands, once in a process."""
    return typer.main.get_command(app)


def _refuse(reason: str) -> NoReturn:
    """Say in one line what is wrong, however long the values in it are."""
    line = " ".join(reason.split("\n"))
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
    print(f"theodolite: {line}", file=sys.stderr)
    sys.exit(2)


def _require_homes(words: Sequence[str]) -> None:
    """Is there a home folder for every ~ at the start of a path?"""
    for word in words:
        value = word.partition("=")[2] if word.startswith("--") else word
        value = value.removeprefix("hf:").removeprefix("diffusers:")
        if value.startswith("~") and os.path.expanduser(value) == value:
            raise UseError(
                f"{value}: there is no user {value[1:].partition('/')[0]!r}. Write ./{value} for a file"
            )


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"theodolite {theodolite.__version__}")
        raise typer.Exit


@app.callback()
def _theodolite(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Survey a neural network before somebody pays to make it bigger.

    [bold]Examples[/bold]

      theodolite survey                      the built-in GPT on built-in text

      theodolite survey model.py:workload    yours

      theodolite survey hf:config.json       a config of transformers, or diffusers:config.json

      theodolite dissect gpt-sotu            what every tensor is

      theodolite plan gpt-sotu --width 1024 --lr 0.004    how to train it eight times as wide

      theodolite groups gpt-sotu --adamw-lr 0.004    which tensor goes to Muon

      theodolite lr gpt-sotu                 which learning rates can be used

      theodolite fit runs.csv                the loss at the next scale

      theodolite sweep gpt-sotu --widths 128,256,512 --lr 2^-12:2^-5    does the learning rate transfer

      theodolite forecast sweep --width 1024 --depth 4    what will the loss be there, and at what cost

      theodolite scale gpt-sotu --to width=256,depth=4    all of this, up to the launch sheet

      theodolite grow my-llama/ --data text.txt    would one more block help, where, how sure

      theodolite stragglers times.csv        would gradient coding have saved time

      theodolite data list                   data sets, and which are here
    """
