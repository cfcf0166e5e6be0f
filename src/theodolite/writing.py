"""Files that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

from theodolite.errors import UseError


def html_path(path: str | Path) -> Path:
    """The path a page may be written to; refused before any work is done if it cannot be.

    The same as JSON goes beside it, and must not take the place of anything but an older survey.
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
        if (beside := path.with_suffix(".json")).exists() and not _is_survey(beside):
            raise UseError(
                f"{refused}: its data would take the place of {beside}, which is no survey. "
                "Give the page another name"
            )
        with tempfile.TemporaryFile(dir=path.parent):  # may anything be written there?
            pass
    except OSError as error:
        raise UseError(f"{refused}: {error.strerror}") from error
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise UseError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _is_survey(file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"verdict", "findings"} <= content.keys()
