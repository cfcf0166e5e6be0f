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
    from theodolite.fleet.evaluation import first_step
    from theodolite.fleet.ledger import Ledger, LedgerError, gradient_norms
    from theodolite.fleet.run import Grid, Outcome, Run
    from theodolite.fleet.straggling.coding import (
        CodedRounds,
        CodingScheme,
        GradientCoding,
        MultiplexedCoding,
        SelectiveReattempt,
        undecodable,
    )
    from theodolite.fleet.straggling.comparison import (
        OverheadRange,
        SchemeTime,
        StragglerReport,
        stragglers,
    )
    from theodolite.fleet.straggling.times import overhead_share

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
    "first_step",
    # late workers, and gradient coding
    "stragglers",
    "overhead_share",
    "StragglerReport",
    "SchemeTime",
    "OverheadRange",
    "CodingScheme",
    "GradientCoding",
    "SelectiveReattempt",
    "MultiplexedCoding",
    "CodedRounds",
    "undecodable",
]

# Loaded at first use: to read a ledger nobody needs torch.
_HOMES = dict.fromkeys(("Run", "Grid", "Outcome"), "run")
_HOMES |= {
    "first_step": "evaluation",
    "Resources": "engine",
    "serial": "engine",
    "conduct": "driver",
    "RunReport": "driver",
}
_HOMES |= {"overhead_share": "straggling.times"}
_HOMES |= dict.fromkeys(
    ("stragglers", "StragglerReport", "SchemeTime", "OverheadRange"),
    "straggling.comparison",
)
_HOMES |= dict.fromkeys(
    (
        "CodingScheme",
        "GradientCoding",
        "SelectiveReattempt",
        "MultiplexedCoding",
        "CodedRounds",
        "undecodable",
    ),
    "straggling.coding",
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'theodolite.fleet' has no attribute {name!r}")
    home = importlib.import_module(f"theodolite.fleet.{_HOMES.get(name, 'ledger')}")
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
