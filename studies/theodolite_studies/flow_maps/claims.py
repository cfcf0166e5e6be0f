"""What the study of flow maps claims, with thresholds that were written down before the runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from theodolite_studies.flow_maps.setting import ARMS, MAPS
from theodolite_studies.framework.claims import Claim, Decide, Observation, Observe, at_least, at_most, per
from theodolite_studies.framework.records import Record, select

LEVEL = 0.05
"""Of Student's t, one-sided."""
below: Callable[..., Decide] = partial(at_most, level=LEVEL)
Read = Callable[[Record], float | None]


def jump(place: int) -> Read:
    """The error of the map at a place among the numbers of jumps."""
    return lambda record: record["map"][place]


def euler(place: int) -> Read:
    """The same of Euler's method on the velocity."""
    return lambda record: record["euler"][place]


def by_seed(records: Iterable[Record], part: str, kind: str, read: Read) -> dict[int, float]:
    """A value of one arm for each seed; infinite where it diverged."""
    found = {}
    for record in select(records, part=part, kind=kind):
        value = None if record["diverged"] else read(record)
        found[record["seed"]] = math.inf if value is None else value
    return found


def ratio(
    first: tuple[str, Read], second: tuple[str, Read], name: str, part: str = "mixture"
) -> Callable[[Sequence[Record]], Observation | None]:
    """A value of one arm over that of another, for the seeds that both have; None if there are none."""

    def observe(records: Sequence[Record]) -> Observation | None:
        one, other = (by_seed(records, part, *each) for each in (first, second))
        seeds = sorted(one.keys() & other.keys())
        with np.errstate(invalid="ignore"):
            values = np.array([one[seed] for seed in seeds]) / np.array([other[seed] for seed in seeds])
        return Observation(name, values) if seeds else None

    return observe


def judged_alike(records: Sequence[Record]) -> list[Record]:
    """Networks of images that diverged or that one classifier judged, the one that judged most of them.

    Distances in the features of different classifiers cannot be compared.
    """
    images = select(records, part="dit-fashion")
    judges = Counter(record.get("classifier") for record in images if not record["diverged"])
    most = judges.most_common(1)[0][0] if judges else None
    return [one for one in images if one["diverged"] or one.get("classifier") == most]


def _distances(first: tuple[str, Read], second: tuple[str, Read], name: str) -> Observe:
    """A feature distance of one arm over that of another."""
    compared = ratio(first, second, name, "dit-fashion")
    return lambda records: _all(compared)(judged_alike(records))


def _all(*ratios: Callable[[Sequence[Record]], Observation | None]) -> Observe:
    return lambda records: [found for each in ratios if (found := each(records)) is not None]


def near(records: Sequence[Record]) -> Observation | None:
    """The error of one Lagrangian jump."""
    found = by_seed(records, "mixture", "lagrangian", jump(0))
    return Observation("lagrangian", np.array(list(found.values()))) if found else None


def apart(records: Sequence[Record]) -> Observation | None:
    """The largest over the smallest error at 16 jumps, or 16 Euler steps of flow matching, by seed."""
    errors = [by_seed(records, "mixture", kind, jump(-1)) for kind in MAPS]
    errors.append(by_seed(records, "mixture", "matching", euler(-1)))
    seeds = sorted(set.intersection(*(set(each) for each in errors)))
    values = [max(each[seed] for each in errors) / min(each[seed] for each in errors) for seed in seeds]
    return Observation("largest over smallest", np.array(values)) if seeds else None


def _gradients(records: Sequence[Record]) -> list[Observation]:
    found = []
    for kind in ARMS:
        values = by_seed(records, "mixture", kind, lambda record: record["gradient"])
        if values:
            found.append(Observation(kind, np.array(list(values.values()))))
    return found


def _decades(observe: Observe) -> Observe:
    """log10 of every value: gradient norms of seeds differ by factors, up to fifteen."""
    return lambda records: [Observation(each.where, np.log10(each.values)) for each in observe(records)]


def _cost(kinds: Sequence[str]) -> Observe:
    """The time of a step over that of matching, at each size."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        return [
            Observation(f"{kind}, {each.where}", each.values)
            for kind in kinds
            for each in per("width", partial(_cost_of, kind), "{} wide", part="cost")(records)
        ]

    return observe


def _cost_of(kind: str, record: Record) -> float:
    return float(record["costs"][kind])


RATIOS = {
    "lagrangian/uniform": ratio(
        ("lagrangian", jump(0)), ("progressive-uniform", jump(0)), "lagrangian/uniform"
    ),
    "lagrangian/eulerian": ratio(("lagrangian", jump(0)), ("eulerian", jump(0)), "lagrangian/eulerian"),
    "eulerian/uniform": ratio(("eulerian", jump(0)), ("progressive-uniform", jump(0)), "eulerian/uniform"),
    "lagrangian/one Euler step": ratio(
        ("lagrangian", jump(0)), ("matching", euler(0)), "lagrangian/one Euler step"
    ),
    "lagrangian/four Euler steps": ratio(
        ("lagrangian", jump(0)), ("matching", euler(2)), "lagrangian/four Euler steps"
    ),
    "lagrangian/longer midpoint": ratio(
        ("lagrangian", jump(0)), ("progressive-midpoint-long", jump(0)), "lagrangian/longer midpoint"
    ),
    "lagrangian/unstopped": ratio(
        ("lagrangian", jump(0)), ("lagrangian-unstopped", jump(0)), "lagrangian/unstopped"
    ),
    "eulerian/unstopped": ratio(("eulerian", jump(0)), ("eulerian-unstopped", jump(0)), "eulerian/unstopped"),
}
"""Errors of one jump over others, on the mixture, by name."""

TESTS = {
    "one lagrangian jump": (near, 0.25),
    "largest over smallest, 16 jumps": (apart, 2.0),
    "lagrangian/uniform": (RATIOS["lagrangian/uniform"], 0.7),
    "lagrangian/eulerian": (RATIOS["lagrangian/eulerian"], 1.0),
    "eulerian/uniform": (RATIOS["eulerian/uniform"], 1.0),
    "lagrangian/one Euler step": (RATIOS["lagrangian/one Euler step"], 0.2),
    "lagrangian/four Euler steps": (RATIOS["lagrangian/four Euler steps"], 1.0),
    "lagrangian/longer midpoint": (RATIOS["lagrangian/longer midpoint"], 1.0),
    "lagrangian/unstopped": (RATIOS["lagrangian/unstopped"], 1.0),
    "eulerian/unstopped": (RATIOS["eulerian/unstopped"], 1.0),
}
"""What the claims about errors on the mixture test, and the threshold of each."""

MIXTURE = (
    Claim(
        "one Lagrangian jump is near the exact map",
        "one step suffices",
        "mean distance ≤ 0.25",
        below(0.25, _all(near)),
    ),
    Claim(
        "it is nearer than a progressive one",
        "KL 0.086 to 0.111",
        "≤ 0.7 × progressive-uniform",
        below(0.7, _all(RATIOS["lagrangian/uniform"])),
    ),
    Claim(
        "an Eulerian jump is between the two",
        "KL 0.098",
        "both ratios ≤ 1",
        below(1.0, _all(RATIOS["lagrangian/eulerian"], RATIOS["eulerian/uniform"])),
    ),
    Claim(
        "with 16 jumps all are alike, and like Euler",
        "KL 0.068 to 0.075",
        "within a factor of 2",
        below(2.0, _all(apart)),
    ),
    Claim(
        "one Lagrangian jump is better than one Euler step",
        "few-step sampling",
        "≤ 0.2 ×",
        below(0.2, _all(RATIOS["lagrangian/one Euler step"])),
    ),
    Claim(
        "it replaces four Euler steps",
        "few-step sampling",
        "≤ 1 ×",
        below(1.0, _all(RATIOS["lagrangian/four Euler steps"])),
    ),
    Claim(
        "progressive training of equal time does not catch up",
        "not said",
        "≤ 1 × midpoint of 3 × steps",
        below(1.0, _all(RATIOS["lagrangian/longer midpoint"])),
    ),
    Claim(
        "stopping gradients helps one jump",
        "used throughout",
        "≤ 1 × without",
        below(1.0, _all(RATIOS["lagrangian/unstopped"], RATIOS["eulerian/unstopped"])),
    ),
    Claim(
        "gradients stay bounded",
        "stable in the plane",
        "largest norm ≤ 10: 1 decade",
        below(1.0, _decades(_gradients), unit=" decades"),
    ),
    Claim(
        "a progressive step costs little more than matching",
        "no derivatives",
        "≤ 1.8 ×; counted 1.6 ×",
        below(1.8, _cost(MAPS[2:])),
    ),
    Claim(
        "a step with derivatives costs no more than three",
        "forward mode",
        "≤ 3 ×; counted 1.8 × and 2.0 ×",
        below(3.0, _cost(MAPS[:2])),
    ),
)

IMAGES = (
    Claim(
        "images: one Lagrangian jump is better than one Euler step",
        "few-step sampling",
        "feature distance ≤ 0.5 ×",
        below(0.5, _distances(("lagrangian", jump(0)), ("matching", euler(0)), "lagrangian/Euler")),
    ),
    Claim(
        "images: it replaces four Euler steps",
        "few-step sampling",
        "feature distance ≤ 1 ×",
        below(1.0, _distances(("lagrangian", jump(0)), ("matching", euler(2)), "lagrangian/Euler")),
    ),
    Claim(
        "images: it is better than a progressive one",
        "FID 8.1 to 12.8",
        "feature distance ≤ 1 ×",
        below(
            1.0,
            _distances(("lagrangian", jump(0)), ("progressive-midpoint", jump(0)), "lagrangian/midpoint"),
        ),
    ),
    Claim(
        "images: the Eulerian loss is unstable",
        "unstable",
        "largest gradient ≥ 10 × Lagrangian: 1 decade",
        at_least(
            1.0,
            _decades(
                _all(
                    ratio(
                        ("eulerian", lambda record: record["gradient"]),
                        ("lagrangian", lambda record: record["gradient"]),
                        "eulerian/lagrangian",
                        "dit-fashion",
                    )
                )
            ),
            unit=" decades",
            level=LEVEL,
        ),
    ),
)

CLAIMS = (*MIXTURE, *IMAGES)
