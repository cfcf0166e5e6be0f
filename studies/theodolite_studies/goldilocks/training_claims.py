"""What the paper says about curvature and training, and what would make it hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from theodolite_studies.framework.claims import Array, Claim, Observation, Observe, at_least, at_most
from theodolite_studies.goldilocks.curves import Accuracies, ExcessZone, Measured
from theodolite_studies.goldilocks.setting import COURSE_TEMPERATURES, NORMED, RESNET, TRAINED, Column

POINT = 0.01
"""Of accuracy."""
BEYOND = 3.0
"""Decades above the zone in which a decline is looked at."""
NOWHERE = ExcessZone(math.inf, -math.inf, math.nan, math.nan)
PLAIN: tuple[Column, ...] = ("A", "B", "C")
ANY: tuple[Column, ...] = ("A", "B", "C", "D", "E")


def _zoned(
    part: str, columns: Sequence[Column], number: Callable[[Accuracies, ExcessZone], Array]
) -> Observe:
    """`number` of each column that was trained, and whose zone leaves some temperatures to compare with.

    Where the excess has no positive peak there is no zone, and all is outside.
    """

    def observe(data: Measured) -> list[Observation]:
        found = []
        for column in columns:
            mine, zone = data.map(part, column), data.zone(column)
            if column in NORMED and zone is None and data.curve(TRAINED[column].name, column, "temperature"):
                zone = NOWHERE
            if mine is None or zone is None:
                continue
            inside = zone.holds(mine.at)
            if not inside.all() and (inside.any() or column in NORMED):
                found.append(Observation(column, number(mine, zone)))
        return found

    return observe


def _pairs(
    columns: Sequence[Column],
    first: Callable[[Measured, Column], Accuracies | None],
    second: Callable[[Measured, Column], Accuracies | None],
    number: Callable[[Accuracies, Accuracies], Array],
) -> Observe:
    """`number` of two maps of each column, where both were trained with as many seeds."""

    def observe(data: Measured) -> list[Observation]:
        maps = [(column, first(data, column), second(data, column)) for column in columns]
        return [
            Observation(column, number(one, other))
            for column, one, other in maps
            if one is not None and other is not None and len(one.train) == len(other.train)
        ]

    return observe


def _map(part: str, rule: str | None = None) -> Callable[[Measured, Column], Accuracies | None]:
    return lambda data, column: data.map(part, column, rule)


def _of_c(data: Measured, column: Column) -> Accuracies | None:
    return data.map("temperature", "C")


def _outside_less_inside(kind: str) -> Callable[[Accuracies, ExcessZone], Array]:
    def difference(mine: Accuracies, zone: ExcessZone) -> Array:
        best, inside = mine.best(kind), zone.holds(mine.at)
        return np.asarray(best[:, ~inside].max(1) - best[:, inside].max(1))

    return difference


def _mean_inside_less_outside(mine: Accuracies, zone: ExcessZone) -> Array:
    inside = zone.holds(mine.at)
    return np.asarray(mine.train[:, inside].mean((1, 2)) - mine.train[:, ~inside].mean((1, 2)))


def _best_less_outside(mine: Accuracies, zone: ExcessZone) -> Array:
    best = mine.best()
    return np.asarray(best.max(1) - best[:, ~zone.holds(mine.at)].max(1))


def _good(mine: Accuracies) -> Array:
    """(seeds, places): is the accuracy there, with the best learning rate, within 0.02 of the best?"""
    best = mine.best()
    return (best >= best.max(1, keepdims=True) - 2 * POINT).astype(np.float64)


def _good_outside(mine: Accuracies, zone: ExcessZone) -> Array:
    return np.asarray(_good(mine)[:, ~zone.holds(mine.at)].mean(1))


def _more_good(one: Accuracies, other: Accuracies) -> Array:
    return np.asarray(_good(one).mean(1) - _good(other).mean(1))


def _mirrored(mine: Accuracies, _: Accuracies) -> Array:
    pairs = zip(mine.train, mine.test, strict=True)
    return np.array([np.corrcoef(train.ravel(), test.ravel())[0, 1] for train, test in pairs])


def _decline(part: str, network: str) -> Observe:
    """By how much more C falls above its zone than B does above its own."""

    def observe(data: Measured) -> list[Observation]:
        zones = data.zone("C"), data.zone("B", network)
        maps = data.map("temperature", "C"), data.map(part, "B")
        if zones[0] is None or zones[1] is None or maps[0] is None or maps[1] is None:
            return []
        if len(maps[0].train) != len(maps[1].train):
            return []
        return [Observation("C", _drop(maps[0], zones[0]) - _drop(maps[1], zones[1]))]

    return observe


def _drop(mine: Accuracies, zone: ExcessZone) -> Array:
    """How far the best accuracy falls in the decades above the zone; nan if none of them was trained at."""
    best, inside = mine.best(), zone.holds(mine.at)
    above = (mine.at > zone.high) & (mine.at <= zone.high + BEYOND)
    if not above.any() or not inside.any():
        return np.full(len(best), math.nan)
    return np.asarray(best[:, inside].max(1) - best[:, above].mean(1))


def _alpha_as_temperature(data: Measured) -> list[Observation]:
    mine, other = data.map("scale", "A"), data.map("temperature", "A")
    if mine is None or other is None or mine.train.shape != other.train.shape:
        return []
    # With L = 3 the same places, in the other direction.
    return [Observation("A", np.abs(mine.train - other.train[:, ::-1]).mean((1, 2)))]


def _hot_less_small(data: Measured) -> list[Observation]:
    def number(scaled: Accuracies, tempered: Accuracies) -> Array:
        hot = tempered.best()[:, tempered.at > 4.5].mean(1)
        return np.asarray(hot - scaled.best()[:, scaled.at < -1.9].mean(1))

    found = _pairs(NORMED, _map("scale"), _map("temperature"), number)(data)
    return [each for each in found if not np.isnan(each.values).any()]


def _by_identity(by_identity: Accuracies, usual: Accuracies) -> Array:
    small = np.isin(usual.at, by_identity.at)
    return np.asarray(by_identity.train.mean((1, 2)) - usual.train[:, small].mean((1, 2)))


def _led_inside(data: Measured) -> list[Observation]:
    """The last excess over the peak at the start, of courses from outside the zone."""
    found = []
    for column in PLAIN:
        start = data.zone(column)
        for at in COURSE_TEMPERATURES:
            followed = data.course(column, at)
            if start is None or start.low <= at <= start.high or followed is None or len(followed.at) < 2:
                continue
            values = followed["excess"][:, -1] / start.peak
            found.append(Observation(f"{column}, T = 10^{at:g}", values))
    return found


def _grown(data: Measured) -> list[Observation]:
    """log10 of ‖G‖/‖S‖ at T = 1, last less first."""
    found = []
    for column in ANY:
        followed = data.course(column, 0.0)
        if followed is not None and len(followed.at) > 1:
            share = followed["frobenius of G"] / followed["frobenius of S"]
            found.append(Observation(f"{column}, T = 10^0", np.log10(share[:, -1] / share[:, 0])))
    return found


_BEST_INSIDE = "best outside − best inside ≤ 0.005"
TRAINING_CLAIMS = (
    Claim(
        "A–C: the best train accuracy is inside the zone",
        "near the curvature peak",
        _BEST_INSIDE,
        at_most(0.5 * POINT, _zoned("temperature", PLAIN, _outside_less_inside("train"))),
    ),
    Claim(
        "A–C: the best test accuracy is inside the zone",
        "near the curvature peak",
        _BEST_INSIDE,
        at_most(0.5 * POINT, _zoned("temperature", PLAIN, _outside_less_inside("test"))),
    ),
    Claim(
        "A–C: over all η₀ training goes better inside the zone",
        "strong alignment",
        "mean train accuracy inside − outside ≥ 0.05",
        at_least(0.05, _zoned("temperature", PLAIN, _mean_inside_less_outside)),
    ),
    Claim(
        "D, E: LayerNorm reaches its best accuracy outside the zone too",
        "stable over a wide range",
        "best − best outside ≤ 0.02 (train)",
        at_most(2 * POINT, _zoned("temperature", NORMED, _best_less_outside)),
    ),
    Claim(
        "D, E: and does so at most temperatures outside",
        "stable over a wide range",
        "within 0.02 of the best at ≥ half of the T outside",
        at_least(0.5, _zoned("temperature", NORMED, _good_outside)),
    ),
    Claim(
        "D, E: good at more temperatures than C",
        "stable where C declines",
        "share of T within 0.02 of the best, less C's > 0",
        at_least(0.0, _pairs(NORMED, _map("temperature"), _of_c, _more_good)),
    ),
    Claim(
        "A–E: test accuracy mirrors train accuracy",
        "same patterns",
        "correlation over T and η₀ ≥ 0.9",
        at_least(0.9, _pairs(ANY, _map("temperature"), _map("temperature"), _mirrored)),
    ),
    Claim(
        "C declines more sharply above the zone than B, LeNet-300-100",
        "sharper decline",
        "drop in the 3 decades above, C's less B's ≥ 0.02",
        at_least(2 * POINT, _decline("temperature", TRAINED["B"].name)),
    ),
    Claim(
        "C declines more sharply above the zone than B of the same network",
        "sharper decline",
        "drop in the 3 decades above, C's less B's ≥ 0.02",
        at_least(2 * POINT, _decline("neighbours", RESNET.name)),
    ),
    Claim(
        "A: α trains as T = α^-L does",
        "similar trends",
        "mean difference of train accuracy ≤ 0.02",
        at_most(2 * POINT, _alpha_as_temperature),
    ),
    Claim(
        "D, E: small α trains worse than large T",
        "unstable at small α, stable at large T",
        "best train accuracy at T > 10⁴ less at α ≤ 10⁻² ≥ 0.1",
        at_least(0.1, _hot_less_small),
    ),
    Claim(
        "C: for α < 1 the identity path's rule, α^(2−L+ℒ)·η₀, trains better than α^(2−L)·η₀",
        "the appropriate rate",
        "mean train accuracy over α < 1 and η₀ higher by ≥ 0.02",
        at_least(2 * POINT, _pairs(("C",), _map("scale", "identity"), _map("scale"), _by_identity)),
    ),
    Claim(
        "A–E: Adam is good at more temperatures than gradient descent",
        "– (may escape flat regions)",
        "share of T within 0.02 of the best, less descent's > 0",
        at_least(0.0, _pairs(ANY, _map("adam"), _map("temperature"), _more_good)),
    ),
    Claim(
        "A–C: with Adam too the best train accuracy is inside the zone",
        "–",
        _BEST_INSIDE,
        at_most(0.5 * POINT, _zoned("adam", PLAIN, _outside_less_inside("train"))),
    ),
    Claim(
        "A–C: training from outside leads into the zone",
        "observed by Fort and Scherlis",
        "last excess ≥ half of the peak at the start",
        at_least(0.5, _led_inside),
    ),
    Claim(
        "A–E: from inside, training makes G prevail over S",
        "–",
        "log10 of ‖G‖/‖S‖, last less first > 0",
        at_least(0.0, _grown),
    ),
)
