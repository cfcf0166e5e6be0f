"""With what runs are made: versions, and hashes of the source."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

import theodolite

Environment = dict[str, str | None]


@functools.lru_cache(maxsize=256)
def _environment(workload: str) -> tuple[tuple[str, str | None], ...]:
    return (
        ("theodolite", theodolite.__version__),
        ("source", _source_of_package()),
        ("workload_source", _source_of_workload(workload)),
        ("python", platform.python_version()),
        ("torch", _version("torch")),
        ("numpy", _version("numpy")),
        ("platform", platform.platform()),
    )


def environment(workload: str) -> Environment:
    """That of this process, for runs of a workload. Files are hashed at the first call for a workload.

    >>> sorted(environment("mlp-mixture"))
    ['numpy', 'platform', 'python', 'source', 'theodolite', 'torch', 'workload_source']
    """
    return dict(_environment(workload))


@functools.cache
def _source_of_package() -> str:
    folder = Path(theodolite.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _source_of_workload(workload: str) -> str | None:
    """The hash of the file that a workload was looked up in; None of one that is part of the package."""
    path = Path(workload.removeprefix("hf:") if workload.startswith("hf:") else workload.rpartition(":")[0])
    path = path.expanduser()
    if path.is_dir() and workload.startswith("hf:"):
        path /= "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
