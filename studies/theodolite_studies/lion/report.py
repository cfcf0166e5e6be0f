"""The claims about Lion, and the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgRow,
    ticks,
)
from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Observation,
    at_least,
    at_most,
    each,
    per,
)
from theodolite_studies.framework.figures import line, log10
from theodolite_studies.framework.records import Record, distinct, select

COLOURS = (PINK, ORANGE, GREEN, BLUE, VIOLET)
SIDE, STEP, DECAY = "minimum {}side", "ελ = {:g}", "λ = {:g}"


def _finest(records: Sequence[Record]) -> list[Observation]:
    sizes = [one["size"] for one in select(records, part="box")]
    return list(per("size", "distance", STEP, part="box", size=min(sizes, default=0))(records))


def _slopes(box: Sequence[Record]) -> Array:
    """Of log distance against log ε, one for each seed."""
    found = []
    for seed in distinct(box, "seed"):
        sizes, distances = np.log([(one["size"], one["distance"]) for one in select(box, seed=seed)]).T
        found.append(np.polyfit(sizes, distances, 1)[0])
    return np.array(found)


CLAIMS = (
    Claim(
        "outside of 1/λ, entries fall at least as (1 − ελ)^t",
        "exponentially",
        "excess over predicted ≤ 1 + 10⁻⁹",
        at_most(1 + 1e-9, per("pull", "slowest", SIDE, part="fall")),
    ),
    Claim(
        "and exactly so, where the loss pulls outwards",
        "the bound is met",
        "off by ≤ 10⁻⁶",
        at_most(1e-6, per("pull", "farthest", SIDE, part="fall", pull="out")),
    ),
    Claim(
        "once within 1/λ, they stay",
        "stay",
        "λ‖x‖_∞ − 1 ≤ 10⁻¹²",
        at_most(1e-12, per("pull", "beyond", SIDE, part="fall", entered=lambda step: step is not None)),
    ),
    Claim(
        "in a step H rises by no more than ½Lε²‖s + λx‖²",
        "theorem",
        "(rise − allowed)/allowed ≤ 0",
        at_most(0.0, per("size", "allowed", STEP, part="box")),
    ),
    Claim(
        "H decreases in every step",
        "in continuous time",
        "rises in ≤ 1 % of steps",
        at_most(0.01, per("size", "rising", STEP, part="box")),
    ),
    Claim(
        "H decreases but for little, at small ε",
        "up to O(ε²) a step",
        "rises/falls ≤ 0.01 for ελ ≤ 0.01",
        at_most(0.01, per("size", "rise", STEP, part="box", size=lambda size: size <= 0.01)),
    ),
    Claim(
        "it ends at the minimum within the box",
        "solves it",
        "λ‖x − x*‖_∞ ≤ 0.05, finest ε",
        at_most(0.05, _finest),
    ),
    Claim(
        "and the nearer, the smaller ε",
        "converges",
        "distance ~ ε^≥0.5",
        at_least(0.5, each("part", _slopes, lambda part: "quadratics", part="box")),
    ),
    Claim(
        "a network's weights end within 1/λ",
        "‖x‖_∞ ≤ 1/λ",
        "λ‖x‖_∞ ≤ 1 + 10⁻⁵",
        at_most(1 + 1e-5, per("size", "largest", DECAY, part="network")),
    ),
    Claim(
        "and H decreases but for little there too",
        "L-smooth f",
        "rises/falls ≤ 0.05",
        at_most(0.05, per("size", "rise", DECAY, part="network")),
    ),
)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """The fall into the box, H, and the weights of networks."""
    if fall := select(records, part="fall"):
        panels = []
        for pull in ("in", "out"):
            for one in select(fall, pull=pull)[:1]:
                steps, start = np.array(one["steps"]), one["largest then"][0] - 1
                seen = log10(value - 1 for value in one["largest then"])
                predicted = np.log10((1 - one["size"]) ** steps * start)
                across = np.log10(steps + 1)
                panels.append([line(across, seen, BLUE), line(across, predicted, INK, dashed=True)])
        yield _figure(
            "fall",
            "How far outside of 1/λ the largest entry is",
            [("Lion", BLUE), ("dashed: (1 − ελ)^t", INK)],
            ["minimum inside", "minimum outside"],
            SvgRow(
                "λ‖x‖_∞ − 1", _steps(3), SvgAxis(-4, 2, ticks([-4, -2, 0, 2], power=True)), panels, "step + 1"
            ),
        )
    if box := select(records, part="box"):
        sizes = sorted(distinct(box, "size"), reverse=True)
        paint = dict(zip(sizes, COLOURS, strict=False))
        firsts = [(select(box, size=size)[0], colour) for size, colour in paint.items()]
        lines = [
            line(np.log10(np.array(one["steps"]) + 1), log10(one["height then"]), colour)
            for one, colour in firsts
        ]
        up = SvgAxis(-8, 2, ticks([-8, -6, -4, -2, 0, 2], power=True))
        yield _figure(
            "height",
            "H above the minimum within the box, seed 0",
            [(STEP.format(size), colour) for size, colour in paint.items()],
            ["quadratic"],
            SvgRow("H − f(x*)", _steps(4, end=4.2), up, [lines], "step + 1"),
        )
    if network := select(records, part="network"):
        decays = sorted(distinct(network, "size"))
        panels = [
            [
                line(np.log10(np.array(one["steps"]) + 1), one["largest then"], BLUE)
                for one in select(network, size=decay)
            ]
            for decay in decays
        ]
        up = SvgAxis(0, 10, ticks([0, 1, 5, 10]), strong=1)
        yield _figure(
            "network",
            "The largest weight of a network, in units of 1/λ",
            [("each seed", BLUE)],
            [DECAY.format(decay) for decay in decays],
            SvgRow("λ‖x‖_∞", _steps(3), up, panels, "step + 1"),
        )


def _figure(
    name: str, title: str, legend: Sequence[tuple[str, str]], columns: Sequence[str], row: SvgRow
) -> tuple[str, str]:
    return name, SvgFigure(title, legend, columns, [row]).svg()


def _steps(decades: int, end: float | None = None) -> SvgAxis:
    return SvgAxis(0, end or decades, ticks(range(decades + 1), power=True))
