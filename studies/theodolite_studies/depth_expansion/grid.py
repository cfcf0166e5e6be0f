"""The records of the depth-expansion study as arrays over seeds, for claims, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.records import Record, select

Split = Literal["train", "test"]
Value = Callable[[Record], float]
POINTS = ("stage1", "stage2", "pool")
REGIMES = ("augmented", "fitted")


@dataclass(frozen=True)
class RegimeGrid:
    """The networks of one regime, by depth n, width and seed. Only seeds that every network has count."""

    regime: str
    records: tuple[Record, ...]

    @cached_property
    def depths(self) -> list[int]:
        """Those at which every width was run."""
        return [depth for depth in _sorted(self.records, "depth") if self._widths(depth) == self.widths]

    @cached_property
    def widths(self) -> list[int]:
        """All."""
        return _sorted(self.records, "width")

    @cached_property
    def seeds(self) -> list[int]:
        """Those that ended in every network."""
        ended = [{one["seed"] for one in cell} for cell in self._cells.values()]
        return sorted(set.intersection(*ended)) if ended else []

    @property
    def shallow(self) -> int:
        """The least depth."""
        return self.depths[0]

    @property
    def deep(self) -> int:
        """The greatest depth."""
        return self.depths[-1]

    @property
    def middle(self) -> int:
        """The depth in the middle, the lower of two."""
        return self.depths[(len(self.depths) - 1) // 2]

    @property
    def sizes(self) -> list[int]:
        """Of the samples whose mean gradients are compared."""
        return list(self.records[0]["points"]["pool"]["alignment"]["sizes"])

    @property
    def largest(self) -> int:
        """The largest of them."""
        return self.sizes[-1]

    @property
    def middle_size(self) -> int:
        """The size in the middle, the lower of two."""
        return self.sizes[(len(self.sizes) - 1) // 2]

    def of(self, depth: int, width: int, value: Value) -> Array:
        """A value of a network, for each seed."""
        found = {one["seed"]: value(one) for one in self._cells[depth, width]}
        return np.array([found[seed] for seed in self.seeds], dtype=np.float64)

    def over(self, value: Value) -> Array:
        """For all networks: (depths, widths, seeds)."""
        return np.array([[self.of(depth, width, value) for width in self.widths] for depth in self.depths])

    @cached_property
    def _cells(self) -> dict[tuple[int, int], list[Record]]:
        found: dict[tuple[int, int], list[Record]] = {}
        for one in self.records:
            found.setdefault((one["depth"], one["width"]), []).append(one)
        return found

    def _widths(self, depth: int) -> list[int]:
        return _sorted(select(self.records, depth=depth), "width")


@dataclass(frozen=True)
class Regimes:
    """The study's data: a grid for each regime, and how many networks diverged, which are left out."""

    grids: list[RegimeGrid]
    diverged: int

    @staticmethod
    def of(records: Sequence[Record]) -> Regimes:
        """Those regimes in which two depths or more were run at two widths or more."""
        found = [
            RegimeGrid(regime, tuple(one for one in select(records, regime=regime) if "points" in one))
            for regime in REGIMES
        ]
        grids = [grid for grid in found if len(grid.depths) > 1 and len(grid.widths) > 1 and grid.seeds]
        return Regimes(grids, sum("diverged" in one for one in records))


def norm(split: Split, point: str = "pool") -> Value:
    """`‖v̄‖` at a point."""
    return lambda one: one["points"][point][split]["norm"]


def coherence(split: Split, point: str = "pool") -> Value:
    """`‖v̄‖/√trΣ`: the mean gradient in units of a single image's spread."""
    return lambda one: norm(split, point)(one) / np.sqrt(one["points"][point][split]["trace"])


def effective(point: str, split: Split = "train") -> Value:
    """The least C of Assumption 3: `λ_max/(trΣ/d)`."""

    def value(one: Record) -> float:
        found = one["points"][point][split]
        return found["top"] * found["dims"] / found["trace"]

    return value


def loss_on_test(one: Record) -> float:
    """Of a network."""
    return float(one["test_loss"])


def best_gain(one: Record) -> float:
    """The largest gain that a block at any point would have at first, along the preconditioned direction."""
    return max(one["candidates"].get("preconditioned", (math.nan,)))


def failures(point: str, name: str, size: int) -> Value:
    """The share of pairs of samples that do not align (`fresh`, `crossed`), or the `bound` on it."""

    def value(one: Record) -> float:
        found = one["points"][point]["alignment"]
        return found[name][found["sizes"].index(size)]

    return value


def slopes(grid: RegimeGrid, value: Value, *given: Value) -> dict[str, Array]:
    """`log value` regressed on log depth and log width, and on the logarithms of what is given; by seed.

    The slopes are named `depth`, `width` and `given 0`, …; `explained` is R².
    """
    y_DWS = np.log(grid.over(value))
    depth_D1, width_1W = np.log(grid.depths)[:, None], np.log(grid.widths)[None]
    others = [np.log(grid.over(each)) for each in given]
    fits = []
    for seed in range(y_DWS.shape[2]):
        y = y_DWS[:, :, seed].ravel()
        columns = [np.broadcast_to(each, y_DWS.shape[:2]).ravel() for each in (depth_D1, width_1W)]
        columns += [other[:, :, seed].ravel() for other in others]
        fits.append(_least_squares(np.stack([np.ones_like(y), *columns], axis=1), y))
    names = ["depth", "width", *(f"given {place}" for place in range(len(given))), "explained"]
    return dict(zip(names, np.array(fits).T, strict=True))


def explained_by(grid: RegimeGrid, value: Value, by: Value) -> Array:
    """R² of `log value` on `log by` alone, for each seed."""
    found = []
    for y_WD, x_WD in zip(np.log(grid.over(value)).T, np.log(grid.over(by)).T, strict=True):
        columns = np.stack([np.ones(y_WD.size), x_WD.ravel()], axis=1)
        found.append(_least_squares(columns, y_WD.ravel())[-1])
    return np.array(found)


def _least_squares(columns: Array, y: Array) -> list[float]:
    """Slopes without the constant, and R²."""
    solution, *_ = np.linalg.lstsq(columns, y, rcond=None)
    rest = y - columns @ solution
    whole = float(((y - y.mean()) ** 2).sum())
    return [*solution[1:], 1 - float(rest @ rest) / whole if whole else 0.0]


def _sorted(records: Sequence[Record], key: str) -> list[int]:
    return sorted({one[key] for one in records})
