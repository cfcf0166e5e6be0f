"""The figures of the growing study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, PINK, VIOLET, SvgAxis, SvgFigure, SvgLine, SvgRow
from theodolite_studies.framework.records import Record
from theodolite_studies.growing.claims import PARTS
from theodolite_studies.growing.ranking import VARIANTS, realised

COLOURS = {
    "none": INK,
    "scratch": PINK,
    "signal": ORANGE,
    "jump": "#c9a227",
    "even": BLUE,
    "stack": GREEN,
    "random": VIOLET,
    "weakest": "#5b9aa0",
    "tried": "#b5651d",
}


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Loss against compute, gains against the signal, and loss against depth."""
    parts = {part: [one for one in records if one["part"] == part] for part in PARTS}
    if grown := [one for one in parts["growing"] if one["way"] != "base"]:
        yield "curves", _curves(grown).svg()
    if parts["ranking"]:
        yield "ranking", _ranking(parts["ranking"]).svg()
    if parts["envelope"]:
        yield "envelope", _envelope(parts["envelope"]).svg()


def _curves(records: Sequence[Record]) -> SvgFigure:
    sizes = sorted({one["added"] for one in records})
    panels, logs, ends = [], [], []
    for added in sizes:
        lines = []
        for way, colour in COLOURS.items():
            own = [one for one in records if one["added"] == added and one["way"] == way]
            if not own:
                continue
            curves = [_known(one["curve"]) for one in own]
            xs = np.log10(curves[0][:, 0])
            ys = np.mean([curve[:, 1] for curve in curves], axis=0)
            lines.append(SvgLine(list(zip(xs.tolist(), ys.tolist(), strict=True)), colour))
            logs += xs.tolist()
            ends += ys[len(ys) // 3 :].tolist()
        panels.append(lines)
    good = [end for end in ends if math.isfinite(end)] or [0.0, 1.0]
    x = _axis(min(logs), max(logs), power=True)
    row = SvgRow("held-out loss", x, _axis(min(good), max(good)), panels, note="FLOPs spent")
    legend = [(way, colour) for way, colour in COLOURS.items() if any(one["way"] == way for one in records)]
    return SvgFigure("Loss against compute", legend, [f"+{added} blocks" for added in sizes], [row])


def _known(curve: Sequence[Sequence[float | None]]) -> np.ndarray:
    return np.array([[math.nan if value is None else value for value in point] for point in curve])


def _ranking(records: Sequence[Record]) -> SvgFigure:
    moments = sorted(int(moment) for moment in records[0]["gained"])
    seeds = sorted({one["seed"] for one in records})
    colours = dict(zip(seeds, (BLUE, ORANGE, GREEN, PINK, VIOLET), strict=False))
    rows = []
    for variant in VARIANTS:
        panels, across, up = [], [], []
        for moment in moments:
            gained = realised(records, variant, moment, "gained")
            gains = realised(records, variant, moment, "gain")
            lines = []
            for seed in gained:
                xs = np.log10(np.maximum(gains[seed], 1e-12))
                points = list(zip(xs.tolist(), gained[seed].tolist(), strict=True))
                lines.append(SvgLine(points, colours[seed], joined=False))
                across += xs.tolist()
                up += gained[seed].tolist()
            panels.append(lines)
        x, y = _axis(min(across), max(across), power=True), _axis(min(up), max(up))
        label = "new block trained" if variant == "new" else "all trained"
        rows.append(SvgRow(label, x, y, panels, note="gain of the signal" if variant == VARIANTS[-1] else ""))
    legend = [(f"seed {seed}", colour) for seed, colour in colours.items()]
    titles = [f"after {moment} steps" for moment in moments]
    return SvgFigure("What a block gained, by the signal of its place", legend, titles, rows)


def _envelope(records: Sequence[Record]) -> SvgFigure:
    def means(kind: str, column: str) -> list[tuple[float, float]]:
        own = [one for one in records if one["kind"] == kind and one["loss"] is not None]
        values = sorted({one[column] for one in own})
        return [
            (float(value), float(np.mean([one["loss"] for one in own if one[column] == value])))
            for value in values
        ]

    grown, alone = means("grown", "depth"), means("alone", "steps")
    beside = [(point[0], other[1]) for point, other in zip(grown, alone, strict=False)]
    sizes = [(math.log10(size), loss) for size, loss in means("coupled", "parameters")]
    lossy = [loss for _, loss in (*grown, *beside, *sizes)]
    y = _axis(min(lossy), max(lossy))
    rows = []
    if grown:
        deepest = grown[-1][0]
        x = SvgAxis(0, deepest, {0.0: "0", deepest / 2: f"{deepest / 2:g}", deepest: f"{deepest:g}"})
        rows.append(
            SvgRow("loss", x, y, [[SvgLine(grown, ORANGE), SvgLine(beside, INK, dashed=True)]], note="blocks")
        )
    if len(sizes) > 1:
        across = _axis(sizes[0][0], sizes[-1][0], power=True)
        rows.append(SvgRow("loss", across, y, [[SvgLine(sizes, BLUE)]], note="parameters"))
    legend = [("grown block by block", ORANGE), ("one block, as long", INK), ("from scratch", BLUE)]
    return SvgFigure("Loss against depth and size", legend, [""], rows)


def _axis(low: float, high: float, *, power: bool = False) -> SvgAxis:
    """From low to high with a little room, and three texts."""
    room = 0.04 * (high - low) or 0.5
    marks = [low, (low + high) / 2, high]
    return SvgAxis(
        low - room, high + room, {mark: f"{10**mark:.1e}" if power else f"{mark:.3g}" for mark in marks}
    )
