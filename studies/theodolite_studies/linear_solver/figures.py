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
    """Residuals over iterations, and iterations and work over widths."""
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
    across = SvgAxis(0, math.ceil(10 * longest) / 10, {0: "1", 1: "10", 2: "100"})
    up = SvgAxis(math.log10(RTOL) - 0.5, 1, ticks([-6.0, -4.0, -2.0, 0.0], power=True))
    widths = ((f"width {width}", colour) for width, colour in SHOWN.items())
    return SvgFigure(
        "Relative residual over iterations: the median over systems, a line for each seed",
        [("CG", INK), ("multigrid", GREEN), *widths],
        [f"{kind} {side}²" for kind, side in CASES],
        [SvgRow("residual", across, up, panels, "iterations")],
    ).svg()


def _course(residuals: Sequence[float | None], colour: str) -> SvgLine:
    """After the first iteration and all others."""
    after = [math.nan if each is None else each for each in residuals[1:]]
    return line(np.log10(np.arange(1, len(after) + 1)), log10(after), colour)


def _widths(records: Sequence[Record]) -> str:
    known = select(records, part="known")
    trained = sorted(networks(records, is_scaled), key=lambda own: own[0]["width"])
    widths = [own[0]["width"] for own in trained]
    places = [math.log2(width) for width in widths]
    across = SvgAxis(places[0], places[-1], {p: str(w) for p, w in zip(places, widths, strict=True)})
    rows = []
    for word, work in (("iterations", False), ("operations", True)):
        panels, values = [], []
        for kind, side in CASES:
            found = [costs(own, "network", kind, side, work=work) for own in trained]
            scale = side**2 if work else 1
            seeds = sorted(set.intersection(*(set(each) for each in found)))
            counts = np.array([log10(each[seed] / scale for each in found) for seed in seeds])
            lines = [band(places, np.where(np.isfinite(counts), counts, np.nan), ORANGE)]
            for solver, colour in (("cg", INK), ("multigrid", GREEN)):
                spent = np.mean([*costs(known, solver, kind, side, work=work).values()])
                level = math.log10(spent / scale)
                lines.append(line([places[0], places[-1]], [level, level], colour, dashed=True))
                values.append(level)
            values += [value for value in counts.ravel() if np.isfinite(value)]
            panels.append(lines)
        powers = range(math.floor(min(values)), math.ceil(max(values)) + 1)
        up = SvgAxis(powers[0], powers[-1], ticks([float(power) for power in powers], power=True))
        rows.append(SvgRow(word, across, up, panels, "width" if work else ""))
    return SvgFigure(
        "To a relative residual of 1e-6: iterations, and operations for each point of the grid",
        [("network: mean and range of seeds", ORANGE), ("CG", INK), ("multigrid", GREEN)],
        [f"{kind} {side}²" for kind, side in CASES],
        rows,
    ).svg()
