"""Imports by name: packages that only some need, and what the modules of a folder hold."""

from __future__ import annotations

import importlib
import pkgutil
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


def find_by_name(package: str, collection: str) -> dict[str, Any]:
    """Everything in the tuples of one name, such as `SPECS`, in the modules of a package, by its own name."""
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        for one in getattr(importlib.import_module(f"{package}.{module.name}"), collection, ()):
            if one.name in found:
                raise TypeError(f"{one.name!r} stands twice in the {collection} of {package}")
            found[one.name] = one
    return found
