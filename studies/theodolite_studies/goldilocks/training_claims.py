"""What the paper says about curvature and training, and what would make it hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case, Claim, settled
from theodolite_studies.goldilocks.course import TEMPERATURES
from theodolite_studies.goldilocks.curves import Accuracies, Array, Zone, accuracies, curve, zone
from theodolite_studies.goldilocks.networks import NORMED, RESNET, TRAINED, Column

POINT = 0.01
"""Of accuracy."""
BEYOND = 3.0
"""Decades above the zone in which a decline is looked at."""
NOWHERE = Zone(math.inf, -math.inf, math.nan, math.nan)
PLAIN: tuple[Column, ...] = ("A", "B", "C")
ANY: tuple[Column, ...] = ("A", "B", "C", "D", "E")


def training_claims(records: Sequence[Record]) -> Iterator[Claim]:
    """As far as there are records to tell."""
    found = _Maps(records)
    for claim in (
        *_inside(found),
        *_outside(found),
        *_mirrors(found),
        *_decline(found),
        *_scale(found),
        *_adam(found),
        *_course(records),
    ):
        if claim is not None:
            yield claim


class _Maps:
    """Maps of accuracy by part and column, and the zone along T."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def map(self, part: str, column: Column, rule: str | None = None) -> Accuracies | None:
        """One map of a part."""
        key: dict[str, object] = {"part": part, "column": column}
        if part == "scale":
            key["rule"] = rule or ("normed" if column in NORMED else "homogeneous")
        return accuracies(self._records, **key)

    def zone(self, column: Column, *, network: str | None = None) -> Zone | None:
        """Along T, of the network that is trained in this column."""
        name = network or TRAINED[column].name
        return zone(curve(self._records, part="zone", network=name, column=column, row="temperature"))

    def cases(
        self, part: str, columns: Sequence[Column], number: Callable[[Accuracies, Zone], Array]
    ) -> list[Case]:
        """`number` of each column that was trained, and whose zone leaves some temperatures to compare with.

        Where the excess has no positive peak there is no zone, and all is outside.
        """
        cases = []
        for column in columns:
            mine, its_zone = self.map(part, column), self.zone(column)
            if column in NORMED and its_zone is None and self.is_measured(column):
                its_zone = NOWHERE
            if mine is None or its_zone is None:
                continue
            inside = its_zone.holds(mine.at)
            if not inside.all() and (inside.any() or column in NORMED):
                cases.append(Case(column, number(mine, its_zone)))
        return cases

    def is_measured(self, column: Column) -> bool:
        """Was its curvature measured?"""
        name = TRAINED[column].name
        return any(
            (record["part"], record["network"], record["column"]) == ("zone", name, column)
            for record in self._records
        )


def _claim(
    claim: str, paper: str, threshold: str, cases: Sequence[Case], *, limit: float, below: bool = True
) -> Claim | None:
    if not cases:
        return None
    return settled(claim, paper, threshold, cases, limit=limit, below=below)


def _inside(found: _Maps) -> Iterator[Claim | None]:
    for kind in ("train", "test"):
        yield _claim(
            f"A–C: the best {kind} accuracy is inside the zone",
            "near the curvature peak",
            "best outside − best inside ≤ 0.005",
            found.cases("temperature", PLAIN, _outside_less_inside(kind)),
            limit=0.5 * POINT,
        )
    yield _claim(
        "A–C: over all η₀ training goes better inside the zone",
        "strong alignment",
        "mean train accuracy inside − outside ≥ 0.05",
        found.cases("temperature", PLAIN, _mean_inside_less_outside),
        limit=0.05,
        below=False,
    )


def _outside(found: _Maps) -> Iterator[Claim | None]:
    yield _claim(
        "D, E: LayerNorm reaches its best accuracy outside the zone too",
        "stable over a wide range",
        "best − best outside ≤ 0.02 (train)",
        found.cases("temperature", NORMED, _best_less_outside),
        limit=2 * POINT,
    )
    yield _claim(
        "D, E: and does so at most temperatures outside",
        "stable over a wide range",
        "within 0.02 of the best at ≥ half of the T outside",
        found.cases("temperature", NORMED, _share_of_good_outside),
        limit=0.5,
        below=False,
    )
    pairs = []
    for column in NORMED:
        mine, other = found.map("temperature", column), found.map("temperature", "C")
        if mine is not None and other is not None and len(mine.train) == len(other.train):
            pairs.append(Case(column, _share_of_good(mine) - _share_of_good(other)))
    yield _claim(
        "D, E: good at more temperatures than C",
        "stable where C declines",
        "share of T within 0.02 of the best, less C's > 0",
        pairs,
        limit=0.0,
        below=False,
    )


def _mirrors(found: _Maps) -> Iterator[Claim | None]:
    cases = []
    for column in ANY:
        mine = found.map("temperature", column)
        if mine is not None:
            pairs = zip(mine.train, mine.test, strict=True)
            values = [np.corrcoef(train.ravel(), test.ravel())[0, 1] for train, test in pairs]
            cases.append(Case(column, np.array(values)))
    yield _claim(
        "A–E: test accuracy mirrors train accuracy",
        "same patterns",
        "correlation over T and η₀ ≥ 0.9",
        cases,
        limit=0.9,
        below=False,
    )


def _decline(found: _Maps) -> Iterator[Claim | None]:
    residual = found.map("temperature", "C")
    its_zone = found.zone("C")
    for part, network, said in (
        ("temperature", TRAINED["B"].name, "B, LeNet-300-100"),
        ("neighbours", RESNET.name, "B of the same network"),
    ):
        other, other_zone = found.map(part, "B"), found.zone("B", network=network)
        if residual is None or other is None or its_zone is None or other_zone is None:
            continue
        if len(residual.train) != len(other.train):
            continue
        yield _claim(
            f"C declines more sharply above the zone than {said}",
            "sharper decline",
            "drop in the 3 decades above, C's less B's ≥ 0.02",
            [Case("C", _drop(residual, its_zone) - _drop(other, other_zone))],
            limit=2 * POINT,
            below=False,
        )


def _scale(found: _Maps) -> Iterator[Claim | None]:
    mine, other = found.map("scale", "A"), found.map("temperature", "A")
    if mine is not None and other is not None and mine.train.shape == other.train.shape:
        # With L = 3 the same places, in the other direction.
        difference = np.abs(mine.train - other.train[:, ::-1]).mean((1, 2))
        yield _claim(
            "A: α trains as T = α^-L does",
            "similar trends",
            "mean difference of train accuracy ≤ 0.02",
            [Case("A", difference)],
            limit=2 * POINT,
        )
    cases = []
    for column in NORMED:
        scaled, tempered = found.map("scale", column), found.map("temperature", column)
        if scaled is not None and tempered is not None and len(scaled.train) == len(tempered.train):
            hot = tempered.best()[:, tempered.at > 4.5].mean(1)
            cases.append(Case(column, hot - scaled.best()[:, scaled.at < -1.9].mean(1)))
    yield _claim(
        "D, E: small α trains worse than large T",
        "unstable at small α, stable at large T",
        "best train accuracy at T > 10⁴ less at α ≤ 10⁻² ≥ 0.1",
        [case for case in cases if not np.isnan(case.values).any()],
        limit=0.1,
        below=False,
    )
    by_identity, usual = found.map("scale", "C", "identity"), found.map("scale", "C")
    if by_identity is not None and usual is not None and len(by_identity.train) == len(usual.train):
        small = np.isin(usual.at, by_identity.at)
        gain = by_identity.train.mean((1, 2)) - usual.train[:, small].mean((1, 2))
        yield _claim(
            "C: for α < 1 the identity path's rule, α^(2−L+ℒ)·η₀, trains better than α^(2−L)·η₀",
            "the appropriate rate",
            "mean train accuracy over α < 1 and η₀ higher by ≥ 0.02",
            [Case("C", gain)],
            limit=2 * POINT,
            below=False,
        )


def _adam(found: _Maps) -> Iterator[Claim | None]:
    cases = []
    for column in ANY:
        mine, other = found.map("adam", column), found.map("temperature", column)
        if mine is not None and other is not None and len(mine.train) == len(other.train):
            cases.append(Case(column, _share_of_good(mine) - _share_of_good(other)))
    yield _claim(
        "A–E: Adam is good at more temperatures than gradient descent",
        "– (may escape flat regions)",
        "share of T within 0.02 of the best, less descent's > 0",
        cases,
        limit=0.0,
        below=False,
    )
    yield _claim(
        "A–C: with Adam too the best train accuracy is inside the zone",
        "–",
        "best outside − best inside ≤ 0.005",
        found.cases("adam", PLAIN, _outside_less_inside("train")),
        limit=0.5 * POINT,
    )


def _course(records: Sequence[Record]) -> Iterator[Claim | None]:
    drawn, grown = [], []
    for column in ANY:
        start = zone(
            curve(records, part="zone", network=TRAINED[column].name, column=column, row="temperature")
        )
        for at in TEMPERATURES:
            followed = curve(records, part="course", column=column, temperature=at)
            if followed is None or len(followed.at) < 2:
                continue
            where = f"{column}, T = 10^{at:g}"
            if start is not None and column in PLAIN and not start.low <= at <= start.high:
                drawn.append(Case(where, followed["excess"][:, -1] / start.peak))
            if at == 0:
                share = followed["frobenius of G"] / followed["frobenius of S"]
                grown.append(Case(where, np.log10(share[:, -1] / share[:, 0])))
    yield _claim(
        "A–C: training from outside leads into the zone",
        "observed by Fort and Scherlis",
        "last excess ≥ half of the peak at the start",
        drawn,
        limit=0.5,
        below=False,
    )
    yield _claim(
        "A–E: from inside, training makes G prevail over S",
        "–",
        "log10 of ‖G‖/‖S‖, last less first > 0",
        grown,
        limit=0.0,
        below=False,
    )


def _outside_less_inside(kind: str) -> Callable[[Accuracies, Zone], Array]:
    def difference(mine: Accuracies, its_zone: Zone) -> Array:
        best, inside = mine.best(kind), its_zone.holds(mine.at)
        result: Array = best[:, ~inside].max(1) - best[:, inside].max(1)
        return result

    return difference


def _mean_inside_less_outside(mine: Accuracies, its_zone: Zone) -> Array:
    inside = its_zone.holds(mine.at)
    result: Array = mine.train[:, inside].mean((1, 2)) - mine.train[:, ~inside].mean((1, 2))
    return result


def _best_less_outside(mine: Accuracies, its_zone: Zone) -> Array:
    best = mine.best()
    result: Array = best.max(1) - best[:, ~its_zone.holds(mine.at)].max(1)
    return result


def _share_of_good_outside(mine: Accuracies, its_zone: Zone) -> Array:
    result: Array = _good(mine)[:, ~its_zone.holds(mine.at)].mean(1)
    return result


def _share_of_good(mine: Accuracies) -> Array:
    result: Array = _good(mine).mean(1)
    return result


def _good(mine: Accuracies) -> Array:
    """(seeds, places): is the accuracy there, with the best learning rate, within 0.02 of the best?"""
    best = mine.best()
    result: Array = (best >= best.max(1, keepdims=True) - 2 * POINT).astype(np.float64)
    return result


def _drop(mine: Accuracies, its_zone: Zone) -> Array:
    """How far the best accuracy falls in the decades above the zone; nan if none of them was trained at."""
    best, inside = mine.best(), its_zone.holds(mine.at)
    above = (mine.at > its_zone.high) & (mine.at <= its_zone.high + BEYOND)
    if not above.any() or not inside.any():
        return np.full(len(best), math.nan)
    result: Array = best[:, inside].max(1) - best[:, above].mean(1)
    return result
