"""What the rows of a sweep say: curves that differ in size alone, their optima, and what follows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite.core.size import Size
from theodolite.sweeping.curves import Curve, Row, curves_of, resampled_means, resamples, setting
from theodolite.sweeping.drift import Along, Drift, drifts
from theodolite.sweeping.optimum import Optimum, find_optimum
from theodolite.sweeping.scale import Scale, scale_of
from theodolite.sweeping.transfer import Change, Drawn, Reach, Transfer, changes, reaches, transfers


@dataclass(frozen=True, eq=False)
class Family:
    """Runs of one optimizer and one parameterization that differ in size, swept quantity and seed."""

    optimizer: str
    parameterization: str
    others: Mapping[str, Any]
    """The values of further axes."""
    scale: Scale
    base: Size
    curves: tuple[Curve, ...]
    """One for each size, from small to large."""
    optima: tuple[Optimum, ...]
    """Of each curve."""
    drifts: tuple[Drift, ...]
    transfers: tuple[Transfer, ...]
    changes: tuple[Change, ...]
    reaches: tuple[Reach, ...]

    @property
    def title(self) -> str:
        """Which family it is."""
        further = "".join(f", {name} {_said(value)}" for name, value in self.others.items())
        return f"{self.optimizer}, {self.parameterization}{further}"

    def optimum(self, size: Size) -> Optimum:
        """The optimum at a size."""
        return next(optimum for optimum in self.optima if optimum.size == size)

    def drift(self, along: Along) -> Drift | None:
        """How the optimum moves along width or depth, if there are sizes to tell it from."""
        return next((drift for drift in self.drifts if drift.along == along), None)

    @property
    def uncompared(self) -> tuple[Size, ...]:
        """Sizes of no change: the base's best was not tried there, or no other has their width or depth."""
        compared = {size for change in self.changes for size in (change.smaller, change.larger)}
        return tuple(curve.size for curve in self.curves if curve.size not in {*compared, self.base})

    @property
    def never_worse(self) -> bool:
        """Are all sizes compared, and is surely none worse, by more than noise, than the next smaller one?"""
        return not self.uncompared and not any(change.worse or change.untold for change in self.changes)


@dataclass(frozen=True)
class Best:
    """The best of all values of all axes at one size, and what the base's best costs there."""

    optimizer: str
    parameterization: str
    size: Size
    settings: Mapping[str, Any]
    """By axis, the swept quantity among them."""
    loss: float
    lost: float
    """The loss here with the best settings of the base, less `loss`; nan where those were not run here."""


def analyse(
    rows: Sequence[Row], *, base: Size, over: str = "lr", axes: Sequence[str] = ()
) -> tuple[Family, ...]:
    """The families in the rows of a ledger, as they were first run, the plan before the standard.

    Args:
        rows: as `Ledger.rows` gives them.
        base: the size from which optima are transferred.
        over: the swept quantity.
        axes: further ones: each combination of their values is a family.

    >>> rows = [
    ...     {"optimizer": "adamw", "parameterization": "plan", "width": width, "depth": 4, "seed": seed,
    ...      "lr": 2.0**e, "status": "finished", "held_out": (e + 7) ** 2 / width + 1 + seed / 100}
    ...     for width in (64, 128) for e in (-9, -8, -7, -6) for seed in range(3)
    ... ]
    >>> (family,) = analyse(rows, base=Size(64, 4))
    >>> round(math.log2(family.optimum(Size(128, 4)).value), 6)
    -7.0
    """
    scale = scale_of(over, {setting(row, over) for row in rows})
    found = curves_of(rows, over, axes)
    optimizers, combinations = ([*dict.fromkeys(key[index] for key in found)] for index in (0, 2))
    keys = sorted(found, key=lambda key: (optimizers.index(key[0]), combinations.index(key[2]), key[1]))
    return tuple(
        _family(optimizer, parameterization, json.loads(others), scale, base, found[key])
        for key in keys
        for optimizer, parameterization, others in [key]
    )


def bests(families: Sequence[Family]) -> tuple[Best, ...]:
    """By size, the best family and value together."""
    found: dict[tuple[str, str, Size], tuple[float, Family, float]] = {}
    for family in families:
        for optimum in family.optima:
            key = (family.optimizer, family.parameterization, optimum.size)
            if math.isfinite(optimum.loss) and (key not in found or optimum.loss < found[key][0]):
                found[key] = (optimum.loss, family, optimum.best)
    made = []
    for (optimizer, parameterization, size), (loss, family, best) in found.items():
        source = found.get((optimizer, parameterization, family.base))
        lost = math.nan
        if source is not None:
            lost = _loss_at(source[1], size, source[2]) - loss
        settings = {family.scale.name: best, **family.others}
        made.append(Best(optimizer, parameterization, size, settings, loss, lost))
    return tuple(made)


def _family(
    optimizer: str,
    parameterization: str,
    others: Mapping[str, Any],
    scale: Scale,
    base: Size,
    curves: Sequence[Curve],
) -> Family:
    seeds = sorted({seed for curve in curves for seed in curve.seeds})
    weights = resamples(seeds)
    drawn = {}
    for curve in curves:
        means = np.concatenate([curve.means[None], resampled_means(curve, seeds, weights)])
        places = np.array([scale.place(value) for value in curve.values])
        drawn[curve.size] = Drawn(curve, find_optimum(curve, scale, seeds, weights), means, places)
    optima = [one.optimum for one in drawn.values()]
    places_of_optima = {size: one.lowest(scale)[0][1:] for size, one in drawn.items()}
    return Family(
        optimizer=optimizer,
        parameterization=parameterization,
        others=others,
        scale=scale,
        base=base,
        curves=tuple(curves),
        optima=tuple(optima),
        drifts=tuple(drifts(optima, places_of_optima, scale)),
        transfers=tuple(transfers(drawn, base, scale)),
        changes=tuple(changes(drawn, base)),
        reaches=tuple(reaches(drawn, scale)),
    )


def _loss_at(family: Family, size: Size, value: float) -> float:
    for curve in family.curves:
        if curve.size == size and value in curve.values:
            return float(curve.means[curve.values.index(value)])
    return math.nan


def _said(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
