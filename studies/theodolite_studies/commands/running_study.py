"""What the commands of studies with cells have in common: run what is missing, or draw what is there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite_studies.framework.study import Study

Device = Annotated[str, typer.Option(help="cpu, or cuda, which the processes share.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes: on a GPU, one prepares while another computes.")]
Draw = Annotated[Path | None, typer.Option(metavar="FILE", help="Run nothing: draw what a file holds.")]
RECORDS = "The records, one line of JSON each; figures go beside the file."


def carry_out(
    study: Study, out: Path, *, device: str | None = None, jobs: int, small: bool, draw: Path | None
) -> None:
    """Run the cells that the file does not hold yet, and print the claims; or only draw.

    `device` is for the studies that are told one.

    Exits with 1 if a cell failed.
    """
    import dataclasses
    import functools

    from theodolite.core.building import check_device
    from theodolite_studies.framework.study import conduct, report

    if draw is not None:
        print(drawn(functools.partial(report, study), draw))
        return
    if device is not None:
        check_device(device)
    run: Callable[..., Any] = study.run
    failed = conduct(
        study if device is None else dataclasses.replace(study, run=functools.partial(run, device=device)),
        out,
        small=small,
        jobs=jobs,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report(study, out))
    if small:
        print("\n--small has too few seeds and steps for a verdict: it shows how the study goes.")
    if failed:
        raise typer.Exit(1)


def drawn(report: Callable[[Path], str], path: Path) -> str:
    """What a file that was given says. If its records are not those of the study, the file is at fault."""
    from theodolite.core.building import in_one_line

    try:
        return report(path)
    except UseError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UseError(
            f"--draw {path}: its records are not those that this study writes ({in_one_line(error)}). Give a "
            "file or a folder that this version of the study has made"
        ) from error
