"""Records as arrays: curves of curvature, maps of accuracy, and the zone between its boundaries."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.records import Record, select
from theodolite_studies.goldilocks.setting import NORMED, TRAINED, Column, GoldilocksSetting

CHANCE = 0.1
"""What a run that diverged gets right: ten classes, one is as good as another."""


@dataclass(frozen=True)
class SeedCurve:
    """What was measured along an axis, of all seeds."""

    at: Array
    """Exponents of ten, or epochs; (points,)."""
    values: Mapping[str, Array]
    """By name, (seeds, points)."""
    seeds: tuple[int, ...]

    def __getitem__(self, name: str) -> Array:
        return self.values[name]

    def mean(self, name: str = "excess") -> Array:
        """Over the seeds."""
        return self.values[name].mean(0)

    @property
    def share_of_g(self) -> Array:
        """`‖G‖/(‖G‖+‖S‖)`."""
        return self["frobenius of G"] / (self["frobenius of G"] + self["frobenius of S"])


@dataclass(frozen=True)
class ExcessZone:
    """Where the excess is at least half of its peak, in exponents of ten. A side may be open (±inf)."""

    low: float
    high: float
    peak: float
    at_peak: float

    def holds(self, exponents: Array) -> NDArray[np.bool_]:
        """Which of them are inside?"""
        return (exponents >= self.low) & (exponents <= self.high)


@dataclass(frozen=True)
class Accuracies:
    """A map of accuracies: (seeds, places, rates). Runs that diverged are at chance."""

    at: Array
    rates: Array
    train: Array
    test: Array
    diverged: NDArray[np.bool_]

    def best(self, kind: str = "train") -> Array:
        """With the best learning rate: (seeds, places)."""
        values: Array = getattr(self, kind).max(-1)
        return values


def curve(records: Sequence[Record], **key: object) -> SeedCurve | None:
    """The curves of all seeds that agree with the key; None if there is none."""
    mine = sorted(select(records, **key), key=lambda record: record["seed"])
    if not mine:
        return None
    # A run that diverged has been seen less often than the others.
    length = min(len(record["at"]) for record in mine)
    names = [name for name, value in mine[0].items() if isinstance(value, list) and name != "at"]
    return SeedCurve(
        np.array(mine[0]["at"][:length], dtype=np.float64),
        {name: np.array([_floats(record[name][:length]) for record in mine]) for name in names},
        tuple(record["seed"] for record in mine),
    )


def zone(measured: SeedCurve | None) -> ExcessZone | None:
    """Around the peak of the seeds' mean excess, the part with at least half of it; None without a peak.

    Boundaries are interpolated between the points.

    >>> triangle = SeedCurve(np.arange(-2.0, 3.0), {"excess": np.array([[0.0, 2.0, 4.0, 1.0, 0.0]])}, (0,))
    >>> found = zone(triangle)
    >>> found.low, round(found.high, 2), found.peak, found.at_peak
    (-1.0, 0.67, 4.0, 0.0)
    """
    if measured is None:
        return None
    at, excess = measured.at, measured.mean()
    top = int(np.nanargmax(excess))
    peak = float(excess[top])
    if not peak > 0:
        return None
    low = _crossing(at[: top + 1][::-1], excess[: top + 1][::-1], peak / 2, beyond=-math.inf)
    high = _crossing(at[top:], excess[top:], peak / 2, beyond=math.inf)
    return ExcessZone(low, high, peak, float(at[top]))


def accuracies(records: Sequence[Record], **key: object) -> Accuracies | None:
    """The map that agrees with the key, of the seeds that have all of it; None if there is none."""
    mine = select(records, **key)
    places = sorted({record["at"] for record in mine})
    by_seed: dict[int, dict[float, Record]] = {}
    for record in mine:
        by_seed.setdefault(record["seed"], {})[record["at"]] = record
    whole = [by_seed[seed] for seed in sorted(by_seed) if len(by_seed[seed]) == len(places)]
    if not whole:
        return None
    kinds = {
        kind: np.array([[_floats(found[place][kind]) for place in places] for found in whole])
        for kind in ("train", "test")
    }
    diverged = np.isnan(kinds["train"])
    train, test = (np.where(np.isnan(each), CHANCE, each) for each in kinds.values())
    return Accuracies(np.array(places), np.array(mine[0]["rates"], dtype=np.float64), train, test, diverged)


class Measured:
    """The study's data: curves of curvature, maps of accuracy and zones, by what they are of."""

    def __init__(self, records: Sequence[Record], setting: GoldilocksSetting) -> None:
        self.records, self.setting = records, setting
        self.curve = functools.cache(self._curve)

    def has(self, part: str) -> bool:
        """Are there records of a part?"""
        return any(record["part"] == part for record in self.records)

    def _curve(self, network: str, column: Column, row: str) -> SeedCurve | None:
        """Before training, along T, α or both."""
        return curve(self.records, part="zone", network=network, column=column, row=row)

    def logits(self, network: str, column: Column) -> SeedCurve | None:
        """How far logits are from what α would make of them."""
        return curve(self.records, part="logits", network=network, column=column)

    def course(self, column: Column, at: float) -> SeedCurve | None:
        """During training at a temperature."""
        return curve(self.records, part="course", column=column, temperature=at)

    def map(self, part: str, column: Column, rule: str | None = None) -> Accuracies | None:
        """The accuracies of a part, by the usual rule of the learning rate unless one is named."""
        if part == "scale":
            rule = rule or ("normed" if column in NORMED else "homogeneous")
        return accuracies(self.records, part=part, column=column, **({"rule": rule} if rule else {}))

    def zone(self, column: Column, network: str | None = None) -> ExcessZone | None:
        """Along T, of the network that is trained in this column unless one is named."""
        return zone(self.curve(network or TRAINED[column].name, column, "temperature"))

    def peak(self, network: str, column: Column) -> Array | None:
        """Along T, of each seed."""
        along = self.curve(network, column, "temperature")
        return None if along is None else np.asarray(along["excess"].max(1))


def _floats(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _crossing(at: Array, excess: Array, level: float, *, beyond: float) -> float:
    """Where the excess, from its peak on, first falls below the level."""
    for place in range(1, len(at)):
        above, below = excess[place - 1], excess[place]
        if not below >= level:
            if math.isnan(below):
                return float(at[place - 1])
            return float(at[place - 1] + (at[place] - at[place - 1]) * (above - level) / (above - below))
    return beyond
