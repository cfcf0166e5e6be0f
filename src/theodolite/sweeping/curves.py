"""From the rows of a ledger to curves: held-out loss against the swept quantity, a row for each seed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite.core.size import Size
from theodolite.sweeping.scale import Floats

Row = Mapping[str, Any]
"""One run, as `Ledger.rows` gives it."""
Key = tuple[str, str, str]
"""Optimizer, parameterization, and the values of the further axes as JSON."""

NUM_RESAMPLES = 1000


@dataclass(frozen=True, eq=False)
class Curve:
    """The loss at one size, everything else but the swept quantity and the seed being fixed."""

    size: Size
    values: tuple[float, ...]
    """Of the swept quantity, rising."""
    seeds: tuple[int, ...]
    losses: Floats
    """Seeds × values: infinite where the run diverged, nan where there is none."""

    @property
    def means(self) -> Floats:
        """The mean over the seeds that were run, by value; one that diverged makes it infinite."""
        return resampled_means(self, self.seeds, np.ones((1, len(self.seeds))))[0]

    @property
    def num_seeds(self) -> tuple[int, ...]:
        """How many were run, by value."""
        return tuple(int(count) for count in (~np.isnan(self.losses)).sum(0))


def curves_of(rows: Sequence[Row], over: str, axes: Sequence[str] = ()) -> dict[Key, list[Curve]]:
    """The curves of all sizes, by what else they differ in.

    Args:
        rows: of the ledger. Those of runs that failed are left out.
        over: the swept quantity, such as `lr`.
        axes: further ones.
    """
    cells: dict[Key, dict[Size, dict[tuple[float, int], float]]] = {}
    for row in rows:
        if row["status"] == "failed":
            continue
        others = json.dumps({name: setting(row, name) for name in axes}, sort_keys=True)
        sizes = cells.setdefault((row["optimizer"], row["parameterization"], others), {})
        losses = sizes.setdefault(Size(row["width"], row["depth"]), {})
        losses[setting(row, over), row["seed"]] = math.inf if row["held_out"] is None else row["held_out"]
    return {
        key: [_curve(size, losses) for size, losses in sorted(sizes.items())] for key, sizes in cells.items()
    }


def setting(row: Row, name: str) -> Any:
    """The value of an axis. What a row calls `held_out` is the loss, not the number of batches it is of."""
    return row["held_out_batches" if name == "held_out" else name]


def resamples(seeds: Sequence[int]) -> Floats:
    """How often each seed is drawn in each resample with replacement; the same draws every time."""
    num = len(seeds)
    drawn = np.random.default_rng(0).multinomial(num, [1 / num] * num, size=NUM_RESAMPLES)
    return drawn.astype(np.float64)


def resampled_means(curve: Curve, seeds: Sequence[int], weights: Floats) -> Floats:
    """Resamples × values: the mean loss, each seed counted as often as it was drawn.

    All values and all sizes share a draw, so that what a seed does to all of them cancels in differences.
    Where no seed of a draw was run, the mean over those that were stands in.
    """
    own = weights[:, [seeds.index(seed) for seed in curve.seeds]]
    finite, diverged = np.isfinite(curve.losses), np.isinf(curve.losses)
    losses = np.where(finite, curve.losses, 0.0)
    count = own @ finite
    everyone = np.where(diverged.any(0), np.inf, losses.sum(0) / np.maximum(finite.sum(0), 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(count > 0, own @ losses / count, everyone)
    return np.where(own @ diverged > 0, np.inf, means)


def _curve(size: Size, losses: Mapping[tuple[float, int], float]) -> Curve:
    values = sorted({value for value, _ in losses})
    seeds = sorted({seed for _, seed in losses})
    table = [[losses.get((value, seed), math.nan) for value in values] for seed in seeds]
    return Curve(size, tuple(values), tuple(seeds), np.array(table, dtype=np.float64))
