"""The records of the norm-placement study as arrays over seeds, for claims, tables and figures."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.paired import less
from theodolite_studies.framework.records import Record

When = Literal["first", "last"]
"""Before training, or the last time the stream was read."""
CLOSE = 0.1
"""Nats above the best of all placements by which a network may end and still count as trained."""
KINDS = ("standard", "plan")
BASE = "base"
"""The parameterization of a network of base size: there the plan changes nothing, so it is run once."""


@dataclass(frozen=True)
class NetworkRuns:
    """One placement at one depth under one parameterization: an entry for each seed, in their order."""

    records: tuple[Record, ...]
    goal: Mapping[int, float]
    """By seed, the lowest loss of any placement at this depth under this parameterization."""

    @property
    def is_base(self) -> bool:
        """Is it of base size, where the plan changes nothing?"""
        return self.records[0]["parameterization"] == BASE

    @property
    def placement(self) -> str:
        """Where its norms are."""
        return str(self.records[0]["placement"])

    @property
    def is_whole(self) -> bool:
        """Was every seed tried at every learning rate?"""
        return len({(one["seed"], one["lr"]) for one in self.records}) == len(self.seeds) * len(
            self.exponents
        )

    @functools.cached_property
    def exponents(self) -> tuple[int, ...]:
        """log2 of the learning rates."""
        return tuple(sorted({one["lr"] for one in self.records}))

    @functools.cached_property
    def seeds(self) -> tuple[int, ...]:
        """Those there are."""
        return tuple(sorted({one["seed"] for one in self.records}))

    def at(self, exponent: float) -> Array:
        """Held-out losses at a learning rate; infinite where it diverged, nan where it was not tried."""
        found = {one["seed"]: one["held_out"] for one in self.records if one["lr"] == exponent}
        return np.array([_loss(found[seed]) if seed in found else math.nan for seed in self.seeds])

    @functools.cached_property
    def best_at(self) -> int:
        """log2 of the learning rate with the lowest mean loss, among those at which the fewest diverged."""

        def rank(exponent: int) -> tuple[int, float, int]:
            losses = self.at(exponent)
            ended = losses[np.isfinite(losses)]
            return len(losses) - len(ended), float(ended.mean()) if len(ended) else math.inf, exponent

        return min(self.exponents, key=rank)

    @property
    def best(self) -> Array:
        """The losses there."""
        return self.at(self.best_at)

    def lost(self, octaves: int) -> Array:
        """How much higher the loss is at a learning rate so many octaves above the best."""
        return less(self.at(self.best_at + octaves), self.best)

    @property
    def reach(self) -> Array:
        """At how many learning rates a network ends within `CLOSE` of the goal."""
        return np.asarray(self._reached.sum(0), dtype=float)

    @property
    def reaches_edge(self) -> bool:
        """Does it end there at the lowest or the highest learning rate that was tried? There may be more."""
        return bool(self._reached[[0, -1]].any())

    @property
    def is_stuck(self) -> bool:
        """Does it end alike at all learning rates, and near the goal at none? Its best says nothing then."""
        means = [float(np.mean(self.at(exponent))) for exponent in self.exponents]
        return not self._reached.any() and max(means) - min(means) < CLOSE

    @functools.cached_property
    def _reached(self) -> NDArray[np.bool_]:
        """(learning rates, seeds): does it end within `CLOSE` of the goal?"""
        losses = np.stack([self.at(exponent) for exponent in self.exponents])
        goal = np.array([self.goal[seed] for seed in self.seeds])
        return np.asarray(losses <= goal + CLOSE)

    @functools.cached_property
    def steps(self) -> tuple[int, ...]:
        """At which the stream was read."""
        return tuple(sorted({int(step) for one in self._read for step in one["stream"]}))

    def profile(self, name: str, step: int) -> Array:
        """(seeds, blocks + 1): `stream` or `gradient` over the blocks at a step; nan if unknown."""
        missing = [math.nan] * (self.records[0]["depth"] + 1)
        return np.array([one[name].get(str(step), missing) for one in self._read], dtype=float)

    def variance(self, when: When) -> Array:
        """Of the stream after the last block, over features and tokens (its mean is counted as variance)."""
        return np.asarray(self.profile("stream", self._step(when))[:, -1] ** 2)

    def bend(self, when: When) -> Array:
        """The variance added by the second half of the blocks over that by the first: 1 if it grows linearly.

        Exponential growth by a factor F in all makes this √F.
        """
        squares = self.profile("stream", self._step(when)) ** 2
        middle = squares.shape[1] // 2
        return np.asarray((squares[:, -1] - squares[:, middle]) / (squares[:, middle] - squares[:, 0]))

    def slope(self, when: When) -> Array:
        """The gradient after the first block over that after the last."""
        sizes = self.profile("gradient", self._step(when))
        return np.asarray(sizes[:, 1] / sizes[:, -1])

    def peak(self, when: When) -> Array:
        """The largest entry of the stream over the median of its block."""
        step = str(self._step(when))
        return np.array([one["peak"].get(step, math.nan) for one in self._read], dtype=float)

    @property
    def unrest(self) -> Array:
        """The mean of |Δ log₂‖g‖| after the warmup."""
        return np.array([one["unrest"] for one in self._read], dtype=float)

    @functools.cached_property
    def _read(self) -> list[Record]:
        found = [one for one in self.records if one.get("stream")]
        return sorted(found, key=lambda one: int(one["seed"]))

    def _step(self, when: When) -> int:
        return self.steps[0 if when == "first" else -1]


class RunTable:
    """All records by what they are of."""

    def __init__(self, records: Sequence[Record]) -> None:
        # A file may hold a small study too, which is not to be mixed with the full one.
        records = [one for one in records if not one["small"]] or records
        self._records = records
        self.depths = tuple(sorted({int(one["depth"]) for one in records}))
        known = {one["placement"] for one in records}
        self.placements = tuple(name for name in ("pre", "post", "peri") if name in known)
        """Those the claims are about."""
        self.all = (*self.placements, *sorted(known - set(self.placements)))

    @functools.lru_cache(maxsize=256)  # noqa: B019 a table lives as long as a report
    def of(self, placement: str, depth: int, kind: str) -> NetworkRuns | None:
        """The values of a network; None if it was not run. At base size both parameterizations are one."""
        alike = [
            one for one in self._records if one["depth"] == depth and one["parameterization"] in (kind, BASE)
        ]
        found = tuple(one for one in alike if one["placement"] == placement)
        goal: dict[int, float] = {}
        for one in alike:
            goal[one["seed"]] = min(goal.get(one["seed"], math.inf), _loss(one["held_out"]))
        return NetworkRuns(found, goal) if found else None


def _loss(value: float | None) -> float:
    return math.inf if value is None else value
