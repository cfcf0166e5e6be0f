"""The figures of the study of collapse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, PINK, VIOLET, SvgAxis, SvgFigure, SvgRow, ticks
from theodolite_studies.collapse.networks import ARMS, FEATURES, HEAD, PENALTY, USUAL
from theodolite_studies.collapse.report import EFFECT, NEAR
from theodolite_studies.collapse.tied import BASES, CHECKS, END, FIRST
from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.figures import band, line, log10
from theodolite_studies.framework.records import Record, distinct, select

COLOURS = {USUAL: BLUE, FEATURES: ORANGE, HEAD: GREEN, PENALTY: VIOLET}
FLOWS = (
    ("central path, λ_H = 0", BLUE, {"part": "central", "decay": 0.0, "offset": 0.0}),
    ("λ_H = 0.005", GREEN, {"part": "central", "decay": lambda decay: decay > 0, "offset": 0.0}),
    ("joint flow, λ_H = 0, offset", PINK, {"part": "joint", "decay": 0.0, "offset": lambda one: one > 0}),
)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """NC1 over time, effects over the tie, NC1 over depth."""
    if select(records, part="central"):
        yield "flow", _flow(records)
    if select(records, part="minima"):
        yield "decays", _decays(select(records, part="minima", noise=NEAR))
    if select(records, part="network"):
        yield "depth", _depth(select(records, part="network"))


def _logs(rows: Sequence[Record], key: str) -> Array:
    """(seeds, points)."""
    return np.stack([log10(row[key]) for row in rows])


def _flow(records: Sequence[Record]) -> str:
    noises = distinct(select(records, part="central"), "noise")
    times = np.concatenate([[FIRST], np.geomspace(FIRST, END, CHECKS)])[:: CHECKS // 40]
    panels = []
    for noise in noises:
        some = [(select(records, noise=noise, **only), colour) for _, colour, only in FLOWS]
        panels.append(
            [band(np.log10(times), _logs(rows, "quotients"), colour) for rows, colour in some if rows]
        )
    across = SvgAxis(-2, 3, ticks([-2, 0, 2], power=True))
    up = SvgAxis(-6, 2, ticks([-6, -4, -2, 0, 2], power=True))
    return SvgFigure(
        "NC1 along flows from features with noise",
        [(name, colour) for name, colour, _ in FLOWS],
        [f"noise {noise:g}" for noise in noises],
        [SvgRow("NC1", across, up, panels, "time")],
    ).svg()


def _decays(rows: Sequence[Record]) -> str:
    panels = []
    for base in BASES:
        own = select(rows, base=base)
        ties = sorted(distinct(own, "tie"))
        lines = [line(np.log10(ties), [np.log10(EFFECT)] * len(ties), INK, dashed=True)]
        for key, colour in (("feature effect", ORANGE), ("head effect", GREEN), ("ratio", BLUE)):
            values = np.stack([log10(row[key] for row in select(own, tie=tie)) for tie in ties], 1)
            lines.append(band(np.log10(ties), values, colour))
        panels.append(lines)
    across = SvgAxis(-3, 0, ticks([-3, -2, -1, 0], power=True))
    up = SvgAxis(-0.3, 1.5, {0.0: "1", 1.0: "10", float(np.log10(EFFECT)): f"{EFFECT:g}"})
    return SvgFigure(
        f"What ten times the decay divides NC1 by, noise {NEAR:g}",
        [("10 λ_H", ORANGE), ("10 λ_W", GREEN), ("quotient of both", BLUE), ("dashed: threshold", INK)],
        list(BASES),
        [SvgRow("factor", across, up, panels, "tie β")],
    ).svg()


def _depth(rows: Sequence[Record]) -> str:
    names = distinct(rows, "network")
    panels = []
    for name in names:
        own = select(rows, network=name)
        lines = []
        for arm in ARMS:
            if trained := select(own, arm=arm):
                values = _logs(trained, "profile end")
                lines.append(band(range(values.shape[1]), values, COLOURS[arm]))
        starts = _logs(select(own, arm=USUAL), "profile start")
        lines.append(line(range(starts.shape[1]), starts.mean(0), INK, dashed=True))
        panels.append(lines)
    across = SvgAxis(0, 6, ticks([0, 2, 4, 6]))
    up = SvgAxis(-3, 1, ticks([-3, -2, -1, 0, 1], power=True))
    return SvgFigure(
        "NC1 by block: mean, and range of the seeds",
        [*COLOURS.items(), ("dashed: at the start", INK)],
        names,
        [SvgRow("NC1", across, up, panels, "blocks before it")],
    ).svg()
