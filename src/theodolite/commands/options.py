"""Arguments that commands share, and what becomes of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, cast

import typer

from theodolite.core.errors import UseError

if TYPE_CHECKING:
    from theodolite.anatomy.part import Role
    from theodolite.core.size import Size
    from theodolite.workloads import Workload

WorkloadName = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="A built-in name, file.py:name, or hf:config.json of transformers.",
        show_default=True,
    ),
]
Width = Annotated[int | None, typer.Option(help="Width to look at; the workload's own if not given.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role", metavar="PATTERN=ROLE", help="What tensors are that cannot be classified; may be repeated."
    ),
]
Depth = Annotated[int | None, typer.Option(help="Depth to look at; the workload's own if not given.")]


def look_up(name: str) -> Workload:
    """The workload that was named."""
    from theodolite.workloads import workload

    return workload(name)


def sized(usual: Size, width: int | None, depth: int | None) -> Size:
    """The usual size, but for what was given."""
    given = {key: value for key, value in (("width", width), ("depth", depth)) if value is not None}
    return dataclasses.replace(usual, **given)


def own_size(name: str, workload: Workload) -> Size:
    """The size one would train: that of a config, where there is one, and not the small one to look at."""
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
