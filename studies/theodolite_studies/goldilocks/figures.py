"""The figures of the Goldilocks study: the zone, its parts, logits, training, and maps of accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

import numpy as np
from numpy.typing import NDArray

from theodolite.present.svg import (
    BLUE,
    GAP,
    GREEN,
    INK,
    LEFT,
    ORANGE,
    PINK,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgLine,
    SvgRow,
    head,
    power_of,
    ticks,
    turned,
)
from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.figures import band, line, log10
from theodolite_studies.framework.records import select
from theodolite_studies.goldilocks.curves import Accuracies, ExcessZone, Measured, zone
from theodolite_studies.goldilocks.setting import (
    COURSE_TEMPERATURES,
    DECADES,
    NETWORKS,
    NORMED,
    RESNET,
    TRAINED,
    VARIANTS,
    Column,
)
from theodolite_studies.goldilocks.zone_claims import projected_excess

COLOURS = dict(zip(NETWORKS, (BLUE, ORANGE, GREEN, PINK), strict=True))
TITLES = {column: f"{column}  {name}" for column, name in VARIANTS.items()}
EXCESS = SvgAxis(-7.5, 7.5, ticks([-6, -3, 0, 3, 6]), strong=0)
"""All that 50 directions can show."""
SHARE = SvgAxis(0.0, 1.0, ticks([0, 0.5, 1]))
ALPHA = SvgAxis(-DECADES, DECADES, ticks([-2, -1, 0, 1, 2], power=True))
REACH = 30.0
"""Of t, to either side."""


def figures(data: Measured) -> Iterator[tuple[str, str]]:
    """Name and drawing of each figure that there are records for."""
    for name, part, draw in (
        ("zone", "zone", _zone),
        ("parts", "zone", _parts),
        ("saturation", "zone", _saturation),
        ("logits", "logits", _logits),
        ("course", "course", _course),
    ):
        if data.has(part):
            yield name, draw(data).svg()
    for part in MAP_TITLES:
        if (drawn := _maps(data, part)) is not None:
            yield part, drawn


def _zone(data: Measured) -> SvgFigure:
    """Figure 1."""

    def lines(column: Column, row: str, *, dashed: bool = False) -> list[SvgLine]:
        found = []
        for name, network in NETWORKS.items():
            if (measured := data.curve(name, column, row)) is not None:
                places = measured.at / network.layers if row == "temperature" else measured.at
                found.append(band(places, measured["excess"], COLOURS[name], dashed=dashed))
        return found

    by_depth = SvgAxis(-DECADES, DECADES, {-2.0: "10⁻²ᴸ", 0.0: "1", 2.0: "10²ᴸ"})
    together = [lines(column, "joint") + lines(column, "identity", dashed=True) for column in VARIANTS]
    return SvgFigure(
        "Excess of positive curvature before training",
        [*COLOURS.items(), ("dashed: T = α^(L−ℒ)", INK)],
        list(TITLES.values()),
        [
            SvgRow("α", ALPHA, EXCESS, [lines(column, "alpha") for column in VARIANTS], "α"),
            SvgRow("joint", ALPHA, EXCESS, together, "α; A–C: T = α^L, D, E: T = α"),
            SvgRow("T", by_depth, EXCESS, [lines(column, "temperature") for column in VARIANTS], "T"),
        ],
    )


def _parts(data: Measured) -> SvgFigure:
    """G and S apart."""
    excess, share = [], []
    for column, network in TRAINED.items():
        one = data.curve(network.name, column, "temperature")
        # S is all of H far outside: dashes let that be seen.
        names = (("excess", BLUE), ("excess of G", GREEN), ("excess of S", ORANGE))
        drawn = [] if one is None else [band(one.at, one[n], c, dashed=c == ORANGE) for n, c in names]
        excess.append(drawn)
        share.append([] if one is None else [band(one.at, one.share_of_g, GREEN)])
    far = DECADES * max(network.layers for network in TRAINED.values())
    across = SvgAxis(-far, far, ticks([-8, -4, 0, 4, 8], power=True))
    return SvgFigure(
        "The Hessian's parts before training: H = G + S",
        [("excess of H", BLUE), ("of G", GREEN), ("of S (dashed)", ORANGE)],
        list(TITLES.values()),
        [
            SvgRow("excess", across, EXCESS, excess, "T"),
            SvgRow("‖G‖/(‖G‖+‖S‖)", across, SHARE, share, "T"),
        ],
    )


def _saturation(data: Measured) -> SvgFigure:
    """t beside the projected excess; t linear near 0, logarithmic far away."""
    grid = np.concatenate([-np.logspace(3, -2, 60), np.logspace(-2, 3, 60)])
    expected = line(np.arcsinh(grid), projected_excess(grid, data.setting.directions), ORANGE)
    panels = []
    for column in VARIANTS:
        pairs = sorted(  # the order of records is no part of the drawing
            (math.asinh(t), excess)
            for record in select(data.records, part="zone", column=column)
            for t, excess in zip(record["t"], record["excess"], strict=True)
            if t is not None and excess is not None
        )
        panels.append([expected, SvgLine(pairs, BLUE, joined=False)])
    marks = (-10.0, -3.0, -1.0, 0.0, 1.0, 3.0, 10.0)
    across = SvgAxis(math.asinh(-REACH), math.asinh(REACH), {math.asinh(t): f"{t:g}" for t in marks})
    return SvgFigure(
        "The projected excess against t = Tr(H)/‖H‖: it saturates at √50 = 7.07",
        [("measured", BLUE), ("√d·t/√(t² + d + 1)", ORANGE)],
        list(TITLES.values()),
        [SvgRow("projected excess", across, EXCESS, panels, "t")],
    )


def _logits(data: Measured) -> SvgFigure:
    """Figure 3."""
    rows = []
    for name, label, low in (("kl", "KL", -16.0), ("error", "relative difference", -8.0)):
        panels = [
            [
                line(measured.at, log10(measured.mean(name)), COLOURS[network])
                for network in NETWORKS
                if (measured := data.logits(network, column)) is not None
            ]
            for column in NORMED
        ]
        up = SvgAxis(low, 1.0, ticks([low, low / 2, 0.0], power=True))
        rows.append(SvgRow(label, ALPHA, up, panels, "α; nothing differs at 1"))
    titles = [TITLES[column] for column in NORMED]
    return SvgFigure("Logits of αθ beside α times those of θ", list(COLOURS.items()), titles, rows)


def _course(data: Measured) -> SvgFigure:
    """The zone during training."""
    paint = dict(zip(COURSE_TEMPERATURES, (BLUE, VIOLET, GREEN, ORANGE, PINK), strict=True))
    panels: dict[str, list[list[SvgLine]]] = {"excess": [], "share": [], "train": []}
    for column in VARIANTS:
        lines: dict[str, list[SvgLine]] = {name: [] for name in panels}
        for at, colour in paint.items():
            if (followed := data.course(column, at)) is not None:
                places = np.log10(1 + followed.at)
                lines["excess"].append(band(places, followed["excess"], colour))
                lines["share"].append(band(places, followed.share_of_g, colour))
                lines["train"].append(band(places, followed["train"], colour))
        for name, some in lines.items():
            panels[name].append(some)
    epochs = data.setting.epochs
    last = math.log10(1 + epochs)
    marks = [0, *(10**k for k in range(math.ceil(last)) if 10**k <= epochs)]
    across = SvgAxis(0.0, last, {math.log10(1 + epoch): str(epoch) for epoch in marks})
    return SvgFigure(
        "During gradient descent with η' = T·10⁻²: the excess, the share of G, and train accuracy",
        [(f"T = {power_of(10, at)}", colour) for at, colour in paint.items()],
        list(TITLES.values()),
        [
            SvgRow("excess", across, EXCESS, panels["excess"]),
            SvgRow("‖G‖/(‖G‖+‖S‖)", across, SHARE, panels["share"]),
            SvgRow("train accuracy", across, SHARE, panels["train"], "epochs, until a seed diverges"),
        ],
    )


CELL, SIDE = 15, 18
"""Width and height of a cell."""
MAP_TOP, MAP_APART, MAP_BOTTOM = 78, 44, 40
LADDER = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
"""Colours from an accuracy of 0 to 1 (viridis)."""
MAP_TITLES = {
    "temperature": "gradient descent, η' = T·η₀",
    "scale": "gradient descent from αθ, η' by appendix G",
    "adam": "Adam",
    "neighbours": "gradient descent, η' = T·η₀, ResNet-4",
}


def _maps(data: Measured, part: str) -> str | None:
    """Accuracy over T or α and the learning rate, with the zone's boundary over it."""
    shown = []
    for column in VARIANTS:
        if (found := data.map(part, column)) is not None:
            network = RESNET if part == "neighbours" else TRAINED[column]
            along = "alpha" if part == "scale" else "temperature"
            shown.append((column, found, zone(data.curve(network.name, column, along))))
    if not shown:
        return None
    most = max(len(found.at) for _, found, _ in shown)
    lines = max(len(found.rates) for _, found, _ in shown)
    wide, high = most * CELL, lines * SIDE
    width = LEFT + max(len(shown), 3) * (wide + GAP)
    height = MAP_TOP + 2 * (high + MAP_APART) + MAP_BOTTOM - MAP_APART
    pieces = [head(width, height, f"Accuracy after {MAP_TITLES[part]}"), _scale_of_colours()]
    for row, kind in enumerate(("train", "test")):
        top = MAP_TOP + row * (high + MAP_APART)
        pieces.append(turned(f"{kind}: η₀", 14, top + high / 2))
        for place, (column, found, its_zone) in enumerate(shown):
            left = LEFT + place * (wide + GAP)
            if row == 0:
                pieces.append(
                    f'<text x="{left + wide / 2}" y="{MAP_TOP - 8}" text-anchor="middle">'
                    f"{escape(f'{column}  {VARIANTS[column]}')}</text>"
                )
            pieces += _map(left, top, found, kind, its_zone, first=place == 0)
    axis = "α" if part == "scale" else "T"
    pieces.append(
        f'<text x="{width - GAP}" y="{height - 6}" text-anchor="end" font-size="10">{axis}; the zone lies '
        "between the white lines; ×: a seed diverged</text>"
    )
    return "\n".join([*pieces, "</svg>", ""])


def _map(
    left: float, top: float, found: Accuracies, kind: str, its_zone: ExcessZone | None, *, first: bool
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
            f"{power_of(10, found.at[place])}</text>"
        )
    if first:
        for rate in range(0, num, 2):
            y = top + (num - 0.5 - rate) * SIDE + 4
            pieces.append(
                f'<text x="{left - 5}" y="{y}" text-anchor="end" font-size="9">'
                f"{power_of(10, found.rates[rate])}</text>"
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
