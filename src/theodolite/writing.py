"""Files that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from theodolite.errors import UseError

KINDS = {"survey": {"verdict", "findings"}, "sweep": {"sweep", "families"}}
"""By what a page shows, keys that its JSON has."""


def html_path(path: str | Path, *, kind: str = "survey") -> Path:
    """The path a page may be written to; refused before any work is done if it cannot be.

    The same as JSON goes beside it, and must not take the place of anything but an older one of its kind.
    """
    path = Path(path).expanduser()
    refused = f"the page cannot be written to {path}"
    if path.suffix.lower() not in (".html", ".htm"):
        raise UseError(f"{refused}: its name must end in .html")
    try:
        if not path.parent.is_dir():
            raise UseError(f"{refused}: there is no folder {path.parent}")
        if path.is_dir():
            raise UseError(f"{refused}: that is a folder")
        if (beside := path.with_suffix(".json")).exists() and not _is(kind, beside):
            raise UseError(
                f"{refused}: its data would take the place of {beside}, which is no {kind}. "
                "Give the page another name"
            )
        with tempfile.TemporaryFile(dir=path.parent):  # may anything be written there?
            pass
    except OSError as error:
        raise UseError(f"{refused}: {error.strerror}") from error
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a half."""
    try:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UseError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to. When all is written it takes the place of the file, else it is removed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _is(kind: str, file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and KINDS[kind] <= content.keys()
