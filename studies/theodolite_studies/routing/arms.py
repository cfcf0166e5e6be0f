"""The records of the routing study by kind of residual, each at its best learning rate, and its symptoms."""

# S seeds, H halves, T times, L branches

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite.models.dit import DiTStream
from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.paired import Paired, less
from theodolite_studies.framework.records import Record

ADD: DiTStream = "add"
ROUTED: DiTStream = "routed"
TIME_ROUTED: DiTStream = "time-routed"
ROUTED_SHARP, TIME_ROUTED_SHARP = "routed-sharp", "time-routed-sharp"
"""Routing as it was at first, with scores `q·k/√D` and `8·q·k/D` instead of `q·k/D`. There are records of it,
and no code."""

Symptom = Callable[[Record], Array]
"""Of a reading: a number for each half and time, (H, T)."""


def inflation(reading: Record) -> Array:
    """The stream after the last branch over that before the first."""
    return _last(reading, "stream") / _array(reading, "start")


def branch_growth(reading: Record) -> Array:
    """The largest branch over the stream before the first branch, which routing does not divide."""
    return np.asarray(_array(reading, "added").max(-1) / _array(reading, "start"))


def gradient_fall(reading: Record) -> Array:
    """The gradient with respect to the first branch over that with respect to the last."""
    return np.asarray(_array(reading, "gradient")[..., 0] / _last(reading, "gradient"))


def largest_cosine(reading: Record) -> Array:
    """Of the stream before and after a branch."""
    return np.asarray(np.nanmax(_array(reading, "cosine"), -1))


def least_cosine(reading: Record) -> Array:
    """Of the stream before and after a branch."""
    return np.asarray(np.nanmin(_array(reading, "cosine"), -1))


def median_cosine(reading: Record) -> Array:
    """Over the branches."""
    return np.asarray(np.nanmedian(_array(reading, "cosine"), -1))


def last_share(reading: Record) -> Array:
    """The last branch over the stream that it reads."""
    return _array(reading, "share")


def span(values_HT: Array) -> float:
    """How much larger a number is at one time than at another, both chosen on the first half of the images.

    The largest over the least of noisy numbers is above one even if they are equal. Choosing on one half and
    judging by the other avoids that.

    >>> span(np.array([[1.0, 2.0, 4.0], [1.0, 9.0, 3.0]]))
    3.0
    """
    chosen, judged = values_HT
    return float(judged[chosen.argmax()] / judged[chosen.argmin()])


@dataclass(frozen=True)
class Arm:
    """One kind of residual: records of all its learning rates and seeds."""

    residual: str
    records: tuple[Record, ...]

    @functools.cached_property
    def exponents(self) -> tuple[float, ...]:
        """log2 of the learning rates."""
        return tuple(sorted({one["lr"] for one in self.records}))

    @functools.cached_property
    def best_at(self) -> float:
        """log2 of the learning rate with the lowest mean validation loss over the seeds."""
        return min(self.exponents, key=lambda lr: float(np.mean([*self.losses(lr, "validation").values()])))

    @property
    def is_bracketed(self) -> bool:
        """Were lower and higher learning rates tried than the best?"""
        return self.exponents[0] < self.best_at < self.exponents[-1]

    @property
    def best(self) -> dict[int, Record]:
        """By seed, the records at the best learning rate."""
        return {one["seed"]: one for one in self._at(self.best_at)}

    @property
    def test(self) -> dict[int, float]:
        """By seed, the test loss at the best learning rate."""
        return self.losses(self.best_at, "test")

    def losses(self, exponent: float, name: str) -> dict[int, float]:
        """By seed, `validation` or `test` losses; infinite where training diverged."""
        return {one["seed"]: _loss(one[name]) for one in self._at(exponent)}

    def readings(self, name: str = "late") -> dict[int, Record]:
        """By seed, `early` or `late` readings at the best learning rate, where there are any."""
        return {seed: one[name] for seed, one in self.best.items() if one.get(name)}

    def symptom(self, symptom: Symptom, name: str = "late") -> dict[int, float]:
        """By seed, the mean over images and times."""
        return {seed: float(symptom(reading).mean()) for seed, reading in self.readings(name).items()}

    def map(self, name: str) -> Array:
        """(T, L): a quantity of the readings, the mean over seeds and halves."""
        return np.asarray(np.mean([_array(one, name).mean(0) for one in self.readings().values()], axis=0))

    def _at(self, exponent: float) -> list[Record]:
        found = [one for one in self.records if one["lr"] == exponent]
        return sorted(found, key=lambda one: int(one["seed"]))


@dataclass(frozen=True)
class Arms:
    """All of them, by residual."""

    found: dict[str, Arm]
    setting: Any
    """That of the records."""

    @staticmethod
    def of(records: Sequence[Record], setting: Any) -> Arms:
        """From the records of a study."""
        found = {str(one["residual"]) for one in records}
        order = (ADD, ROUTED, TIME_ROUTED, ROUTED_SHARP, TIME_ROUTED_SHARP)
        names = sorted(found, key=lambda name: order.index(name) if name in order else len(order))
        return Arms(
            {name: Arm(name, tuple(one for one in records if one["residual"] == name)) for name in names},
            setting,
        )

    def both(self, first: str, second: str, values: Callable[[Arm], dict[int, float]]) -> tuple[Array, Array]:
        """Values of two arms, for the seeds that both have; empty if an arm is missing."""
        if first not in self.found or second not in self.found:
            return np.array([]), np.array([])
        one, other = values(self.found[first]), values(self.found[second])
        seeds = sorted(one.keys() & other.keys())
        return np.array([one[seed] for seed in seeds]), np.array([other[seed] for seed in seeds])

    def doubt(self, *names: str) -> str:
        """Why some arms cannot be compared; empty if they can."""
        bracketed = all(self.found[name].is_bracketed for name in names)
        return "" if bracketed else "a best rate is at an edge"

    def difference(self, first: str, second: str) -> Array:
        """Test losses of the first less those of the second, paired by seed."""
        return less(*self.both(first, second, lambda arm: arm.test))


def paired_loss(arms: Arms, first: str, second: str) -> Paired | None:
    """The paired comparison of test losses; None without seeds that both have."""
    differences = arms.difference(first, second)
    return Paired(differences) if len(differences) else None


def _array(reading: Record, name: str) -> Array:
    return np.array(reading[name], dtype=float)


def _last(reading: Record, name: str) -> Array:
    return np.asarray(_array(reading, name)[..., -1])


def _loss(value: float | None) -> float:
    return math.inf if value is None else value
