"""What the study of basins has to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from theodolite_studies.basins.shifts import CRITERIA, SHIFTS
from theodolite_studies.framework.claims import Array, Claim, Observation, at_least, at_most, per
from theodolite_studies.framework.records import Record, distinct, select

Read = Callable[[Record, str], float]
"""A number of a network and a shift."""
LEVEL = 0.05
FIRST_CRITERION = 1
"""In a list of a record of shifts, after the accuracy; the largest eigenvalue stands last."""
BASE = {"width": 16, "classes": 4, "separation": 3.0}
MOVED = [name for name in SHIFTS if name != "clean"]


def lines_of(records: Sequence[Record], pair: str, value: str = "rise", **only: Any) -> list[Observation]:
    """A value of each seed, for each network and each choice of rates."""
    return list(per(("network", "rates"), value, "{}, {}", part="lines", pair=pair, **only)(records))


def _beside_other_starts(records: Sequence[Record]) -> list[Observation]:
    """The barrier of large and small batches from one start over that of two starts, in the loss itself."""

    def risen(record: Record) -> float:
        return float(record["rise"] * max(record["ends"]))

    found = []
    for near, far in zip(
        *(
            per(("network", "rates"), risen, "{}, {}", part="lines", pair=pair)(records)
            for pair in ("same start", "different starts")
        ),
        strict=True,
    ):
        found.append(Observation(near.where, near.values / far.values))
    return found


def _excess(records: Sequence[Record]) -> list[Observation]:
    """How much higher a barrier is with stored statistics of batch norms."""
    return [
        Observation(f"{pair}, {one.where}", one.values)
        for pair in ("same start", "different starts")
        for one in per(
            "rates", lambda row: row["stored"] - row["rise"], part="lines", pair=pair, network="normed"
        )(records)
    ]


def spectra_of(records: Sequence[Record], **change: float) -> list[Record]:
    """The records of the base setting with some values changed, by seed."""
    return sorted(select(records, part="spectra", **BASE | change), key=lambda row: row["seed"])


def compared(
    records: Sequence[Record],
    key: str,
    ends: tuple[float, float],
    value: Callable[[Record, Record], float],
) -> list[Observation]:
    """A number from the spectra of each seed at two values of a key."""
    first, second = ({row["seed"]: row for row in spectra_of(records, **{key: end})} for end in ends)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return []
    values = [value(first[seed], second[seed]) for seed in seeds]
    return [Observation(f"{key} {ends[0]:g} to {ends[1]:g}", np.array(values))]


def _off_classes(records: Sequence[Record]) -> list[Observation]:
    """How far the number of outliers is from one less than the classes."""
    rows = select(records, part="spectra", width=BASE["width"], separation=BASE["separation"])
    return list(per("classes", lambda row: abs(row["outliers"] - row["classes"] + 1), "{} classes")(rows))


def _slope_off_one(records: Sequence[Record]) -> list[Observation]:
    rows = select(records, part="spectra", width=BASE["width"], separation=BASE["separation"])
    values = []
    for seed in distinct(rows, "seed"):
        own = [(row["classes"], row["outliers"]) for row in select(rows, seed=seed)]
        if len(own) > 1:
            values.append(abs(float(stats.linregress(*np.array(own, dtype=float).T).slope) - 1))
    return [Observation("2 to 8 classes", np.array(values))] if values else []


def _widened(value: Callable[[Record, Record], float]) -> Callable[[Sequence[Record]], list[Observation]]:
    return lambda records: compared(records, "width", (8, 32), value)


def _new_near(narrow: Record, wide: Record) -> float:
    """The share of the eigenvalues that came with the width that are near zero."""
    return float((wide["near"] - narrow["near"]) / (wide["size"] - narrow["size"]))


def _share_change(one: Record, other: Record) -> float:
    return float(abs(one["near"] / one["size"] - other["near"] / other["size"]))


def _shares(records: Sequence[Record]) -> list[Observation]:
    return [
        *compared(records, "separation", (4.0, 2.0), _share_change),
        *compared(records, "classes", (2, 8), _share_change),
    ]


def _by_configuration(value: Callable[[Record], float]) -> Callable[[Sequence[Record]], list[Observation]]:
    label = "width {}, {} classes, separation {:g}"
    return lambda records: list(
        per(("width", "classes", "separation"), value, label, part="spectra")(records)
    )


def networks_of(records: Sequence[Record]) -> dict[int, list[Record]]:
    """The networks of each seed whose training did not diverge."""
    rows = select(records, part="shifts", train=lambda found: found is not None)
    return {seed: select(rows, seed=seed) for seed in distinct(rows, "seed")}


def rank_correlation(one: Iterable[float], other: Iterable[float]) -> float:
    """Spearman's; nan where one of both is the same everywhere.

    >>> rank_correlation([1.0, 2.0, 5.0], [0.3, 0.2, 0.1])
    -1.0
    """
    first, second = stats.rankdata(list(one)), stats.rankdata(list(other))
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    return round(float(np.corrcoef(first, second)[0, 1]), 12)


def within_networks(records: Sequence[Record]) -> list[Observation]:
    """Over the sets of data: a criterion and the accuracy on the same data, a mean over networks."""
    found = []
    for place, criterion in enumerate(CRITERIA, FIRST_CRITERION):
        values = [
            np.mean(
                [
                    rank_correlation([row[name][place] for name in SHIFTS], [row[name][0] for name in SHIFTS])
                    for row in rows
                ]
            )
            for rows in networks_of(records).values()
        ]
        found.append(Observation(criterion, np.array(values)))
    return [one for one in found if len(one.values)]


def over_networks(records: Sequence[Record], first: Read, second: Read | None = None) -> list[Observation]:
    """Over the networks of a seed: two numbers, the second by default the accuracy, for each shift."""
    other = second or (lambda row, shift: float(row[shift][0]))
    by_seed = networks_of(records)
    found = []
    for shift in MOVED if by_seed else ():
        values = [
            rank_correlation([first(row, shift) for row in rows], [other(row, shift) for row in rows])
            for rows in by_seed.values()
        ]
        found.append(Observation(shift, np.array(values)))
    return found


def in_training(place: int) -> Read:
    """A number of a network on the data that it was trained on."""
    return lambda row, shift: float(row["train"][place])


def _change(place: int) -> Read:
    """From clean to shifted data."""
    return lambda row, shift: float(row[shift][place] - row["clean"][place])


def _of_criteria(found: Callable[[int], Sequence[Observation]]) -> list[Observation]:
    return [
        Observation(f"{criterion}, {one.where}", one.values)
        for place, criterion in enumerate(CRITERIA, FIRST_CRITERION)
        for one in found(place)
    ]


def _predictions(records: Sequence[Record]) -> list[Observation]:
    """A criterion on the data of training, and the accuracy on shifted data."""
    return _of_criteria(lambda place: over_networks(records, in_training(place)))


def _changes(records: Sequence[Record]) -> list[Observation]:
    """The change of a criterion from clean to shifted data, and the change of the accuracy."""
    return _of_criteria(lambda place: over_networks(records, _change(place), _change(0)))


def _against_clean_accuracy(records: Sequence[Record]) -> list[Observation]:
    """The strength of a criterion's correlation less that of the accuracy on clean data."""
    clean: dict[str, Array] = {
        one.where: one.values for one in over_networks(records, lambda row, _: row["clean"][0])
    }
    return [
        Observation(one.where, np.abs(one.values) - np.abs(clean[one.where.rpartition(", ")[2]]))
        for one in _predictions(records)
    ]


CLAIMS = (
    Claim(
        "small batches after large ones: no barrier on the line",
        "one basin",
        "rise ≤ 0.01 of the loss at the higher end",
        at_most(0.01, lambda records: lines_of(records, "continued"), level=LEVEL),
    ),
    Claim(
        "large and small batches from one start, low rates: hardly a barrier",
        "one basin",
        "rise ≤ 0.5 of it",
        at_most(0.5, lambda records: lines_of(records, "same start", rates="low rates"), level=LEVEL),
    ),
    Claim(
        "large and small batches from one start, high rates: hardly a barrier",
        "one basin",
        "rise ≤ 0.5 of it",
        at_most(0.5, lambda records: lines_of(records, "same start", rates="high rates"), level=LEVEL),
    ),
    Claim(
        "different starts: a barrier",
        "not said",
        "rise ≥ 10 of it",
        at_least(10, lambda records: lines_of(records, "different starts"), level=LEVEL),
    ),
    Claim(
        "from one start the barrier is far lower than from two",
        "not said",
        "≤ 0.1 of that",
        at_most(0.1, _beside_other_starts, level=LEVEL),
    ),
    Claim(
        "batch norm: stored statistics, interpolated, raise the barrier",
        "not said",
        "by ≥ 0.05 of the loss at the higher end",
        at_least(0.05, _excess, level=LEVEL),
    ),
    Claim(
        "as many outliers as classes less one",
        "set by the data",
        "off by ≤ 1",
        at_most(1.0, _off_classes, level=LEVEL),
    ),
    Claim(
        "one more class is one more outlier",
        "set by the data",
        "|slope − 1| ≤ 0.25",
        at_most(0.25, _slope_off_one, level=LEVEL),
    ),
    Claim(
        "width leaves the number of outliers",
        "width only scales the bulk",
        "changes by ≤ 1",
        at_most(1.0, _widened(lambda one, other: abs(one["outliers"] - other["outliers"])), level=LEVEL),
    ),
    Claim(
        "width leaves their size",
        "width only scales the bulk",
        "mean changes by ≤ 2×",
        at_most(1.0, _widened(lambda one, other: abs(math.log2(other["sharp"] / one["sharp"]))), level=LEVEL),
    ),
    Claim(
        "what comes with the width is near zero",
        "width only scales the bulk",
        "≥ 0.95 of the new eigenvalues",
        at_least(0.95, _widened(_new_near), level=LEVEL),
    ),
    Claim(
        "classes that are less apart: larger outliers",
        "changes the outliers",
        "mean ≥ 2× that at separation 4",
        at_least(
            2.0,
            lambda records: compared(
                records, "separation", (4.0, 2.0), lambda one, other: float(other["sharp"] / one["sharp"])
            ),
            level=LEVEL,
        ),
    ),
    Claim(
        "data leave the bulk",
        "only the outliers change",
        "the share near zero changes by ≤ 0.05",
        at_most(0.05, _shares, level=LEVEL),
    ),
    Claim(
        "`outliers` counts what its rule gives on the exact spectrum",
        "–",
        "off by ≤ 0.5",
        at_most(
            0.5,
            _by_configuration(lambda row: abs(row["wide gaps"] - row["wide gaps by probe"])),
            level=LEVEL,
        ),
    ),
    Claim(
        "`density` has the exact share near zero",
        "–",
        "off by ≤ 0.02",
        at_most(
            0.02,
            _by_configuration(lambda row: abs(row["near"] / row["size"] - row["near by density"])),
            level=LEVEL,
        ),
    ),
    Claim(
        "and the exact r_e",
        "–",
        "off by ≤ 5 %",
        at_most(
            0.05, _by_configuration(lambda row: abs(row["r_e by density"] / row["r_e"] - 1)), level=LEVEL
        ),
    ),
    Claim(
        "and the exact K_H1",
        "–",
        "off by ≤ 25 %",
        at_most(
            0.25, _by_configuration(lambda row: abs(row["k_h1 by density"] / row["k_h1"] - 1)), level=LEVEL
        ),
    ),
    Claim(
        "over sets of data, accuracy falls where a criterion rises",
        "changes correlate",
        "rank correlation ≤ −0.5 in a network",
        at_most(-0.5, within_networks, level=LEVEL),
    ),
    Claim(
        "over networks, it falls more where a criterion rises more",
        "changes correlate",
        "rank correlation ≤ −0.5",
        at_most(-0.5, _changes, level=LEVEL),
    ),
    Claim(
        "a criterion on the data of training predicts accuracy on shifted data",
        "an estimate of it",
        "rank correlation ≤ −0.5",
        at_most(-0.5, _predictions, level=LEVEL),
    ),
    Claim(
        "and predicts it as well as the accuracy on clean data does",
        "not said",
        "|correlation| less that one's ≥ 0",
        at_least(0.0, _against_clean_accuracy, level=LEVEL),
    ),
)
