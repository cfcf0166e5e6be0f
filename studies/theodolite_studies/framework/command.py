"""The command of a study: one for all, with the options that the study has a use for.

Nothing here imports torch before a study is run or drawn.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite_studies.framework.study import Setting, Study


def study_command(
    package: str, about: str | None, *options: str, small: str = "Fewer cells: to see how it goes."
) -> Callable[..., None]:
    """The function that typer makes the command of a study of.

    Args:
        package: of the study; its `study.STUDY` is imported when the command is called.
        about: what the study asks, and how: the help text.
        options: those of `part`, `device`, `engine`, `change` and `summary` that the study has a use for.
        small: what `--small` does.
    """
    name = package.rpartition(".")[2].replace("_", "-")

    def command(
        records: Annotated[
            Path | None,
            typer.Argument(
                help="With --draw: a folder or a file of records; those that come with the study by default."
            ),
        ] = None,
        draw: Annotated[bool, typer.Option("--draw", help="Run nothing: report on records.")] = False,
        out: Annotated[
            Path | None, typer.Option(help=f"The folder of records and figures; {name} by default.")
        ] = None,
        part: Annotated[
            list[str] | None, typer.Option(help="Only cells with this value; may be repeated.")
        ] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; processes share it.")] = "cpu",
        jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time.")] = None,
        engine: Annotated[
            str, typer.Option(help="Of training: auto, serial, processes, vectorised or ray.")
        ] = "auto",
        change: Annotated[
            list[str] | None,
            typer.Option("--set", help="FIELD=VALUE of the study's setting; may be repeated."),
        ] = None,
        summary: Annotated[
            Path | None, typer.Option(help="Add all records, those of the ledger too, to this file.")
        ] = None,
        small: Annotated[bool, typer.Option("--small", help=small)] = False,
    ) -> None:
        from theodolite.fleet.driver import check_engine
        from theodolite.fleet.engine import Resources
        from theodolite.present.bar import Bar
        from theodolite_studies.framework import study as framework

        study: Study = importlib.import_module(f"{package}.study").STUDY
        if records is not None and not draw:
            raise UseError(f"{records}: records are only given with --draw; --out is where a study writes")
        if draw:
            home = Path(importlib.import_module(package).__file__ or "").parent
            path = records or (home / "small" if small else home)
            print(_reported(study, path, out or (None if records else Path(name))))
            if summary is not None:
                framework.summarise(study, path, summary)
            return
        check_engine(engine, Resources(device=device))
        setting = study.small if small else study.full
        out = out or Path(name)
        status = framework.conduct(
            study,
            out,
            setting=changed(setting, change or ()),
            parts=part or (),
            device=device,
            jobs=jobs,
            engine=engine,
            progress=Bar() if study.fleet else None,
            tell=framework.tell_on_stderr,
        )
        print(framework.report(study, out))
        if small:
            print("\n--small has too few seeds and steps for a verdict: it shows how the study goes.")
        if summary is not None:
            framework.summarise(study, out, summary)
        if status:
            raise typer.Exit(status)

    useless = {"part", "device", "change", "engine", "summary"} - {*options}
    signature = inspect.signature(command)
    kept = [each for each in signature.parameters.values() if each.name not in useless]
    command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in kept}
    command.__doc__ = (
        f"{(about or '').strip()}\n\nRuns what the folder does not hold yet, so that it can be stopped "
        "and continued; then "
        "prints the claims and draws the figures.\n\nExits with 1 if something failed.\n\n"
        "[bold]Examples[/bold]\n\n"
        f"  theodolite study {name} --small\n\n  theodolite study {name} --draw"
    )
    return command


def changed(setting: "Setting", changes: Sequence[str]) -> "Setting":
    """A setting with some fields changed, each given as `field=value`; items of a tuple have commas."""
    values: dict[str, Any] = {}
    known = [field.name for field in dataclasses.fields(setting) if field.name != "small"]
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known:
            raise UseError(f"--set {change}: the setting has no field {name!r}: it has {', '.join(known)}")
        now = getattr(setting, name)
        kind = type(now[0]) if isinstance(now, tuple) else type(now)
        try:
            items = tuple(kind(item) for item in text.split(","))
        except ValueError as error:
            raise UseError(
                f"--set {change}: {name} is {now!r} by default; give values of that type"
            ) from error
        values[name] = items if isinstance(now, tuple) else items[0] if len(items) == 1 else kind(text)
    return dataclasses.replace(setting, **values)


def _reported(study: "Study", path: Path, to: Path | None) -> str:
    """What records that were given say. If they are not those of the study, the file is at fault."""
    from theodolite.core.building import in_one_line
    from theodolite_studies.framework.study import report

    try:
        return report(study, path, to)
    except UseError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UseError(
            f"--draw {path}: its records are not those that this study writes ({in_one_line(error)}). Give a "
            "file or a folder that this version of the study has made"
        ) from error
