"""Files: written beside and then renamed, so that they are whole or not there; JSON, and what it can hold."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError

KINDS = {
    "survey": {"verdict", "findings"},
    "sweep": {"sweep", "families"},
    "landscape": {"landscape", "places", "values"},
    "tracking": {"tracking", "rows"},
    "stream": {"stream", "looks"},
    "growth": {"growth", "stages"},
    "learning-rate range": {"lr_range", "curves"},
}
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


def read_text(path: Path) -> str:
    """The text of a file. A path that is no regular file, such as a pipe, is refused and not waited for."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UseError(f"{path} cannot be read: it is not a file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UseError(f"{path} cannot be read: it is not a text in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise UseError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> Any:
    """What a file of JSON holds."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """What a text of JSON says; `where` names it in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UseError(f"{where} is not JSON that can be read: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a half."""
    try:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
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


def plain_text(text: str) -> str:
    """A text that every file and terminal takes.

    What has no UTF-8, such as a half of a surrogate pair in the name of a file, is written as its escape, and
    so is NUL, at which many a tool ends. The middle of a text of more than a million characters is left out.

    >>> print(plain_text("no such file: b\\udc80d\\0"))
    no such file: b\\udc80d\\x00
    """
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters are left out here]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


LONGEST = 1_000_000


def plain(value: Any) -> Any:
    """A value as JSON knows it; a number that is not finite is None.

    >>> plain({1: (2.0, float("nan"))})
    {'1': [2.0, None]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _is(kind: str, file: Path) -> bool:
    try:
        content = read_json(file)
    except UseError:
        return False
    return isinstance(content, dict) and KINDS[kind] <= content.keys()
