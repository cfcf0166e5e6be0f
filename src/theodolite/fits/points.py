"""What goes into a fit: columns of positive numbers, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from theodolite.core.errors import UseError
from theodolite.fits.result import Array

Columns = Mapping[str, ArrayLike | None]


def checked(form: str, columns: Columns, *, zero_allowed: tuple[str, ...] = ()) -> dict[str, Array]:
    """The columns as arrays of one length, all numbers positive; what is not is named.

    >>> checked("power", {"x": [1, 2], "loss": [3.0, float("nan")]})
    Traceback (most recent call last):
    theodolite.UseError: loss of point 2 is nan: ...
    """
    found = {}
    for name, column in columns.items():
        if column is None:
            raise UseError(f"{form} needs {name}, and there is none. Give {name}=…, one number for each run")
        found[name] = _numbers(form, name, column)
    lengths = {name: len(column) for name, column in found.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UseError(f"{form} needs columns of one length, but {said}. Give one number for each run")
    for name, column in found.items():
        bad = ~np.isfinite(column) | (column < 0 if name in zero_allowed else column <= 0)
        if bad.any():
            place = int(np.argmax(bad))
            raise UseError(
                f"{name} of point {place + 1} is {column[place]:g}: every {name} must be a positive number. "
                "Leave that run out, or mend the column"
            )
    return found


def compute_split(form: str, parameters: Any, tokens: Any, compute: Any) -> dict[str, Any]:
    """Parameters and tokens from any two of the three, by `C = 6ND`."""
    given = {"parameters": parameters, "tokens": tokens, "compute": compute}
    known = {name: _numbers(form, name, column) for name, column in given.items() if column is not None}
    if len(known) < 2:
        have = " and ".join(known) or "none"
        raise UseError(f"{form} needs two of parameters, tokens and compute (6·N·D); it was given {have}")
    for name, column in known.items():
        checked(form, {name: column})  # before anything is divided by it
    if "parameters" not in known:
        known["parameters"] = known["compute"] / (6 * known["tokens"])
    if "tokens" not in known:
        known["tokens"] = known["compute"] / (6 * known["parameters"])
    return {"parameters": known["parameters"], "tokens": known["tokens"]}


def without_worst(form: str, data: Mapping[str, Array], drop_worst: int) -> dict[str, Array]:
    """Without the points of the highest loss."""
    num = len(data["loss"])
    if not 0 <= drop_worst < num:
        raise UseError(f"{form}: drop_worst is {drop_worst}, of {num} points. Give 0 to {num - 1}")
    kept = np.sort(np.argsort(-data["loss"], kind="stable")[drop_worst:])
    return {name: column[kept] for name, column in data.items()}


def enough(form: str, data: Mapping[str, Array], names: tuple[str, ...], num_constants: int) -> None:
    """Refuse fewer points, or fewer distinct sizes, than there are constants to find."""
    num = len(data["loss"])
    if num <= num_constants:
        raise UseError(
            f"{form} has {num_constants} constants and there are {num} points: at least {num_constants + 1} "
            "are needed. Run more sizes, or fit a form with fewer constants"
        )
    for name in names:
        if len(np.unique(data[name])) < 2:
            raise UseError(
                f"{form}: {name} is {data[name][0]:g} at every point, so nothing can be said of how the loss "
                f"depends on it. Add runs with other {name}, or fit a form without it"
            )


def _numbers(form: str, name: str, column: ArrayLike) -> Array:
    try:
        found = np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UseError(
            f"{form}: {name} holds what is no number ({error}). Give one number for each run"
        ) from None
    if found.ndim != 1:
        raise UseError(
            f"{form}: {name} has {found.ndim} dimensions. Give a plain list, one number for each run"
        )
    if not len(found):
        raise UseError(f"{form}: {name} is empty. Give one number for each run")
    return found
