"""The figures of curves: the zone, its parts, what saturates, logits, and the course of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

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
    power_of_ten,
    ticks,
)
from theodolite_studies.framework.records import Record
from theodolite_studies.goldilocks.course import TEMPERATURES
from theodolite_studies.goldilocks.curves import Array, Curve, curve
from theodolite_studies.goldilocks.networks import NETWORKS, NORMED, TRAINED, VARIANTS, Column
from theodolite_studies.goldilocks.setting import DECADES, Setting
from theodolite_studies.goldilocks.zone_claims import projected_excess

COLOURS = dict(zip(NETWORKS, (BLUE, ORANGE, GREEN, PINK), strict=True))
PARTS_COLOURS = {"H": BLUE, "G": GREEN, "S": ORANGE}
TITLES = {column: f"{column}  {name}" for column, name in VARIANTS.items()}
EXCESS = SvgAxis(-7.5, 7.5, ticks([-6, -3, 0, 3, 6]), strong=0)
"""All that 50 directions can show."""
SHARE = SvgAxis(0.0, 1.0, ticks([0, 0.5, 1]))
REACH = 30.0
"""Of t, to either side."""


def figures(records: Sequence[Record], setting: Setting) -> Iterator[tuple[str, str]]:
    """Name and drawing of each figure that there are records for."""
    drawings: tuple[tuple[str, str, Callable[[Sequence[Record], Setting], SvgFigure]], ...] = (
        ("zone", "zone", _zone),
        ("parts", "zone", _parts),
        ("saturation", "zone", _saturation),
        ("logits", "logits", _logits),
        ("course", "course", _course),
    )
    for name, part, draw in drawings:
        if any(record["part"] == part for record in records):
            yield name, draw(records, setting).svg()


def _zone(records: Sequence[Record], setting: Setting) -> SvgFigure:
    """Figure 1."""

    def lines(column: Column, row: str, *, dashed: bool = False) -> list[SvgLine]:
        found = []
        for network in NETWORKS.values():
            measured = curve(records, part="zone", network=network.name, column=column, row=row)
            if measured is not None:
                places = measured.at / network.layers if row == "temperature" else measured.at
                found.append(_line(measured, places, "excess", COLOURS[network.name], dashed=dashed))
        return found

    across = SvgAxis(-DECADES, DECADES, ticks([-2, -1, 0, 1, 2], power=True))
    by_depth = SvgAxis(-DECADES, DECADES, {-2.0: "10⁻²ᴸ", 0.0: "1", 2.0: "10²ᴸ"})
    together = [lines(column, "joint") + lines(column, "identity", dashed=True) for column in VARIANTS]
    return SvgFigure(
        "Excess of positive curvature before training",
        [*COLOURS.items(), ("dashed: T = α^(L−ℒ)", INK)],
        list(TITLES.values()),
        [
            SvgRow("α", across, EXCESS, [lines(column, "alpha") for column in VARIANTS], "α"),
            SvgRow("joint", across, EXCESS, together, "α; A–C: T = α^L, D, E: T = α"),
            SvgRow("T", by_depth, EXCESS, [lines(column, "temperature") for column in VARIANTS], "T"),
        ],
    )


def _parts(records: Sequence[Record], setting: Setting) -> SvgFigure:
    """G and S apart."""
    excess: list[list[SvgLine]] = []
    share: list[list[SvgLine]] = []
    for column, network in TRAINED.items():
        measured = curve(records, part="zone", network=network.name, column=column, row="temperature")
        if measured is None:
            excess.append([])
            share.append([])
            continue
        names = {"H": "excess", "G": "excess of G", "S": "excess of S"}
        excess.append(
            [
                # S is all of H far outside: dashes let that be seen.
                _line(measured, measured.at, name, PARTS_COLOURS[of], dashed=of == "S")
                for of, name in names.items()
            ]
        )
        share.append([_share(measured, measured.at, GREEN)])
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


def _saturation(records: Sequence[Record], setting: Setting) -> SvgFigure:
    """t beside the projected excess."""
    mine = [record for record in records if record["part"] == "zone"]
    panels = []
    for column in VARIANTS:
        pairs = sorted(  # the order of records is no part of the drawing
            (_compressed(t), excess)
            for record in mine
            if record["column"] == column
            for t, excess in zip(record["t"], record["excess"], strict=True)
            if t is not None and excess is not None
        )
        grid = np.concatenate([-np.logspace(3, -2, 60), np.logspace(-2, 3, 60)])
        expected = projected_excess(grid, setting.directions)
        line = [(_compressed(float(t)), float(e)) for t, e in zip(grid, expected, strict=True)]
        panels.append([SvgLine(line, ORANGE), SvgLine(pairs, BLUE, joined=False)])
    marks = (-10.0, -3.0, -1.0, 0.0, 1.0, 3.0, 10.0)
    across = SvgAxis(_compressed(-REACH), _compressed(REACH), {_compressed(t): f"{t:g}" for t in marks})
    return SvgFigure(
        "The projected excess against t = Tr(H)/‖H‖: it saturates at √50 = 7.07",
        [("measured", BLUE), ("√d·t/√(t² + d + 1)", ORANGE)],
        list(TITLES.values()),
        [SvgRow("projected excess", across, EXCESS, panels, "t")],
    )


def _logits(records: Sequence[Record], setting: Setting) -> SvgFigure:
    """Figure 3."""
    rows = []
    for name, label, low in (("kl", "KL", -16.0), ("error", "relative difference", -8.0)):
        panels = []
        for column in NORMED:
            lines = []
            for network in NETWORKS.values():
                measured = curve(records, part="logits", network=network.name, column=column)
                if measured is not None:
                    with np.errstate(divide="ignore"):  # at α = 1 nothing differs, which has no logarithm
                        height = np.log10(measured.mean(name))
                    points = list(zip(measured.at.tolist(), height.tolist(), strict=True))
                    lines.append(SvgLine(points, COLOURS[network.name]))
            panels.append(lines)
        across = SvgAxis(-DECADES, DECADES, ticks([-2, -1, 0, 1, 2], power=True))
        up = SvgAxis(low, 1.0, ticks([low, low / 2, 0.0], power=True))
        rows.append(SvgRow(label, across, up, panels, "α; nothing differs at 1"))
    return SvgFigure(
        "Logits of αθ beside α times those of θ",
        list(COLOURS.items()),
        [TITLES[column] for column in NORMED],
        rows,
    )


def _course(records: Sequence[Record], setting: Setting) -> SvgFigure:
    """The zone during training."""
    paint = dict(zip(TEMPERATURES, (BLUE, VIOLET, GREEN, ORANGE, PINK), strict=True))
    panels: dict[str, list[list[SvgLine]]] = {"excess": [], "share": [], "train": []}
    for column in VARIANTS:
        lines: dict[str, list[SvgLine]] = {name: [] for name in panels}
        for at, colour in paint.items():
            followed = curve(records, part="course", column=column, temperature=at)
            if followed is not None:
                places = np.log10(1 + followed.at)
                lines["excess"].append(_line(followed, places, "excess", colour))
                lines["share"].append(_share(followed, places, colour))
                lines["train"].append(_line(followed, places, "train", colour))
        for name, some in lines.items():
            panels[name].append(some)
    last = math.log10(1 + setting.epochs)
    marks = [0, *(10**k for k in range(math.ceil(last)) if 10**k <= setting.epochs)]
    across = SvgAxis(0.0, last, {math.log10(1 + epoch): str(epoch) for epoch in marks})
    return SvgFigure(
        "During gradient descent with η' = T·10⁻²: the excess, the share of G, and train accuracy",
        [(f"T = {power_of_ten(at)}", colour) for at, colour in paint.items()],
        list(TITLES.values()),
        [
            SvgRow("excess", across, EXCESS, panels["excess"]),
            SvgRow("‖G‖/(‖G‖+‖S‖)", across, SHARE, panels["share"]),
            SvgRow("train accuracy", across, SHARE, panels["train"], "epochs, until a seed diverges"),
        ],
    )


def _line(measured: Curve, places: Array, name: str, colour: str, *, dashed: bool = False) -> SvgLine:
    """The mean over the seeds, and from the least to the largest of them."""
    return _mean_line(measured[name], places, colour, dashed=dashed)


def _share(measured: Curve, places: Array, colour: str) -> SvgLine:
    gauss_newton, residual = measured["frobenius of G"], measured["frobenius of S"]
    return _mean_line(gauss_newton / (gauss_newton + residual), places, colour)


def _mean_line(values: Array, places: Array, colour: str, *, dashed: bool = False) -> SvgLine:
    points = list(zip(places.tolist(), values.mean(0).tolist(), strict=True))
    return SvgLine(points, colour, dashed, values.min(0).tolist(), values.max(0).tolist())


def _compressed(t: float) -> float:
    """Linear near 0, logarithmic far away."""
    return math.asinh(t)
