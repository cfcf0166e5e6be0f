"""What the paper claims of Lion, and the figures."""

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
    SvgLine,
    SvgRow,
    ticks,
)
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case, Claim, settled

COLOURS = (PINK, ORANGE, GREEN, BLUE, VIOLET)


def claims(records: Sequence[Record]) -> list[Claim]:
    """All that there are records for."""
    fall, box, network = (
        [one for one in records if one["part"] == part] for part in ("fall", "box", "network")
    )
    found: list[Claim] = []
    if fall:
        found += _of_the_fall(fall)
    if box:
        found += _of_the_box(box)
    if network:
        found += _of_the_network(network)
    return found


def _of_the_fall(fall: Sequence[Record]) -> list[Claim]:
    outward = [one for one in fall if one["pull"] == "out"]
    found = [
        settled(
            "outside of 1/λ, entries fall at least as (1 − ελ)^t",
            "exponentially",
            "excess over predicted ≤ 1 + 10⁻⁹",
            _cases(fall, "slowest", "pull", "minimum {}side"),
            limit=1 + 1e-9,
            below=True,
        ),
        settled(
            "once within 1/λ, they stay",
            "stay",
            "λ‖x‖_∞ − 1 ≤ 10⁻¹²",
            _cases([one for one in fall if one["entered"] is not None], "beyond", "pull", "minimum {}side"),
            limit=1e-12,
            below=True,
        ),
    ]
    if outward:
        found.insert(
            1,
            settled(
                "and exactly so, where the loss pulls outwards",
                "the bound is met",
                "off by ≤ 10⁻⁶",
                _cases(outward, "farthest", "pull", "minimum {}side"),
                limit=1e-6,
                below=True,
            ),
        )
    return found


def _of_the_box(box: Sequence[Record]) -> list[Claim]:
    fine = [one for one in box if one["size"] <= 0.01]
    finest = [one for one in box if one["size"] == min(each["size"] for each in box)]
    return [
        settled(
            "in a step H rises by no more than ½Lε²‖s + λx‖²",
            "theorem",
            "(rise − allowed)/allowed ≤ 0",
            _cases(box, "allowed", "size", "ελ = {:g}"),
            limit=0.0,
            below=True,
        ),
        settled(
            "H decreases in every step",
            "in continuous time",
            "rises in ≤ 1 % of steps",
            _cases(box, "rising", "size", "ελ = {:g}"),
            limit=0.01,
            below=True,
        ),
        settled(
            "H decreases but for little, at small ε",
            "up to O(ε²) a step",
            "rises/falls ≤ 0.01 for ελ ≤ 0.01",
            _cases(fine, "rise", "size", "ελ = {:g}"),
            limit=0.01,
            below=True,
        ),
        settled(
            "it ends at the minimum within the box",
            "solves it",
            "λ‖x − x*‖_∞ ≤ 0.05, finest ε",
            _cases(finest, "distance", "size", "ελ = {:g}"),
            limit=0.05,
            below=True,
        ),
        settled(
            "and the nearer, the smaller ε",
            "converges",
            "distance ~ ε^≥0.5",
            [Case("quadratics", _slopes(box))],
            limit=0.5,
            below=False,
        ),
    ]


def _of_the_network(network: Sequence[Record]) -> list[Claim]:
    return [
        settled(
            "a network's weights end within 1/λ",
            "‖x‖_∞ ≤ 1/λ",
            "λ‖x‖_∞ ≤ 1 + 10⁻⁵",
            _cases(network, "largest", "size", "λ = {:g}"),
            limit=1 + 1e-5,
            below=True,
        ),
        settled(
            "and H decreases but for little there too",
            "L-smooth f",
            "rises/falls ≤ 0.05",
            _cases(network, "rise", "size", "λ = {:g}"),
            limit=0.05,
            below=True,
        ),
    ]


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """The fall into the box, and H."""
    fall = [one for one in records if one["part"] == "fall"]
    network = [one for one in records if one["part"] == "network"]
    if fall:
        across = SvgAxis(0, 3, ticks([0, 1, 2, 3], power=True))
        up = SvgAxis(-4, 2, ticks([-4, -2, 0, 2], power=True))
        panels = []
        for pull in ("in", "out"):
            chosen = [one for one in fall if one["pull"] == pull]
            seen = [
                SvgLine(_logs(one["steps"], [v - 1 for v in one["largest then"]]), BLUE) for one in chosen[:1]
            ]
            predicted = [
                (
                    np.log10(step + 1),
                    np.log10((1 - one["size"]) ** step * (one["largest then"][0] - 1)),
                )
                for one in chosen[:1]
                for step in one["steps"]
            ]
            panels.append([*seen, SvgLine(predicted, INK, dashed=True)])
        yield (
            "fall",
            SvgFigure(
                "How far outside of 1/λ the largest entry is",
                [("Lion", BLUE), ("dashed: (1 − ελ)^t", INK)],
                ["minimum inside", "minimum outside"],
                [SvgRow("λ‖x‖_∞ − 1", across, up, panels, "step + 1")],
            ).svg(),
        )
    box = [one for one in records if one["part"] == "box"]
    if box:
        sizes = sorted({one["size"] for one in box}, reverse=True)
        across = SvgAxis(0, 4.2, ticks([0, 1, 2, 3, 4], power=True))
        up = SvgAxis(-8, 2, ticks([-8, -6, -4, -2, 0, 2], power=True))
        lines = []
        for size, colour in zip(sizes, COLOURS, strict=False):
            one = next(each for each in box if each["size"] == size)
            lines.append(SvgLine(_logs(one["steps"], one["height then"]), colour))
        yield (
            "height",
            SvgFigure(
                "H above the minimum within the box, seed 0",
                [(f"ελ = {size:g}", colour) for size, colour in zip(sizes, COLOURS, strict=False)],
                ["quadratic"],
                [SvgRow("H − f(x*)", across, up, [lines], "step + 1")],
            ).svg(),
        )
    if network:
        across = SvgAxis(0, 3, ticks([0, 1, 2, 3], power=True))
        up = SvgAxis(0, 10, ticks([0, 1, 5, 10]), strong=1)
        decays = sorted({one["size"] for one in network})
        panels = [
            [
                SvgLine(
                    [(np.log10(s + 1), v) for s, v in zip(one["steps"], one["largest then"], strict=True)],
                    BLUE,
                )
                for one in network
                if one["size"] == decay
            ]
            for decay in decays
        ]
        yield (
            "network",
            SvgFigure(
                "The largest weight of a network, in units of 1/λ",
                [("each seed", BLUE)],
                [f"λ = {decay:g}" for decay in decays],
                [SvgRow("λ‖x‖_∞", across, up, panels, "step + 1")],
            ).svg(),
        )


def _cases(records: Sequence[Record], key: str, by: str, where: str) -> list[Case]:
    return [
        Case(where.format(value), np.array([one[key] for one in records if one[by] == value], dtype=float))
        for value in dict.fromkeys(one[by] for one in records)
    ]


def _slopes(box: Sequence[Record]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of log distance against log ε, one for each seed."""
    found = []
    for seed in dict.fromkeys(one["seed"] for one in box):
        own = [one for one in box if one["seed"] == seed]
        found.append(
            np.polyfit(np.log([one["size"] for one in own]), np.log([one["distance"] for one in own]), 1)[0]
        )
    return np.array(found)


def _logs(steps: Sequence[int], values: Sequence[float]) -> list[tuple[float, float]]:
    return [
        (float(np.log10(step + 1)), float(np.log10(value)) if value > 0 else float("nan"))
        for step, value in zip(steps, values, strict=True)
    ]
