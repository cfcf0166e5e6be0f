"""Small multiples of a coordinate check as one SVG, from the records alone.

One row for each network, one column for each quantity. Values are divided by the plan's at the centre of the
grid and branches multiplied by the depth, so that a parameterization that keeps its promise is a level line
through 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from theodolite.core.size import Size
from theodolite.planning.parameterization import PARAMETERIZATIONS
from theodolite.probes.scaling.coordinates import Axis, fit_slopes
from theodolite.probes.scaling.first_steps import Track
from theodolite_studies.coordinates.study import tracks_of
from theodolite_studies.framework.records import Record

COLUMNS = {
    "stream": "stream",
    "branch.0": "attention",
    "branch.1": "feed-forward",
    "change of stream": "Δ stream",
    "change of branch.0": "Δ attention",
    "change of branch.1": "Δ feed-forward",
    "change of logits": "Δ logits",
}
# Middle tones, which can be read on white and on black: an image does not know its page.
COLOURS = {"plan": "#3a8ee6", "standard": "#e07b39"}
INK, FAINT = "#808080", "#80808055"
WIDE, HIGH, GAP = 104, 76, 10
LEFT, TOP, BOTTOM = 92, 58, 34
LOWEST, HIGHEST = -3.0, 5.0
"""Of the vertical axis, in octaves; what lies beyond is drawn at the edge."""


def draw(records: Sequence[Record], *, optimizer: str, axis: Axis, centre: Size, step: int) -> str:
    """The figure for one optimizer and one axis; `step` says in the title after how many."""
    mine = [record for record in records if record["optimizer"] == optimizer]
    names = list(dict.fromkeys(record["network"] for record in mine))
    width = LEFT + len(COLUMNS) * (WIDE + GAP)
    height = TOP + len(names) * (HIGH + GAP) + BOTTOM
    title = f"{optimizer}: root mean squares against {axis}, after {step} steps"
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="11" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="16" font-size="14">{escape(title)}</text>',
        _legend(centre),
    ]
    for column, label in enumerate(COLUMNS.values()):
        x = LEFT + column * (WIDE + GAP) + WIDE / 2
        pieces.append(f'<text x="{x}" y="{TOP - 8}" text-anchor="middle">{label}</text>')
    for row, name in enumerate(names):
        y = TOP + row * (HIGH + GAP)
        middle = y + HIGH / 2 + 4
        pieces.append(f'<text x="{LEFT - 36}" y="{middle}" text-anchor="end">{escape(name)}</text>')
        tracks: dict[str, tuple[Track, ...]] = {
            kind: tracks_of(mine, name, optimizer, kind) for kind in PARAMETERIZATIONS
        }
        for column, quantity in enumerate(COLUMNS):
            place = (LEFT + column * (WIDE + GAP), y)
            pieces += _panel(
                place, tracks, quantity, axis, centre, first=column == 0, last=row == len(names) - 1
            )
    return "\n".join([*pieces, "</svg>", ""])


def _panel(
    place: tuple[float, float],
    tracks: dict[str, tuple[Track, ...]],
    quantity: str,
    axis: Axis,
    centre: Size,
    *,
    first: bool,
    last: bool,
) -> list[str]:
    left, top = place
    lines = {kind: _line(chosen, quantity, axis, centre) for kind, chosen in tracks.items()}
    scale = lines["plan"].get(centre.width if axis == "width" else centre.depth, math.nan)
    sizes = sorted({size for line in lines.values() for size in line})
    if len(sizes) < 2:
        return []
    start, octaves = math.log2(sizes[0]), math.log2(sizes[-1] / sizes[0])

    def across(size: float) -> float:
        return left + 6 + (WIDE - 12) * (math.log2(size) - start) / octaves

    def up(value: float) -> float:
        level = min(max(value, LOWEST), HIGHEST)
        return top + HIGH - HIGH * (level - LOWEST) / (HIGHEST - LOWEST)

    pieces = [f'<rect x="{left}" y="{top}" width="{WIDE}" height="{HIGH}" fill="none" stroke="{FAINT}"/>']
    for level, text in ((-2, "¼"), (0, "1"), (2, "4"), (4, "16")):
        y = up(level)
        pieces.append(
            f'<path d="M{left} {y:.1f}h{WIDE}" stroke="{FAINT}" stroke-width="{1 if level else 2}"/>'
        )
        if first:
            pieces.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    if last:
        for size in sizes:
            x = across(size)
            pieces.append(
                f'<text x="{x:.1f}" y="{top + HIGH + 14}" text-anchor="middle" font-size="9">{size}</text>'
            )
    if not math.isfinite(scale):  # the plan's run there diverged: there is nothing to measure by
        return pieces
    for kind, line in lines.items():
        points = [(across(size), up(math.log2(value / scale))) for size, value in line.items() if value > 0]
        dash = ' stroke-dasharray="4 3"' if kind == "standard" else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        pieces.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[kind]}" stroke-width="1.8"{dash}/>'
        )
        pieces += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{COLOURS[kind]}"/>' for x, y in points]
        pieces.append(_label(place, kind, tracks[kind], quantity, axis))
    return pieces


def _label(place: tuple[float, float], kind: str, tracks: Sequence[Track], quantity: str, axis: Axis) -> str:
    """The slope, less what it should be."""
    found = [slope for slope in fit_slopes(tracks) if (slope.quantity, slope.axis) == (quantity, axis)]
    text = "" if not found else f"{found[0].excess:+.2f}" if math.isfinite(found[0].excess) else "diverged"
    x, y, anchor = (place[0] + 4, place[1] + 12, "start")
    if kind == "standard":
        x, y, anchor = (place[0] + WIDE - 4, place[1] + HIGH - 5, "end")
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{COLOURS[kind]}">{text}</text>'


def _line(tracks: Sequence[Track], quantity: str, axis: Axis, centre: Size) -> dict[int, float]:
    """By size along the axis: the geometric mean over seeds; sizes where a run diverged are left out."""
    found: dict[int, list[float]] = {}
    for track in tracks:
        size = track.size
        if (size.depth if axis == "width" else size.width) == (
            centre.depth if axis == "width" else centre.width
        ):
            depths = size.depth / centre.depth if "branch" in quantity else 1.0
            along = size.width if axis == "width" else size.depth
            found.setdefault(along, []).append(track.values[quantity][-1] * depths)
    return {
        size: math.exp(sum(map(math.log, values)) / len(values))
        for size, values in sorted(found.items())
        if all(math.isfinite(value) and value > 0 for value in values)
    }


def _legend(centre: Size) -> str:
    said = {"plan": "plan (solid)", "standard": "standard (dashed)"}
    spans = "   ".join(f'<tspan fill="{COLOURS[kind]}">{text}</tspan>' for kind, text in said.items())
    note = f"of the plan's value at {centre}; branches × depth; numbers: slope, less what it should be"
    return f'<text x="{LEFT}" y="32" xml:space="preserve">{spans}   {note}</text>'
