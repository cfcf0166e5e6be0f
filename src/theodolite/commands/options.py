"""Arguments that commands share, and how they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite.anatomy.part import Role
    from theodolite.core.size import Size
    from theodolite.present.result import Result
    from theodolite.workloads import Workload

WorkloadName = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="A built-in name, file.py:name, or hf:config.json of transformers.",
        show_default=True,
    ),
]
Width = Annotated[int | None, typer.Option(help="Width; the workload's own by default.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role", metavar="PATTERN=ROLE", help="Role of tensors that cannot be classified; may be repeated."
    ),
]
Depth = Annotated[int | None, typer.Option(help="Depth; the workload's own by default.")]


def page_and_data(page: Path, kind: type[Result]) -> Callable[[Result], str]:
    """Check that a page and its JSON can be written; gives the function that writes them and says where."""
    from theodolite.present.result import writable

    data = page.with_suffix(".json")
    writable(page, kind.kind, (".html", ".htm"))
    writable(data, kind.kind, (".json",))

    def save(result: Result) -> str:
        return f"The page is {result.save(page)}, its data are in {result.save(data)}"

    return save


def look_up(name: str) -> Workload:
    """The workload that was named."""
    from theodolite.workloads import workload

    return workload(name)


def sized(usual: Size, width: int | None, depth: int | None) -> Size:
    """The usual size with the given width and depth."""
    given = {key: value for key, value in (("width", width), ("depth", depth)) if value is not None}
    return dataclasses.replace(usual, **given)


def own_size(name: str, workload: Workload) -> Size:
    """The size to train at: that of a Hugging Face config, not the small one that is surveyed."""
    if not name.startswith("hf:"):
        return workload.size
    from theodolite.workloads.hugging_face import config_size

    return config_size(name.removeprefix("hf:"))


def roles_of(given: list[str] | None) -> dict[str, Role] | None:
    """Roles by pattern, from PATTERN=ROLE."""
    pairs = [text.rpartition("=") for text in given or ()]
    for text, (pattern, _, _) in zip(given or (), pairs, strict=True):
        if not pattern:
            raise UseError(f"--role {text}: write PATTERN=ROLE, for example --role 'blocks.*.scale=gain'")
    return {pattern: cast("Role", role) for pattern, _, role in pairs} or None


def stds_of(given: list[str] | None) -> dict[str, float] | None:
    """Stds by pattern, from PATTERN=STD."""
    found = {}
    for text in given or ():
        pattern, _, std = text.rpartition("=")
        try:
            found[pattern] = float(std)
        except ValueError:
            pattern = ""
        if not pattern:
            raise UseError(f"--init {text}: write PATTERN=STD, for example --init 'embed.*=0.02'")
    return found or None
