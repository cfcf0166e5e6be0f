"""Packages that only some need."""

from __future__ import annotations

import importlib
from typing import Any

from theodolite.core.errors import UseError


def needed(package: str, extra: str = "frame") -> Any:
    """Import a package, or say how to get it.

    >>> needed("no_such_package")
    Traceback (most recent call last):
    theodolite.UseError: no_such_package is missing: pip install 'theodolite[frame]'
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UseError(f"{package} is missing: pip install 'theodolite[{extra}]'") from error
