"""Arguments that commands share, and how they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from theodolite.core.arguments import parse_number
from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite.anatomy.part import Role
    from theodolite.core.size import Size
    from theodolite.present.result import Result
    from theodolite.workloads import Workload

T = TypeVar("T")


def number(text: str) -> float:
    """A number that may be written as a power, `2^-7`: `typer.Option(parser=number)`."""
    try:
        return float(text)  # nan too, which is refused with the name of the argument
    except ValueError:
        pass
    try:
        return parse_number(text)
    except UseError as error:
        raise typer.BadParameter(str(error)) from None


WorkloadName = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="A built-in name, file.py:name, hf:config.json of transformers, or diffusers:config.json.",
    ),
]
Width = Annotated[int | None, typer.Option(help="Width; the workload's own by default.")]
Depth = Annotated[int | None, typer.Option(help="Depth; the workload's own by default.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role", metavar="PATTERN=ROLE", help="Role of tensors that cannot be classified; may be repeated."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ExportFormat = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Print it for another trainer: torch, huggingface, torchtitan, deepspeed, dion, megatron; "
        "or as a table: csv, markdown, yaml.",
    ),
]
ExportNames = Annotated[
    list[str] | None,
    typer.Option("--name", metavar="PATTERN=NAME", help="Names of tensors in that trainer; may be repeated."),
]
HorizonRule = Annotated[
    str,
    typer.Option(
        "--horizon",
        help="Rule for batch and tokens: none, sde, timescale, sde+timescale, power(a, b).",
    ),
]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="NAME=N,…",
        help="What it will be scaled to: width=1024,depth=16,batch=512,tokens=2e9.",
    ),
]
Page = Annotated[Path, typer.Option(help="The page to write; its data go beside it as JSON.")]


def page_and_data(page: Path, kind: type[Result]) -> Callable[[Result], str]:
    """Check that a page and its JSON can be written; gives the function that writes them and says where."""
    from theodolite.present.result import writable

    writable(page, kind.kind, (".html",))
    data = page.with_suffix(".json")
    writable(data, kind.kind, (".json",))
    return lambda result: f"The page is {result.save(page)}, its data are in {result.save(data)}"


def look_up(name: str, width: int | None = None, depth: int | None = None) -> tuple[Workload, Size]:
    """The workload of this name, and its size with the given width and depth."""
    from theodolite.workloads import workload

    found = workload(name)
    return found, sized(found.size.network, width, depth)


def sized(usual: Size, width: int | None, depth: int | None) -> Size:
    """The usual size with the given width and depth."""
    given = {key: value for key, value in (("width", width), ("depth", depth)) if value is not None}
    return dataclasses.replace(usual, **given)


def target_of(text: str | None, start: Size, option: str = "--to") -> Size | None:
    """The size of --to; width and depth that it does not name are those of `start`.

    >>> from theodolite import Size
    >>> target_of("width=1024,batch=512,tokens=2e9", Size(128, 4))
    Size(width=1024, depth=4, batch=512, tokens=2000000000)
    """
    if text is None:
        return None
    names, example = ("width", "depth", "batch", "tokens"), "width=1024,batch=512,tokens=2e9"
    given = pairs(option, text.split(","), "NAME=N", example, parse_number)
    for name, value in given.items():
        if name not in names:
            raise UseError(f"{option} {text}: a size has {', '.join(names)}, and no {name}")
        given[name] = whole_tokens(f"{option} {name}", value)
    return dataclasses.replace(start, **given)


def whole_tokens(option: str, given: float | None) -> int | None:
    """A number of tokens, which may be written as 2e9."""
    if given is None:
        return None
    if not (given >= 1 and float(given).is_integer()):
        raise UseError(f"{option} {given:g}: give a positive whole number, such as 2e9")
    return int(given)


def pairs(
    option: str,
    given: Iterable[str] | None,
    form: str,
    example: str,
    read: Callable[[str], Any] = str,
) -> dict[str, Any]:
    """The values of a repeated NAME=VALUE option by name; `read` converts a value.

    >>> pairs("--resource", ["GPU=0.25"], "NAME=AMOUNT", "GPU=0.25", float)
    {'GPU': 0.25}
    >>> pairs("--resource", ["GPU"], "NAME=AMOUNT", "GPU=0.25", float)
    Traceback (most recent call last):
    theodolite.UseError: --resource GPU: write NAME=AMOUNT, for example --resource GPU=0.25
    """
    found: dict[str, Any] = {}
    for text in given or ():
        name, _, value = (part.strip() for part in text.partition("="))
        if name in found:
            raise UseError(f"{option} {name} is given twice: give it once")
        try:
            if not name or not value:
                raise ValueError
            found[name] = read(value)
        except UseError as error:
            raise UseError(f"{option} {text}: {error}") from error
        except ValueError:
            raise UseError(f"{option} {text}: write {form}, for example {option} {example}") from None
    return found


def parsed(option: str, text: str, parse: Callable[[str], T]) -> T:
    """What is given for an option; an error names the option.

    >>> parsed("--lr", "fast", parse_number)
    Traceback (most recent call last):
    theodolite.UseError: --lr fast: 'fast' is no finite number: write one such as 0.001 or 2^-10
    """
    try:
        return parse(text)
    except UseError as error:
        raise UseError(f"{option} {text}: {error}") from error


def roles_of(given: list[str] | None) -> dict[str, Role] | None:
    """Roles by pattern, from PATTERN=ROLE."""
    return pairs("--role", given, "PATTERN=ROLE", "'blocks.*.scale=gain'") or None


def names_of(given: list[str] | None) -> dict[str, str] | None:
    """Names of tensors in another trainer by pattern, from PATTERN=NAME."""
    return pairs("--name", given, "PATTERN=NAME", "'layers.*=model.layers.*'") or None


def export_suffixes(format: str | None, name: list[str] | None, clashing: Sequence[str]) -> tuple[str, ...]:
    """The suffixes of a file for --format, none without it; refuses options that do not go with it."""
    from theodolite.core.arguments import one_of
    from theodolite.planning.exporting import find_formats

    if format is None:
        if name:
            raise UseError(
                "--name gives names for another trainer: say which by --format, for example --format torch"
            )
        return ()
    formats = find_formats()
    one_of("--format", format, tuple(formats))
    if clashing:
        raise UseError(f"--format and {clashing[0]} print different things: leave one of them out")
    return formats[format].suffixes
