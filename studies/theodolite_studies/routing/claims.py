"""The claims of the routing study. Thresholds were written down before anything was run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from theodolite_studies.framework.claims import Array, Claim, Observation, Observe, at_least, at_most, lower
from theodolite_studies.routing.arms import (
    ADD,
    ROUTED,
    TIME_ROUTED,
    Arm,
    Arms,
    Symptom,
    branch_growth,
    gradient_fall,
    inflation,
    largest_cosine,
    median_cosine,
    span,
)

LEVEL = 0.05
GROWN, FALLEN, ALIKE = 1.5, 1.5, 0.96
"""From which inflation, fall of the gradient and cosine on a symptom is there."""
HALF = 0.5
"""Of the plain network's: up to which it counts as cured."""
VARIES = 1.2
"""From which ratio of two times on a symptom depends on time."""


def _plain(values: Callable[[Arm], dict[int, float]]) -> Observe:
    """A number of the plain network for each seed."""

    def observe(arms: Arms) -> list[Observation]:
        found = values(arms.found[ADD]) if ADD in arms.found else {}
        return [Observation(ADD, np.array([*found.values()]))] if found else []

    return observe


def _mean(symptom: Symptom) -> Observe:
    return _plain(lambda arm: arm.symptom(symptom))


def _growth_in_training(arm: Arm) -> dict[int, float]:
    """Inflation at the end over that on the way, on the images that both were read on."""
    early, late = arm.readings("early"), arm.readings()
    return {
        seed: float(inflation(late[seed])[0].mean() / inflation(early[seed])[0].mean())
        for seed in early.keys() & late.keys()
    }


def _span(symptom: Symptom) -> Observe:
    return _plain(lambda arm: {seed: span(symptom(one)) for seed, one in arm.readings().items()})


def _against_plain(symptom: Symptom, compare: Callable[[Array, Array], Array]) -> Observe:
    """Both routed networks against the plain one, paired by seed."""

    def observe(arms: Arms) -> list[Observation]:
        found = []
        for residual in (ROUTED, TIME_ROUTED):
            routed, plain = arms.both(residual, ADD, lambda arm: arm.symptom(symptom))
            if len(routed):
                found.append(Observation(residual, compare(routed, plain), arms.doubt(residual, ADD)))
        return found

    return observe


def _ratio(routed: Array, plain: Array) -> Array:
    return np.asarray(routed / plain)


def _ratio_of_logs(routed: Array, plain: Array) -> Array:
    """How far from 1, up or down."""
    return np.asarray(np.abs(np.log(routed)) / np.abs(np.log(plain)))


def _losses(first: str, second: str) -> Observe:
    def observe(arms: Arms) -> list[Observation]:
        differences = arms.difference(first, second)
        if not len(differences):
            return []
        return [Observation(f"{first}, {second}", differences, arms.doubt(first, second))]

    return observe


def _distance(reading: Symptom) -> Symptom:
    return lambda record: np.asarray(1 - reading(record))


_least, _most = partial(at_least, level=LEVEL), partial(at_most, level=LEVEL)

CLAIMS = (
    Claim(
        "the plain stream inflates",
        "about 10× (28 blocks)",
        "last/first ≥ 1.5",
        _least(GROWN, _mean(inflation)),
    ),
    Claim(
        "it inflates on as training goes on",
        "–",
        "at the end ≥ after a quarter",
        _least(1.0, _plain(_growth_in_training), unit=" ×"),
    ),
    Claim(
        "plain gradients fall along depth",
        "sharply",
        "first branch/last ≥ 1.5",
        _least(FALLEN, _mean(gradient_fall)),
    ),
    Claim(
        "some plain neighbours are alike",
        "> 0.96",
        "largest cosine ≥ 0.96",
        _least(ALIKE, _mean(largest_cosine)),
    ),
    Claim(
        "most plain neighbours are alike",
        "> 0.96",
        "median cosine ≥ 0.96",
        _least(ALIKE, _mean(median_cosine)),
    ),
    Claim(
        "inflation depends on time",
        "yes",
        "≥ 1.2 × between two times",
        _least(VARIES, _span(inflation), unit=" ×"),
    ),
    Claim(
        "the fall of gradients depends on time",
        "yes",
        "≥ 1.2 × between two times",
        _least(VARIES, _span(gradient_fall), unit=" ×"),
    ),
    Claim(
        "the likeness of neighbours depends on time",
        "yes",
        "1 − median cosine: ≥ 1.2 ×",
        _least(VARIES, _span(_distance(median_cosine)), unit=" ×"),
    ),
    Claim(
        "routing cures inflation",
        "cured",
        "mixture ≤ half of plain's",
        _most(HALF, _against_plain(inflation, _ratio), unit=" ×"),
    ),
    Claim(
        "its branches grow less, too",
        "–",
        "largest branch/start ≤ half of plain's",
        _most(HALF, _against_plain(branch_growth, _ratio), unit=" ×"),
    ),
    Claim(
        "routing cures the fall of gradients",
        "cured",
        "|log first/last| ≤ half of plain's",
        _most(HALF, _against_plain(gradient_fall, _ratio_of_logs), unit=" ×"),
    ),
    Claim(
        "routing makes neighbours less alike",
        "cured",
        "median cosine below plain's",
        lower(_against_plain(median_cosine, lambda routed, plain: routed - plain)),
    ),
    Claim(
        "routing lowers the loss at equal tokens",
        "FID 9.67 to 7.56",
        "interval < 0",
        lower(_losses(ROUTED, ADD)),
    ),
    Claim("routing along time lowers it further", "yes", "interval < 0", lower(_losses(TIME_ROUTED, ROUTED))),
)
