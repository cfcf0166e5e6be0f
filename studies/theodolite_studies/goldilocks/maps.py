"""Maps of accuracy over T or α and the learning rate, with the zone's boundary over them, as one SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from theodolite.present.svg import GAP, INK, LEFT, head, power_of_ten, turned
from theodolite_studies.framework.records import Record
from theodolite_studies.goldilocks.curves import Accuracies, Array, Zone, accuracies, curve, zone
from theodolite_studies.goldilocks.networks import NORMED, RESNET, TRAINED, VARIANTS, Column

CELL, SIDE = 15, 18
"""Width and height of a cell."""
TOP, APART, BOTTOM = 78, 44, 40
LADDER = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
"""Colours from an accuracy of 0 to 1 (viridis)."""
TITLES = {
    "temperature": "gradient descent, η' = T·η₀",
    "scale": "gradient descent from αθ, η' by appendix G",
    "adam": "Adam",
    "neighbours": "gradient descent, η' = T·η₀, ResNet-4",
}


def maps(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Name and drawing of the maps of each part that was trained."""
    for part in TITLES:
        drawn = _drawn(records, part)
        if drawn is not None:
            yield part, drawn


def _drawn(records: Sequence[Record], part: str) -> str | None:
    shown = []
    for column in VARIANTS:
        key: dict[str, object] = {"part": part, "column": column}
        if part == "scale":
            key["rule"] = "normed" if column in NORMED else "homogeneous"
        found = accuracies(records, **key)
        if found is not None:
            shown.append((column, found, _zone_of(records, part, column)))
    if not shown:
        return None
    most = max(len(found.at) for _, found, _ in shown)
    lines = max(len(found.rates) for _, found, _ in shown)
    wide, high = most * CELL, lines * SIDE
    width = LEFT + max(len(shown), 3) * (wide + GAP)
    height = TOP + 2 * (high + APART) + BOTTOM - APART
    pieces = [head(width, height, f"Accuracy after {TITLES[part]}"), _scale_of_colours()]
    for row, kind in enumerate(("train", "test")):
        top = TOP + row * (high + APART)
        pieces.append(turned(f"{kind}: η₀", 14, top + high / 2))
        for place, (column, found, its_zone) in enumerate(shown):
            left = LEFT + place * (wide + GAP)
            if row == 0:
                pieces.append(
                    f'<text x="{left + wide / 2}" y="{TOP - 8}" text-anchor="middle">'
                    f"{escape(f'{column}  {VARIANTS[column]}')}</text>"
                )
            pieces += _map(left, top, found, kind, its_zone, first=place == 0)
    axis = "α" if part == "scale" else "T"
    pieces.append(
        f'<text x="{width - GAP}" y="{height - 6}" text-anchor="end" font-size="10">{axis}; the zone lies '
        "between the white lines; ×: a seed diverged</text>"
    )
    return "\n".join([*pieces, "</svg>", ""])


def _zone_of(records: Sequence[Record], part: str, column: Column) -> Zone | None:
    network = RESNET if part == "neighbours" else TRAINED[column]
    row = "alpha" if part == "scale" else "temperature"
    return zone(curve(records, part="zone", network=network.name, column=column, row=row))


def _map(
    left: float, top: float, found: Accuracies, kind: str, its_zone: Zone | None, *, first: bool
) -> list[str]:
    values: Array = getattr(found, kind).mean(0)
    burst: NDArray[np.bool_] = np.any(found.diverged, axis=0)
    num = len(found.rates)
    pieces = ['<g shape-rendering="crispEdges">']  # no seams between cells
    for place in range(len(found.at)):
        for rate in range(num):
            x, y = left + place * CELL, top + (num - 1 - rate) * SIDE
            pieces.append(
                f'<rect x="{x}" y="{y}" width="{CELL}" height="{SIDE}" fill="{colour(values[place, rate])}"/>'
            )
            if burst[place, rate]:
                pieces.append(
                    f'<text x="{x + CELL / 2}" y="{y + SIDE / 2 + 3}" text-anchor="middle" font-size="8" '
                    'fill="#ffffffaa">×</text>'
                )
    pieces.append("</g>")
    for place in labelled(found.at):
        x = left + (place + 0.5) * CELL
        pieces.append(
            f'<text x="{x}" y="{top + num * SIDE + 13}" text-anchor="middle" font-size="8">'
            f"{power_of_ten(found.at[place])}</text>"
        )
    if first:
        for rate in range(0, num, 2):
            y = top + (num - 0.5 - rate) * SIDE + 4
            pieces.append(
                f'<text x="{left - 5}" y="{y}" text-anchor="end" font-size="9">'
                f"{power_of_ten(found.rates[rate])}</text>"
            )
    if its_zone is not None:
        for boundary in (its_zone.low, its_zone.high):
            if math.isfinite(boundary):
                x = left + CELL * _among(boundary, found.at)
                line = f'd="M{x:.1f} {top - 3}v{num * SIDE + 6}" fill="none"'
                pieces.append(f'<path {line} stroke="#000000" stroke-width="3.4"/>')
                pieces.append(f'<path {line} stroke="#ffffff" stroke-width="1.8"/>')
    return pieces


def labelled(at: Array) -> list[int]:
    """Which cells get a text: whole exponents, the ends first, with room for each.

    >>> labelled(np.array([-3.0, -2.0, -1.33, -1.0, -0.5, 0.0, 0.5, 1.0, 1.33, 2.0, 3.0]))
    [0, 3, 5, 7, 10]
    """
    whole = [place for place, exponent in enumerate(at) if exponent == round(exponent)]
    chosen: list[int] = []
    for place in sorted(whole, key=lambda place: -abs(place - (len(at) - 1) / 2)):
        if all(abs(place - other) >= 2 for other in chosen):
            chosen.append(place)
    return sorted(chosen)


def _among(exponent: float, at: Array) -> float:
    """Where an exponent lies among cells whose middles stand for `at`, in cells from the left."""
    return float(np.interp(exponent, at, np.arange(len(at)))) + 0.5


def colour(accuracy: float) -> str:
    """Of an accuracy from 0 to 1.

    >>> colour(0.0), colour(1.0)
    ('#440154', '#fde725')
    """
    place = min(max(accuracy, 0.0), 1.0) * (len(LADDER) - 1)
    below = min(int(place), len(LADDER) - 2)
    parts = [[int(LADDER[step][start : start + 2], 16) for start in (1, 3, 5)] for step in (below, below + 1)]
    mixed = (one + (other - one) * (place - below) for one, other in zip(*parts, strict=True))
    return "#" + "".join(f"{round(channel):02x}" for channel in mixed)


def _scale_of_colours() -> str:
    steps = [
        f'<rect x="{LEFT + 24 + 12 * step}" y="30" width="12" height="10" fill="{colour(step / 10)}"/>'
        for step in range(11)
    ]
    return "\n".join(
        [
            f'<text x="{LEFT}" y="39" fill="{INK}">0 %</text>',
            *steps,
            f'<text x="{LEFT + 162}" y="39" fill="{INK}">100 %; seeds’ mean</text>',
        ]
    )
