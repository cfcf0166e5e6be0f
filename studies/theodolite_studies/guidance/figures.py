"""The figures of the study of guidance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, PINK, VIOLET, SvgAxis, SvgFigure, SvgRow, ticks
from theodolite_studies.framework.figures import band, line, log10
from theodolite_studies.framework.records import Record, distinct, select
from theodolite_studies.guidance.fields import EXACT
from theodolite_studies.guidance.inversion import BRIEF, LONG
from theodolite_studies.guidance.report import distances, grouped, named

COLOURS = {
    "plain": INK,
    "picard 1": GREEN,
    "picard 2": BLUE,
    "picard 3": VIOLET,
    "anderson 2": ORANGE,
    "anderson 3": PINK,
}


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Distances against scales, and shares of inversions against steps."""
    if cases := grouped(select(records, kind="grid", budget=40), "layout", "field"):
        yield "scales", _scales(cases)
    if select(records, kind="steps", field=EXACT):
        yield "inversion", _steps(records)


def _scales(cases: Sequence[Sequence[Record]]) -> str:
    panels = []
    for case in cases:
        lines = []
        for way in distinct(case, "way"):
            own = select(case, way=way)
            values = log10(np.concatenate([distances([row]).mean(1) for row in own])).reshape(len(own), -1)
            lines.append(band(own[0]["scales"], values, COLOURS[way]))
        panels.append([replace(lines[0], label=named({**case[0], "budget": 40}).split(",")[0]), *lines[1:]])
    across = SvgAxis(0, 4, ticks([0, 1, 2, 3, 4]))
    up = SvgAxis(-2, 0.6, ticks([-2.0, -1.0, 0.0], power=True))
    rows = [
        SvgRow("distance", across, up, panels[start : start + 4], "scale w")
        for start in range(0, len(panels), 4)
    ]
    return SvgFigure(
        "Distance from the class at 40 evaluations, over the scale of guidance",
        list(COLOURS.items()),
        [""] * min(len(panels), 4),
        rows,
    ).svg()


def _steps(records: Sequence[Record]) -> str:
    rows = select(records, kind="steps", field=EXACT)
    cases = grouped(rows, "layout")
    panels = []
    for case in cases:
        multiples = sorted(distinct(case, "multiple"))
        lines = []
        for name, colour in (("early", ORANGE), ("converged", BLUE)):
            means = [np.mean([row[name] for row in select(case, multiple=one)]) for one in multiples]
            lines.append(line(np.log10(multiples), means, colour))
        own = select(records, kind="auto", field=EXACT, layout=case[0]["layout"])
        height = float(np.mean([row["early"] for row in own]))
        lines.append(line([-0.1, 2], [height, height], GREEN, dashed=True))
        panels.append(lines)
    across = SvgAxis(-0.1, 2, {0: "1", 1: "10", 2: "100"}, strong=0)
    up = SvgAxis(0, 1.05, ticks([0.0, 0.5, 1.0]))
    legend = [(f"{BRIEF} iterations", ORANGE), (f"{LONG} iterations", BLUE), ("steps of its own", GREEN)]
    return SvgFigure(
        "Share of targets that are inverted, over the step in units of the bound of close pairs",
        legend,
        [case[0]["layout"] for case in cases],
        [SvgRow("share", across, up, panels, "step over bound")],
    ).svg()
