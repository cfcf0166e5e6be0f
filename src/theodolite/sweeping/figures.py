"""Figures of a sweep: loss against the swept quantity, a curve for each size; for the page and as SVG."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from theodolite.core.size import Size
from theodolite.present.figure import INK, Figure, Panel, frame
from theodolite.present.svg import SvgAxis, SvgFigure, SvgLine, SvgRow
from theodolite.present.text import signed
from theodolite.sweeping.curves import Optimum, Row, Scale, SweepCurve
from theodolite.sweeping.families import Family, analyse, optimum_text
from theodolite.sweeping.transfer import ALONG, Along, lines_of

Range = tuple[float, float]
FIRST_HUE, LAST_HUE = 0.58, 1.07
"""From blue through violet and red to orange."""
LUMINANCE = 0.2
"""Of every colour: a contrast of at least 4 with white and with black."""


def figures(families: Sequence[Family]) -> tuple[Figure, ...]:
    """For each optimizer, along width and along depth, a panel for each parameterization."""
    found = []
    for optimizer in dict.fromkeys(family.optimizer for family in families):
        mine = [family for family in families if family.optimizer == optimizer]
        drawn = [along for along in ALONG if any(on_line(family, along) for family in mine)]
        for along in drawn:
            found.append(_figure(mine, [on_line(family, along) for family in mine], optimizer))
        if not drawn:  # one size only
            found.append(_figure(mine, [sizes_of(family) for family in mine], optimizer))
    return tuple(found)


def sizes_of(family: Family) -> list[Size]:
    """All sizes of a family."""
    return [curve.size for curve in family.curves]


def on_line(family: Family, along: Along) -> list[Size]:
    """The sizes that are drawn together: the line through the base, or the longest one."""
    lines = lines_of(sizes_of(family), along)
    return max(lines, key=lambda line: (family.base in line, len(line)), default=[])


def loss_range(curves: Sequence[SweepCurve]) -> Range:
    """The range in which the four best points of every curve are visible, with a margin."""
    found = [sorted(mean for mean in curve.means if math.isfinite(mean)) for curve in curves]
    found = [means for means in found if means]
    if not found:
        return 0.0, 1.0
    low, high = min(means[0] for means in found), max(means[:4][-1] for means in found)
    air = 0.08 * (high - low) or 0.05 * abs(low) or 1.0
    return low - air, high + air


def place_range(families: Sequence[Family]) -> Range:
    """The range of the swept quantity, with a margin."""
    places = [f.scale.place(value) for f in families for curve in f.curves for value in curve.values]
    air = 0.04 * (max(places) - min(places)) or 1.0
    return min(places) - air, max(places) + air


def height(curve: SweepCurve, optimum: Optimum, scale: Scale) -> float:
    """The height of the mark of an optimum: on the line that is drawn, not on the parabola."""
    points = [
        (scale.place(value), mean)
        for value, mean in zip(curve.values, curve.means, strict=True)
        if math.isfinite(mean)
    ]
    places, means = zip(*points, strict=True)
    return float(np.interp(scale.place(optimum.value), places, means))


def _figure(families: Sequence[Family], chosen: Sequence[Sequence[Size]], optimizer: str) -> Figure:
    sizes = sorted({size for line in chosen for size in line})
    shown = [curve for f in families for curve in f.curves if curve.size in sizes]
    ranges = place_range(families), loss_range(shown)
    paint = colours(sizes)
    panels = tuple(
        _panel(family, [size for size in sizes if size in chosen[index]], paint, ranges)
        for index, family in enumerate(families)
        if chosen[index]
    )
    scale = families[0].scale
    listed = ", ".join(str(size) for size in sizes)
    return Figure(
        caption=f"{optimizer}: held-out loss against {scale.label} at {listed}, from blue to orange. "
        "Bands: least and greatest of the seeds. Discs: the optimum.",
        alt=". ".join(_said(family, chosen[index]) for index, family in enumerate(families) if chosen[index]),
        panels=panels,
    )


def _panel(
    family: Family, sizes: Sequence[Size], paint: Mapping[Size, str], ranges: tuple[Range, Range]
) -> Panel:
    data: list[dict[str, Any]] = []
    rings: list[dict[str, Any]] = []
    for curve, optimum in zip(family.curves, family.optima, strict=True):
        if curve.size in sizes:
            data += _traces(curve, family, paint[curve.size])
            rings += _ring(curve, optimum, family, paint[curve.size])
    layout = frame(height=300)
    title = "log<sub>2</sub> " + family.scale.name if family.scale.log else family.scale.name
    layout["xaxis"] |= {"range": list(ranges[0]), "title": {"text": title, "standoff": 6}, "nticks": 9}
    layout["yaxis"] |= {"range": list(ranges[1]), "title": {"text": "held-out loss", "standoff": 6}}
    return Panel(family.title, (*data, *rings), layout)


def _traces(curve: SweepCurve, family: Family, colour: str) -> Iterator[dict[str, Any]]:
    """The band over the seeds, then the means. Points that diverged are left out."""
    kept = [index for index, mean in enumerate(curve.means) if math.isfinite(mean)]
    places = [family.scale.place(curve.values[index]) for index in kept]
    columns = [[float(loss) for loss in curve.losses[:, index] if not math.isnan(loss)] for index in kept]
    if any(len(column) > 1 for column in columns):
        yield {
            "type": "scatter",
            "mode": "lines",
            "x": [*places, *reversed(places)],
            "y": [*map(min, columns), *reversed([*map(max, columns)])],
            "fill": "toself",
            "fillcolor": f"{colour}33",
            "line": {"width": 0, "color": colour},
            "hoverinfo": "skip",
        }
    yield {
        "type": "scatter",
        "mode": "lines+markers",
        "name": str(curve.size),
        "x": places,
        "y": [float(curve.means[index]) for index in kept],
        "text": [family.scale.text(curve.values[index]) for index in kept],
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": f"{curve.size} at %{{text}}: %{{y:.4f}}<extra></extra>",
    }


def _ring(curve: SweepCurve, optimum: Optimum, family: Family, colour: str) -> Iterator[dict[str, Any]]:
    if math.isfinite(optimum.value) and not optimum.noisy:
        yield {
            "type": "scatter",
            "mode": "markers",
            "x": [family.scale.place(optimum.value)],
            "y": [height(curve, optimum, family.scale)],
            "marker": {"color": colour, "size": 11, "line": {"color": INK, "width": 1.5}},
            "hovertemplate": f"{optimum.size}: best {optimum_text(optimum, family.scale)}<extra></extra>",
        }


def _said(family: Family, sizes: Sequence[Size]) -> str:
    best = [
        f"{optimum.size} best {'' if optimum.noisy else 'at '}{optimum_text(optimum, family.scale)}"
        for optimum in family.optima
        if optimum.size in sizes
    ]
    return f"{family.title}: {', '.join(best)}"


def draw(
    rows: Sequence[Row],
    *,
    base: Size,
    optimizer: str,
    over: str = "lr",
    axes: Sequence[str] = (),
    title: str = "",
) -> str:
    """Loss against the swept quantity as SVG for one optimizer: columns width and depth, a row a family.

    Args:
        rows: as `Ledger.rows` gives them; what is needed of them is `optimizer`, `parameterization`, `width`,
            `depth`, `seed`, `status`, `held_out`, the swept quantity and the further axes.
        base: the size that optima are transferred from.
        optimizer: whose rows to draw.
        over: the swept quantity.
        axes: further ones: each combination of their values has a row of panels.
        title: above the figure.
    """
    mine = [row for row in rows if row["optimizer"] == optimizer]
    families = analyse(mine, base=base, over=over, axes=axes)
    shown = [along for along in ALONG if any(on_line(family, along) for family in families)]
    sizes = sorted({size for family in families for along in shown for size in on_line(family, along)})
    paint, scale = colours(sizes), families[0].scale
    places = sorted({scale.place(value) for f in families for curve in f.curves for value in curve.values})
    if scale.log:  # whole octaves
        places = [float(e) for e in range(math.ceil(places[0] - 1e-9), math.floor(places[-1] + 1e-9) + 1)]
    marks = {place: f"2^{place:g}" if scale.log else f"{place:.3g}" for place in places}
    x = SvgAxis(*place_range(families), dict([*marks.items()][:: math.ceil(len(marks) / 6)]))
    low, high = loss_range([curve for family in families for curve in family.curves])
    y = SvgAxis(low, high, {loss: f"{loss:g}" for loss in _round_numbers(low, high)})
    return SvgFigure(
        title=title or f"{optimizer}: held-out loss against {scale.label}",
        legend=[(str(size), paint[size]) for size in sizes],
        columns=shown,
        rows=[
            SvgRow(
                family.title,
                x,
                y,
                [_svg_lines(family, on_line(family, along), paint) for along in shown],
                note=_drift_note(family),
            )
            for family in families
        ],
    ).svg()


def _svg_lines(family: Family, sizes: Sequence[Size], paint: Mapping[Size, str]) -> list[SvgLine]:
    found = []
    for curve, optimum in zip(family.curves, family.optima, strict=True):
        if curve.size in sizes:
            points = [(family.scale.place(v), m) for v, m in zip(curve.values, curve.means, strict=True)]
            found.append(SvgLine(points, paint[curve.size]))
            if math.isfinite(optimum.value) and not optimum.noisy:
                spot = family.scale.place(optimum.value), height(curve, optimum, family.scale)
                found.append(SvgLine([spot], paint[curve.size], joined=False, dot=7.0))
    return found


def _drift_note(family: Family) -> str:
    known = [drift for drift in family.drifts if math.isfinite(drift.slope)]
    said = ", ".join(f"{signed(drift.slope)} with {drift.along}" for drift in known)
    return f"dots: the optimum; its drift per doubling: {said}" if said else "dots: the optimum"


def _round_numbers(low: float, high: float) -> list[float]:
    """Three to six round numbers in between."""
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(step for step in (power, power / 2, power / 5, power / 10) if (high - low) / step >= 3)
    return [round(k * step, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def colours(sizes: Sequence[Size]) -> dict[Size, str]:
    """By size, colours of equal luminance.

    >>> colours([Size(64, 4), Size(128, 4)])
    {Size(width=64, depth=4): '#2a7fcd', Size(width=128, depth=4): '#bb6526'}
    """
    steps = max(len(sizes) - 1, 1)
    return {
        size: _colour(FIRST_HUE + (LAST_HUE - FIRST_HUE) * index / steps) for index, size in enumerate(sizes)
    }


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, from 0 for black to 1 for white, as WCAG defines it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _colour(hue: float) -> str:
    low, high = 0.0, 1.0
    for _ in range(20):  # lightness by bisection: luminance rises with it
        middle = (low + high) / 2
        if luminance(_hex(hue, middle)) < LUMINANCE:
            low = middle
        else:
            high = middle
    return _hex(hue, high)


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue % 1, lightness, 0.66))
