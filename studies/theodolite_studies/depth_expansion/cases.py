"""The numbers that decide the claims of the depth-expansion study: one for each seed of a case."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from theodolite_studies.depth_expansion.values import POINTS, Array, Grid, Value, failures, norm
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case

SIGMAS = 4
"""Standard errors of a share of draws by which it is above a bound for certain: thousands are looked at."""


def by_width(grid: Grid, value: Value, about: str = "") -> list[Case]:
    """A value at each width, its mean over the depths."""
    return [
        Case(
            f"{about}width {width}", np.mean([grid.of(depth, width, value) for depth in grid.depths], axis=0)
        )
        for width in grid.widths
    ]


def deepest_over_shallowest(grid: Grid, value: Value) -> list[Case]:
    """At each width."""
    deep, shallow = grid.depths[-1], grid.depths[0]
    return [
        Case(f"width {width}", grid.of(deep, width, value) / grid.of(shallow, width, value))
        for width in grid.widths
    ]


def widest_over_narrowest(grid: Grid, value: Value, about: str = "") -> list[Case]:
    """At each depth."""
    return [Case(f"{about}n {depth}", wide / narrow) for depth, wide, narrow in _ends(grid, value)]


def widest_less_narrowest(grid: Grid, value: Value, about: str = "") -> list[Case]:
    """At each depth."""
    return [Case(f"{about}n {depth}", wide - narrow) for depth, wide, narrow in _ends(grid, value)]


def early(grid: Grid, middle: int) -> list[Case]:
    """The part of the fall of log‖v̄‖ that is done by a depth; unknown where there is no fall."""
    found = []
    for width in grid.widths:
        first, between, last = (
            np.log(grid.of(depth, width, norm("train")))
            for depth in (grid.depths[0], middle, grid.depths[-1])
        )
        whole = first - last
        found.append(Case(f"width {width}", (first - between) / np.where(whole > 0, whole, math.nan)))
    return found


def above_the_best(grid: Grid, at: int) -> list[Case]:
    """The test loss at a depth less that at the best one, which is chosen by the other seeds."""
    found = []
    for width in grid.widths:
        losses_DS = np.array([grid.of(depth, width, loss_on_test) for depth in grid.depths])
        excess = []
        for seed in range(losses_DS.shape[1]):
            others_DS = np.delete(losses_DS, seed, axis=1) if losses_DS.shape[1] > 1 else losses_DS
            best = int(others_DS.mean(1).argmin())
            excess.append(losses_DS[grid.depths.index(at), seed] - losses_DS[best, seed])
        found.append(Case(f"width {width}", np.array(excess)))
    return found


def flattening(grid: Grid) -> list[Case]:
    """How much of the test loss the last doubling of width takes away, over what the first does."""
    losses_DWS = grid.over(loss_on_test)
    first, last = losses_DWS[:, 0] - losses_DWS[:, 1], losses_DWS[:, -2] - losses_DWS[:, -1]
    return [Case("mean over n", last.mean(0) / first.mean(0))]


def broken_bounds(grid: Grid, name: str) -> tuple[list[str], int]:
    """Where two samples fail to align more often than the bound, for certain; and how many were looked at."""
    broken, count = [], 0
    for one in grid.records:
        for point in POINTS:
            found = one["points"][point]["alignment"]
            for size, share, bound in zip(found["sizes"], found[name], found["bound"], strict=True):
                count += 1
                error = math.sqrt(max(bound * (1 - bound), 1 / found["draws"]) / found["draws"])
                if share > bound + SIGMAS * error:
                    where = f"n {one['depth']} width {one['width']} seed {one['seed']} {point} size {size}"
                    broken.append(f"{where}: {share:.3f} > {bound:.3f}")
    return broken, count


def falling(grid: Grid, point: str, sizes: Sequence[int]) -> list[Case]:
    """Failures between the largest samples less those between the smallest, at each width, mean over n."""

    def value(one: Record) -> float:
        last, first = (failures(point, "crossed", size)(one) for size in (sizes[-1], sizes[0]))
        return last - first

    return by_width(grid, value, f"{point} ")


def loss_on_test(one: Record) -> float:
    """Of a network."""
    return float(one["test_loss"])


def _ends(grid: Grid, value: Value) -> list[tuple[int, Array, Array]]:
    """Depth, and the value at the greatest and the least width."""
    narrow, wide = grid.widths[0], grid.widths[-1]
    return [(depth, grid.of(depth, wide, value), grid.of(depth, narrow, value)) for depth in grid.depths]
