"""Configs of models on disk: read as data, scaled in proportion, and checked to grow."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.files import read_json
from theodolite.core.size import Size

SMALL = Size(128, 4)
"""About the default size of a network, unless the config's own is smaller."""


def read_config(path: str | Path, prefix: str = "hf:") -> dict[str, Any]:
    """The keys and values of a `config.json`, or of the one in a folder.

    A config that names code to download is refused. The prefix is that of the workload, for errors.
    """
    path = Path(path).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UseError(
            f"{file} is not there: give {prefix} the path of a config.json on disk, nothing is downloaded"
        )
    values = read_json(file)
    if not isinstance(values, dict):
        raise UseError(f"{file} holds a {type(values).__name__}, not the keys and values of a config")
    for config in (values, *(value for value in values.values() if isinstance(value, dict))):
        for key, named in config.items():
            # transformers downloads and runs a kernel that is named like a repository.
            if key.endswith("_implementation") and "/" in str(named):
                raise UseError(
                    f"{file}: {key} is {named!r}, code to download, which is not run. Remove {key} from it"
                )
    return values


def small_size(own: Size, unit: int, about: Size = SMALL) -> Size:
    """The default size of a config's model, with a width in whole units.

    >>> print(small_size(Size(1152, 28), unit=72))
    144 × 4
    >>> print(small_size(Size(64, 2), unit=16))
    64 × 2
    """
    width = -(-about.width // unit) * unit
    return Size(min(width, own.width), min(about.depth, own.depth))


def require_growth(path: str | Path, kind: str, build: Build, size: Size, keys: tuple[str, str]) -> None:
    """Check, without memory for weights, that the model grows when its config is scaled.

    The error names the keys of the config for width and depth.
    """

    def parameters(width: int, depth: int) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build(width, depth).parameters())

    here = parameters(size.width, size.depth)
    for what, larger in (("wide", (2 * size.width, size.depth)), ("deep", (size.width, 2 * size.depth))):
        if parameters(*larger) <= here:
            raise UseError(
                f"{path}: {kind} at {Size(*larger)} has no more parameters than at {size}, so "
                f"its config does not say by {' and '.join(keys)} how {what} it is. Write a Workload for it"
            )


def proportion(value: int, ratio: Fraction) -> int:
    """A number that is scaled, at least 1.

    >>> proportion(38, Fraction(4, 19)), proportion(1, Fraction(1, 4))
    (8, 1)
    """
    return max(1, round(value * ratio))


def adapt(items: list[Any], depth: int) -> list[Any]:
    """A list with an item for each layer, for another number of layers.

    A periodic list is continued. Any other is stretched between its first and last item.

    >>> adapt(["local", "local", "global"] * 2, 9) == ["local", "local", "global"] * 3
    True
    >>> adapt(["dense", "sparse", "sparse", "sparse", "sparse", "sparse"], 3)
    ['dense', 'sparse', 'sparse']
    >>> adapt(["local", "local", "local", "global"] * 3, 2)
    ['local', 'global']
    """
    for period in range(1, len(items) // 2 + 1):
        if all(item == items[i % period] for i, item in enumerate(items)):
            if depth >= period:
                return [items[i % period] for i in range(depth)]
            items = items[:period]
            break
    if depth == 1:
        return items[-1:]
    return [items[round(i * (len(items) - 1) / (depth - 1))] for i in range(depth)]


def adapt_indices(chosen: Collection[int], layers: int, depth: int) -> list[int]:
    """Indices of some of the layers, for another number of layers.

    >>> adapt_indices([5, 11], layers=12, depth=18), adapt_indices(range(6), layers=12, depth=4)
    ([5, 11, 17], [0, 1])
    """
    marks = adapt([layer in chosen for layer in range(layers)], depth)
    return [layer for layer, is_chosen in enumerate(marks) if is_chosen]
