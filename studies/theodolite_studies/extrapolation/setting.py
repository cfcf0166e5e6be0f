"""How much of the study of extrapolation is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from theodolite_studies.framework.study import Setting


@dataclass(frozen=True)
class ExtrapolationSetting(Setting):
    """How much is run."""

    seeds: int = 6
    steps: int = 1000
    widths: tuple[int, ...] = (8, 16, 32, 64)
    nums: tuple[int, ...] = (64, 256, 1024)
    """Of flows; widths are compared at the second of them."""
    middle: int = 32
    """The width at which numbers of flows, mirrored flows and ensembles are tried."""
    octaves: tuple[float, ...] = (-1.0, 0.5)
    """log2 of other learning rates over that of the study, at the ends of the widths."""
    alone: tuple[int, ...] = (32, 64)
    """Widths of networks that are trained on narrow gaps alone."""
    few_seeds: int = 3
    """Of other learning rates and of narrow gaps alone."""
    members: int = 4
    gaps: tuple[float, ...] = (0.2, 0.5, 1.0, 2.0, 3.0)
    """Of flows in closed form."""
    flow_seeds: int = 4
    each: int = 20
    """Test flows in a bin of gaps."""

    def about(self) -> dict[str, Any]:
        """What a number of a record depends on; seeds may be added."""
        return {"steps": self.steps, "members": self.members, "each": self.each}


FULL = ExtrapolationSetting()
SMALL = ExtrapolationSetting(
    small=True,
    seeds=2,
    steps=60,
    widths=(8, 16, 32),
    nums=(64, 256),
    middle=16,
    octaves=(),
    alone=(16,),
    members=2,
    gaps=(0.2, 1.0),
    flow_seeds=2,
    each=4,
)
