"""Many runs: as values, on engines, in a ledger.

>>> from theodolite import Size, fleet
>>> run = fleet.Run("mlp-mixture", Size(32, 2), lr=2**-6, parameterization="standard", steps=3, held_out=1)
>>> (outcome,) = fleet.serial([run], fleet.Resources())
>>> outcome.status, len(outcome.metrics["loss"])
('finished', 3)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theodolite.fleet.driver import RunReport, conduct
    from theodolite.fleet.engine import Resources, serial
    from theodolite.fleet.ledger import Ledger, LedgerError, gradient_norms
    from theodolite.fleet.run import Grid, Outcome, Run

__all__ = [
    "Run",
    "Grid",
    "Outcome",
    "Resources",
    "serial",
    "conduct",
    "RunReport",
    "Ledger",
    "LedgerError",
    "gradient_norms",
]

# Loaded at first use: to read a ledger nobody needs torch.
_HOMES = {
    "Grid": "run",
    "Ledger": "ledger",
    "LedgerError": "ledger",
    "Resources": "engine",
    "Outcome": "run",
    "Run": "run",
    "RunReport": "driver",
    "conduct": "driver",
    "gradient_norms": "ledger",
    "serial": "engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'theodolite.fleet' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"theodolite.fleet.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
