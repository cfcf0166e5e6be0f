"""Files that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import os
from pathlib import Path

from theodolite.errors import UseError


def html_path(path: str | Path) -> Path:
    """The path a page may be written to; refused before any work is done if it cannot be."""
    path = Path(path).expanduser()
    if path.suffix.lower() not in (".html", ".htm"):
        raise UseError(f"the page cannot be written to {path}: its name must end in .html")
    if not path.parent.is_dir():
        raise UseError(f"the page cannot be written to {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UseError(f"the page cannot be written to {path}: that is a folder")
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
