"""The claims about extrapolation. Thresholds were written down before the run of the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from theodolite.data.two_cylinders import Region
from theodolite_studies.extrapolation.readings import (
    EVERYWHERE,
    NAMES,
    Kind,
    Trainings,
    in_region,
    rank,
)
from theodolite_studies.framework.claims import (
    Claim,
    Observation,
    Observe,
    all_within,
    at_least,
    at_most,
    lower,
    per,
)
from theodolite_studies.framework.paired import less
from theodolite_studies.framework.records import Record, select

LEVEL = 0.05
ALIKE, SERIOUS = 1.5, 2.0
"""An error counts as like that inside up to so many times it, and as worse from so many times on."""
FREE, COSTLY = 1.1, 1.25
"""The same for the error of a network over that of one that was trained everywhere."""
NOT_LOWER = 0.95
"""An error has not fallen if it is above this part of what it was."""
FARTHEST, NEAREST = (0,), (2,)
"""Bins of gaps: 0.2 to 0.3, and 0.4 to 0.5, next to those that are trained."""
UNEQUAL, RANKED, BETTER, KEPT = 1.1, 0.5, 0.1, 0.8

Pairs = Callable[[Trainings], Iterator[tuple[str, Kind, Kind]]]
"""Trainings to be compared, with a name for both."""
_least, _most = partial(at_least, level=LEVEL), partial(at_most, level=LEVEL)


def _doublings(data: Trainings) -> Iterator[tuple[str, Kind, Kind]]:
    for narrow, wide in pairwise(data.setting.widths):
        yield f"width {narrow} to {wide}", {"width": wide}, {"width": narrow}


def _widths(data: Trainings) -> Iterator[tuple[str, Kind, Kind]]:
    first, *_, last = data.setting.widths
    yield f"width {first} to {last}", {"width": last}, {"width": first}


def _more_data(data: Trainings) -> Iterator[tuple[str, Kind, Kind]]:
    for few, many in pairwise(data.setting.nums):
        yield f"{few} to {many} flows", {"num": many}, {"num": few}


def _most_data(data: Trainings) -> Iterator[tuple[str, Kind, Kind]]:
    first, *_, last = data.setting.nums
    yield f"{first} to {last} flows", {"num": last}, {"num": first}


def _flips(data: Trainings) -> Iterator[tuple[str, Kind, Kind]]:
    few = data.setting.nums[0]
    yield f"{few} flows", {"num": few, "flips": True}, {"num": few}


def _rates(data: Trainings) -> Iterator[tuple[str, Kind, Kind]]:
    first, *_, last = data.setting.widths
    for octave in data.setting.octaves:
        both = {"octave": octave}
        yield f"rate × 2^{octave:g}", {"width": last, **both}, {"width": first, **both}


def _against_everywhere(data: Trainings) -> Iterator[tuple[str, Kind, Kind]]:
    for width in data.setting.widths:
        yield f"width {width}", {"width": width}, {"width": width, "gaps": EVERYWHERE}


def _changes(pairs: Pairs, *regions: Region) -> Observe:
    """log2 of the errors of the first of each pair over those of the second."""
    return lambda data: [
        Observation(f"{NAMES[region]}, {label}", values)
        for region in regions
        for label, one, other in pairs(data)
        if len(values := data.octaves(one, other, region))
    ]


def _ratios(pairs: Pairs, region: Region) -> Observe:
    """Errors of the first of each pair over those of the second."""
    return lambda data: [
        Observation(label, values)
        for label, one, other in pairs(data)
        if len(values := data.ratios(one, other, region))
    ]


def _over_inside(region: Region) -> Observe:
    """Errors in a region over those inside, at every width."""

    def over(record: Record) -> float:
        return in_region(record, region) / in_region(record, "trained")

    def observe(data: Trainings) -> list[Observation]:
        found = []
        for width in data.setting.widths:
            if rows := data.of({"width": width}):
                found.append(Observation(f"width {width}", np.array([over(row) for row in rows])))
        return found

    return observe


def _helps_less(data: Trainings) -> list[Observation]:
    """Narrower over inside at the largest width, over the same at the smallest one."""
    ((label, one, other),) = _widths(data)
    values = [data.octaves(one, other, region) for region in ("narrower", "trained")]
    return [Observation(label, np.exp2(less(*values)))] if len(values[0]) else []


def _cost_at_widths(data: Trainings) -> list[Observation]:
    """The cost of missing narrow gaps at the largest width over that at the smallest one, by seed."""
    costs = [data.octaves(one, other, "narrower") for _, one, other in _against_everywhere(data)]
    first, last = data.setting.widths[0], data.setting.widths[-1]
    if not len(costs[0]) or len(costs[0]) != len(costs[-1]):
        return []
    return [Observation(f"width {first} to {last}", np.exp2(less(costs[-1], costs[0])))]


def _cost_at_distances(data: Trainings) -> list[Observation]:
    """The cost of missing gaps at the farthest bin over that at the nearest one."""
    found = []
    for label, one, other in _against_everywhere(data):
        far, near = ([data.errors(kind, bins) for kind in (one, other)] for bins in (FARTHEST, NEAREST))
        seeds = sorted(far[0].keys() & far[1].keys())
        values = [far[0][seed] / far[1][seed] / (near[0][seed] / near[1][seed]) for seed in seeds]
        if values:
            found.append(Observation(label, np.array(values)))
    return found


def _half_of_more_data(data: Trainings) -> list[Observation]:
    """log2 of the errors with mirrored flows over the geometric mean of those without and of more flows."""
    few, more = data.setting.nums[:2]
    found = []
    for region in ("trained", "hole"):
        gain = data.octaves({"num": few, "flips": True}, {"num": few}, region)
        wanted = data.octaves({"num": more}, {"num": few}, region)
        if len(gain) and len(gain) == len(wanted):
            found.append(Observation(NAMES[region], less(gain, wanted / 2)))
    return found


def _of_members(value: Callable[[Record], float], label: str) -> Observe:
    def observe(data: Trainings) -> list[Observation]:
        rows = data.of({}, "ensemble")
        return [Observation(label, np.array([value(row) for row in rows]))] if rows else []

    return observe


def _spread_kept(data: Trainings) -> list[Observation]:
    """Spread over the error of the average beyond, over the same inside."""

    def share(record: Record, region: Region) -> float:
        return in_region(record, region, "spread", "average")

    found = []
    for region in ("narrower", "wider"):
        if rows := data.of({}, "ensemble"):
            values = [share(row, region) / share(row, "trained") for row in rows]
            found.append(Observation(NAMES[region], np.array(values)))
    return found


def _checks(key: str) -> Callable[[Trainings], list[float]]:
    return lambda data: [row[key] for row in select(data.records, part="flow")]


def _orders(data: Trainings) -> list[Observation]:
    return list(per("gap", "order", "gap {}", part="flow")(data.records))


CLAIMS = (
    Claim(
        "the velocity has neither divergence nor curl",
        "–",
        "differences of it vanish as h^≥1.99",
        _least(1.99, _orders),
    ),
    Claim(
        "nothing flows through the cylinders",
        "–",
        "≤ 10⁻¹² of the largest speed",
        all_within(1e-12, _checks("through")),
    ),
    Claim(
        "it is the flow that least squares find",
        "–",
        "off by ≤ 10⁻⁹ of the largest speed",
        all_within(1e-9, _checks("apart")),
    ),
    Claim(
        "more width lowers the error inside",
        "–",
        "log₂ ratio < 0, each doubling",
        lower(_changes(_doublings, "trained")),
    ),
    Claim(
        "more width lowers the error in the hole",
        "–",
        "log₂ ratio < 0, each doubling",
        lower(_changes(_doublings, "hole")),
    ),
    Claim(
        "and so at other learning rates",
        "–",
        "log₂ ratio < 0, in the hole",
        lower(_changes(_rates, "hole")),
    ),
    Claim(
        "more width does not lower the error at narrower gaps",
        "–",
        "error ≥ 0.95 of it at the smallest width",
        _least(NOT_LOWER, _ratios(_widths, "narrower")),
    ),
    Claim(
        "nor at wider gaps",
        "–",
        "error ≥ 0.95 of it at the smallest width",
        _least(NOT_LOWER, _ratios(_widths, "wider")),
    ),
    Claim(
        "more width helps less at narrower gaps than inside",
        "–",
        "narrower/inside grows ≥ 1.1 times",
        _least(UNEQUAL, _helps_less, unit=" ×"),
    ),
    Claim(
        "the error in the hole is like that inside",
        "reconstructed well",
        "≤ 1.5 times it, every width",
        _most(ALIKE, _over_inside("hole"), unit=" ×"),
    ),
    Claim(
        "the error at narrower gaps is much larger",
        "reconstructed well",
        "≥ 2 times it, every width",
        _least(SERIOUS, _over_inside("narrower"), unit=" ×"),
    ),
    Claim(
        "and so at wider gaps",
        "reconstructed well",
        "≥ 2 times it, every width",
        _least(SERIOUS, _over_inside("wider"), unit=" ×"),
    ),
    Claim(
        "in the hole, training everywhere is no better",
        "–",
        "error ≤ 1.1 times that of training everywhere",
        _most(FREE, _ratios(_against_everywhere, "hole"), unit=" ×"),
    ),
    Claim(
        "at narrower gaps it is",
        "–",
        "error ≥ 1.25 times that of training everywhere",
        _least(COSTLY, _ratios(_against_everywhere, "narrower"), unit=" ×"),
    ),
    Claim(
        "and at wider gaps",
        "–",
        "error ≥ 1.25 times that of training everywhere",
        _least(COSTLY, _ratios(_against_everywhere, "wider"), unit=" ×"),
    ),
    Claim(
        "this cost grows with the distance from trained gaps",
        "–",
        "at gaps 0.2 to 0.3 ≥ 1.1 times that at 0.4 to 0.5",
        _least(UNEQUAL, _cost_at_distances, unit=" ×"),
    ),
    Claim(
        "and does not fall with width",
        "–",
        "cost, narrower, ≥ that at the smallest width",
        _least(1.0, _cost_at_widths, unit=" ×"),
    ),
    Claim(
        "more data lower the error inside and in the hole",
        "–",
        "log₂ ratio < 0, each fourfold",
        lower(_changes(_more_data, "trained", "hole")),
    ),
    Claim(
        "more data do not lower the error at narrower gaps",
        "–",
        "error ≥ 0.95 of it with the fewest",
        _least(NOT_LOWER, _ratios(_most_data, "narrower")),
    ),
    Claim(
        "nor do they at wider gaps",
        "–",
        "error ≥ 0.95 of it with the fewest",
        _least(NOT_LOWER, _ratios(_most_data, "wider")),
    ),
    Claim(
        "mirrored flows lower the error inside and in the hole",
        "enough from limited data",
        "log₂ ratio < 0, fewest flows",
        lower(_changes(_flips, "trained", "hole")),
    ),
    Claim(
        "they are worth half of four times the flows",
        "–",
        "log₂ ratio less half of that of more flows ≤ 0",
        _most(0.0, _half_of_more_data),
    ),
    Claim(
        "mirrored flows lower the error beyond too",
        "–",
        "log₂ ratio < 0, fewest flows",
        lower(_changes(_flips, "narrower", "wider")),
    ),
    Claim(
        "the spread of {data.setting.members} networks ranks flows by their error",
        "–",
        "rank correlation ≥ 0.5",
        _least(RANKED, _of_members(lambda row: rank(row, "spread"), "all gaps")),
    ),
    Claim(
        "better than the largest coarse speed does",
        "–",
        "rank correlation higher by ≥ 0.1",
        _least(BETTER, _of_members(lambda row: rank(row, "spread") - rank(row, "speed"), "all gaps")),
    ),
    Claim(
        "beyond, the spread grows as the error does",
        "–",
        "spread/error ≥ 0.8 of that inside",
        _least(KEPT, _spread_kept, unit=" ×"),
    ),
)
