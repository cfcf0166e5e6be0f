"""The figures of the study of linear solvers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgLine,
    SvgRow,
    ticks,
)
from theodolite.workloads.poisson import RTOL, SIDE
from theodolite_studies.framework.figures import band, line, log10
from theodolite_studies.framework.records import Record, select
from theodolite_studies.linear_solver.report import LARGER, USUAL, costs, is_scaled, networks

CASES = [(kind, side) for side in (SIDE, LARGER) for kind in USUAL]
SHOWN = {8: BLUE, 64: VIOLET}
"""Widths whose residuals are drawn."""


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Residuals over iterations, and iterations over widths."""
    if not select(records, part="known"):
        return
    yield "residuals", _residuals(records)
    if networks(records, is_scaled):
        yield "widths", _widths(records)


def _residuals(records: Sequence[Record]) -> str:
    panels, longest = [], 1.0
    for kind, side in CASES:
        rows = select(records, kind=kind, side=side)
        lines: list[SvgLine] = []
        for key, colour in (("cg", INK), ("multigrid", GREEN)):
            lines += [_course(row[f"{key} residuals"], colour) for row in select(rows, part="known")]
        for width, colour in SHOWN.items():
            own = [row for row in select(rows, part="trained", width=width) if is_scaled(row)]
            lines += [_course(row["network residuals"], colour) for row in own]
        longest = max([longest, *(each.points[-1][0] for each in lines)])
        panels.append(lines)
    right = 50 * math.ceil(longest / 50)
    across = SvgAxis(0, right, ticks([0.0, float(right // 2), float(right)]))
    up = SvgAxis(math.log10(RTOL) - 0.5, 1, ticks([-6.0, -4.0, -2.0, 0.0], power=True))
    legend = [
        ("CG", INK),
        ("multigrid", GREEN),
        *((f"width {width}", colour) for width, colour in SHOWN.items()),
    ]
    return SvgFigure(
        "Relative residual over iterations: the median over systems, a line for each seed",
        legend,
        [f"{kind} {side}²" for kind, side in CASES],
        [SvgRow("residual", across, up, panels, "iterations")],
    ).svg()


def _course(residuals: Sequence[float | None], colour: str) -> SvgLine:
    values = [math.nan if each is None else each for each in residuals]
    return line(range(len(values)), log10(values), colour)


def _widths(records: Sequence[Record]) -> str:
    trained = sorted(networks(records, is_scaled), key=lambda own: own[0]["width"])
    widths = [own[0]["width"] for own in trained]
    places, panels, highest = [math.log2(width) for width in widths], [], 1.0
    for kind, side in CASES:
        known = select(records, part="known")
        plain = float(np.mean([*costs(known, "cg", kind, side).values()])) / 3
        cycled = float(np.mean([*costs(known, "multigrid", kind, side).values()]))
        found = [costs(own, "network", kind, side) for own in trained]
        seeds = sorted(set.intersection(*(set(each) for each in found)))
        counts = np.array([[each[seed] for each in found] for seed in seeds])
        ends = [places[0], places[-1]]
        panels.append(
            [
                line(ends, [plain, plain], INK, dashed=True),
                line(ends, [cycled, cycled], GREEN, dashed=True),
                band(places, np.where(np.isfinite(counts), counts, np.nan), ORANGE),
            ]
        )
        highest = max(highest, plain, float(np.nanmax(np.where(np.isfinite(counts), counts, np.nan))))
    top = 10 * math.ceil(highest / 10)
    across = SvgAxis(places[0], places[-1], {float(p): str(w) for p, w in zip(places, widths, strict=True)})
    up = SvgAxis(0, top, ticks([0.0, float(top // 2), float(top)]))
    return SvgFigure(
        "Iterations to a relative residual of 1e-6 over the width of the network",
        [("network: mean and range of seeds", ORANGE), ("a third of CG", INK), ("multigrid", GREEN)],
        [f"{kind} {side}²" for kind, side in CASES],
        [SvgRow("iterations", across, up, panels, "width")],
    ).svg()
