"""With what a run was made: versions of packages and hashes of source files; digests of JSON values."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Environment = dict[str, str | None]
ADDED = {"evaluate_every": 0, "horizon": "none"}
"""Fields that older runs do not have, with the values that change nothing: their digests leave them out."""


def digest_of(value: Any) -> str:
    """The SHA-256 of a JSON value in hexadecimal; the order of keys does not matter.

    >>> digest_of({"lr": 0.1, "size": (64, 2)}) == digest_of({"size": [64, 2], "lr": 0.1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))  # ASCII, whatever the value holds
    return hashlib.sha256(text.encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def environment(workload: str) -> Environment:
    """Versions and source hashes for runs of a workload, found at the first call.

    >>> sorted(environment("mlp-mixture"))
    ['numpy', 'platform', 'python', 'source', 'theodolite', 'torch', 'workload_source']
    """
    return {
        "theodolite": _version("theodolite"),
        "source": _source_of_package(),
        "workload_source": _source_of_workload(workload),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "platform": platform.platform(),
    }


@functools.cache
def _source_of_package() -> str:
    folder = Path(__file__).parents[1]
    return _digest(folder, sorted(folder.rglob("*.py")))


def _source_of_workload(workload: str) -> str | None:
    """The hash of a workload's file and of the modules beside it that it imports; None for built-in ones."""
    from theodolite.workloads.lookup import config_file  # imports torch, which reading a ledger does not need

    path = config_file(workload) or Path(workload.rpartition(":")[0]).expanduser()
    if not path.is_file():
        return None
    path = path.resolve()
    modules = modules_of(path)
    if len(modules) == 1:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return _digest(path.parent, modules)


def modules_of(file: Path) -> list[Path]:
    """A Python file, and all that it imports from its own folder and from packages below, sorted.

    Imports are found by reading the source, also those under a condition or within a function; names that are
    computed are not.
    """
    found: set[Path] = set()
    waiting = {file}
    while waiting:
        one = waiting.pop()
        found.add(one)
        package = one.parent.relative_to(file.parent).parts
        with contextlib.suppress(SyntaxError, ValueError):  # it cannot be imported either
            for node in ast.walk(ast.parse(one.read_bytes())):
                for name in _names(node, package):
                    waiting |= {*_files(file.parent, name)} - found
    return sorted(found)


def _names(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The modules that a statement may import, relative to the folder of the first file."""
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else ()
        module = (*above, *(node.module.split(".") if node.module else ()))
        yield module
        yield from ((*module, alias.name) for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = node.args[0].value
        if called in ("import_module", "__import__") and isinstance(name, str):
            yield tuple(name.strip(".").split("."))


def _files(folder: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """What Python runs to import a module: the packages that it is in, and its own file."""
    is_name = all(part.isidentifier() or part == "*" for part in name)
    if not is_name or name[:1] == ("theodolite",):  # which has a hash of its own
        return
    for end in range(1, len(name) + 1):
        here = folder.joinpath(*name[:end])
        if name[end - 1] == "*":
            yield from here.parent.glob("*.py")
        else:
            yield from (file for file in (here / "__init__.py", here.with_suffix(".py")) if file.is_file())


def _digest(folder: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None
