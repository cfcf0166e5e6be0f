"""Rows as a ledger would give them, of runs that nobody made: their loss is a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from theodolite.core.size import Size


def rows_of(
    loss: Callable[..., float],
    *,
    sizes: Sequence[Size],
    exponents: Iterable[float] = range(-12, -4),
    seeds: Iterable[int] = range(3),
    parameterization: str = "plan",
    optimizer: str = "adamw",
    **others: Any,
) -> list[dict[str, Any]]:
    """One row for each combination; `loss(size, exponent, seed)` is infinite where the run is to diverge."""
    seeds = list(seeds)
    found = []
    for size in sizes:
        for exponent in exponents:
            for seed in seeds:
                value = loss(size, exponent, seed)
                found.append(
                    {
                        "identity": f"{size} {exponent} {seed} {parameterization} {optimizer} {others}",
                        "optimizer": optimizer,
                        "parameterization": parameterization,
                        "width": size.width,
                        "depth": size.depth,
                        "lr": 2.0**exponent,
                        "seed": seed,
                        "status": "finished" if math.isfinite(value) else "diverged",
                        "held_out": value if math.isfinite(value) else None,
                        **others,
                    }
                )
    return found
