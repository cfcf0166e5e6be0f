"""What claims, tables and figures read from the records: errors over gaps, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite.data.two_cylinders import Region
from theodolite_studies.extrapolation.setting import ExtrapolationSetting
from theodolite_studies.extrapolation.training import bins_of
from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.paired import paired
from theodolite_studies.framework.records import Record, select

HOLE, EVERYWHERE, NARROW = "with a hole", "everywhere", "narrower alone"
"""Gaps that are trained."""
TRAINED: Mapping[str, Region] = {HOLE: "trained", EVERYWHERE: "all", NARROW: "narrower"}
NAMES: Mapping[Region, str] = {
    "trained": "inside",
    "hole": "in the hole",
    "narrower": "narrower",
    "wider": "wider",
}
"""Of regions, as the metrics of the workload have them."""
Kind = Mapping[str, Any]
"""How a network is trained, where it differs from the usual one: `{"width": 8}`."""


@dataclass(frozen=True)
class Trainings:
    """The records of a setting.

    The usual network has the middle width and is trained on the middle number of flows, with gaps that have a
    hole, at the study's learning rate, without mirrored flows.
    """

    records: Sequence[Record]
    setting: ExtrapolationSetting

    @property
    def num(self) -> int:
        """The number of flows at which widths are compared."""
        return self.setting.nums[1]

    def of(self, kind: Kind, part: str = "train") -> list[Record]:
        """The records of one kind of network."""
        usual = {"gaps": HOLE, "width": self.setting.middle, "num": self.num, "flips": False, "octave": 0.0}
        return select(self.records, **{"part": part, **usual, **kind})

    def errors(self, kind: Kind, bins: Sequence[int]) -> dict[int, float]:
        """Relative errors over some bins by seed."""
        return {record["seed"]: relative(record, bins) for record in self.of(kind)}

    def octaves(self, one: Kind, other: Kind, region: Region) -> Array:
        """log2 of the errors of one kind over those of another, by common seed; empty if there is none."""
        found = [self.errors(kind, bins_of(region)) for kind in (one, other)]
        if not found[0].keys() & found[1].keys():
            return np.array([])
        logs = [{seed: math.log2(error) for seed, error in each.items()} for each in found]
        return paired(*logs).differences

    def ratios(self, one: Kind, other: Kind, region: Region) -> Array:
        """The errors of one kind over those of another."""
        return np.exp2(self.octaves(one, other, region))


def relative(record: Record, bins: Sequence[int], of: str = "errors", over: str = "misses") -> float:
    """A root mean square over the flows of some bins over another one; infinite where one has no end.

    >>> relative({"errors": [1.0, 8.0, 7.0], "misses": [1.0, 3.0, 9.0]}, [0, 1])
    1.5
    """
    above, below = ([record[name][place] for place in bins] for name in (of, over))
    if None in above or None in below:
        return math.inf
    return math.sqrt(sum(above) / sum(below))


def in_region(record: Record, region: Region, of: str = "errors", over: str = "misses") -> float:
    """The same over the bins of a region."""
    return relative(record, bins_of(region), of, over)


def rank(record: Record, name: str, where: str = "all") -> float:
    """A rank correlation with the error of an ensemble; nan where a network diverged."""
    found = record["ranks"][name][where]
    return math.nan if found is None else float(found)
