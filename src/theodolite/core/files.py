"""Files: written completely or not at all; JSON, and dataclasses as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from theodolite.core.arguments import is_number, is_whole
from theodolite.core.errors import UseError


def read_text(path: Path) -> str:
    """The text of a regular file; anything else, such as a pipe, is refused."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UseError(f"{path} cannot be read: it is not a file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UseError(f"{path} cannot be read: it is not a text in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise UseError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """The content of a JSON text; `where` names it in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UseError(f"{where} is not JSON that can be read: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file; a reader sees the old or the new content, never a part."""
    try:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UseError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to. At the end it replaces the file; after an error it is removed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


LONGEST = 1_000_000
"""Characters of a text in a file or a terminal."""


def plain_text(text: str) -> str:
    """A text that every file and terminal can take.

    Characters without UTF-8, such as half a surrogate pair in a file name, and NUL are written as escapes.
    The middle of a text of more than a million characters is left out.

    >>> print(plain_text("no such file: b\\udc80d\\0"))
    no such file: b\\udc80d\\x00
    """
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters are left out here]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


OMIT_NONE = {"omit_none": True}
"""Metadata of a field that is left out of JSON where it is None."""


def plain(value: Any) -> Any:
    """A value as JSON values; a number that is not finite is None.

    Fields of a dataclass that do not count for equality are left out, and so are those with `OMIT_NONE` in
    their metadata that are None.

    >>> plain({1: (2.0, float("nan"))})
    {'1': [2.0, None]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(one, getattr(value, one.name)) for one in dataclasses.fields(value) if one.compare]
        return {
            one.name: plain(item)
            for one, item in fields
            if not (item is None and one.metadata.get("omit_none"))
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def read_dataclass(kind: type, content: Any, where: str) -> Any:
    """A dataclass from the output of `plain`, by the type hints of its fields.

    Fields with `compare=False` are not read. Errors are `UseError`s that name the place.

    >>> from theodolite.core.size import Size
    >>> read_dataclass(Size, {"width": 64, "depth": 2}, "the size")
    Size(width=64, depth=2)
    >>> read_dataclass(Size, {"width": 64, "depth": "two"}, "the size")
    Traceback (most recent call last):
    theodolite.UseError: the size: depth is 'two' where a whole number belongs
    """
    hints = typing.get_type_hints(kind)
    every = [one for one in dataclasses.fields(kind) if one.compare]
    fields = {one.name: hints[one.name] for one in every}
    omitted = {one.name for one in every if one.metadata.get("omit_none")}
    if not isinstance(content, dict):
        _refuse(content, where, "an object")
    if missing := [name for name in fields if name not in content and name not in omitted]:
        raise UseError(f"{where} has no {' and no '.join(missing)}")
    if strange := [name for name in content if name not in fields]:
        raise UseError(f"{where} has a {strange[0]!r}, which means nothing")
    found = [(name, hint) for name, hint in fields.items() if name in content]
    return kind(**{name: _read(hint, content[name], f"{where}: {name}") for name, hint in found})


def _read(hint: Any, value: Any, where: str) -> Any:
    """The value as its type hint says; lists become tuples, a missing float is nan."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return read_dataclass(hint, value, where)
    if hint is Any:
        return frozen(value)
    if origin is Literal:
        return value if value in arguments else _refuse(value, where, " or ".join(map(repr, arguments)))
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        for option in options[:-1]:
            with contextlib.suppress(UseError):
                return _read(option, value, where)
        return _read(options[-1], value, where)
    if getattr(origin, "__name__", "") in ("ndarray", "NDArray"):  # the alias of newer versions of NumPy
        return _array(value, where)
    if getattr(hint, "__name__", "") == "Tensor":  # without importing torch
        import torch

        return torch.from_numpy(_array(value, where))
    if origin is tuple:
        items = value if isinstance(value, list) else _refuse(value, where, "a list")
        kinds = arguments[:1] * len(items) if arguments[1:] == (Ellipsis,) else arguments
        if len(kinds) != len(items):
            _refuse(value, where, f"a list of {len(kinds)}")
        return tuple(_read(one, item, where) for one, item in zip(kinds, items, strict=True))
    if origin is not None:  # a mapping from names
        held = value if isinstance(value, dict) else _refuse(value, where, "an object")
        return {name: _read(arguments[1], item, f"{where}: {name}") for name, item in held.items()}
    if hint is float and value is None:
        return math.nan
    wanted = {bool: "true or false", float: "a finite number", int: "a whole number"}.get(hint, "a text")
    checks = {float: is_number, int: is_whole}
    good = checks[hint](value) if hint in checks else isinstance(value, hint)
    return value if good else _refuse(value, where, wanted)


def frozen(value: Any) -> Any:
    """A JSON value with tuples for its lists."""
    if isinstance(value, dict):
        return {name: frozen(item) for name, item in value.items()}
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def _array(value: Any, where: str) -> Any:
    import numpy as np

    try:
        return np.array(value, dtype=float)
    except (TypeError, ValueError):
        _refuse(value, where, "lists of numbers")


def _refuse(value: Any, where: str, wanted: str) -> NoReturn:
    is_long = isinstance(value, int) and abs(value) > 10**18
    raise UseError(
        f"{where} is {'a number of many digits' if is_long else repr(value)} where {wanted} belongs"
    )
