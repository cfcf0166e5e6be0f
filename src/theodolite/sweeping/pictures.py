"""Figures of a sweep for the page: loss against the swept quantity, a curve for each size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from theodolite.core.size import Size
from theodolite.present.figure import INK, Figure, Panel, frame
from theodolite.sweeping.colours import colours
from theodolite.sweeping.curves import Curve
from theodolite.sweeping.drift import ALONG, Along, lines_of
from theodolite.sweeping.families import Family
from theodolite.sweeping.optimum import Optimum
from theodolite.sweeping.scale import Scale
from theodolite.sweeping.table import optimum_text

Range = tuple[float, float]


def figures(families: Sequence[Family]) -> tuple[Figure, ...]:
    """For each optimizer and for width and depth, panels that share their axes: the parameterizations."""
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


def loss_range(curves: Sequence[Curve]) -> Range:
    """From the least loss to where the four best points of every curve are to be seen, with some air."""
    found = [sorted(mean for mean in curve.means if math.isfinite(mean)) for curve in curves]
    found = [means for means in found if means]
    if not found:
        return 0.0, 1.0
    low, high = min(means[0] for means in found), max(means[:4][-1] for means in found)
    air = 0.08 * (high - low) or 0.05 * abs(low) or 1.0
    return low - air, high + air


def place_range(families: Sequence[Family]) -> Range:
    """From the least to the greatest place of the swept quantity, with some air."""
    places = [f.scale.place(value) for f in families for curve in f.curves for value in curve.values]
    air = 0.04 * (max(places) - min(places)) or 1.0
    return min(places) - air, max(places) + air


def height(curve: Curve, optimum: Optimum, scale: Scale) -> float:
    """Where the mark of an optimum stands: on the line that is drawn, not on the parabola below it."""
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


def _traces(curve: Curve, family: Family, colour: str) -> Iterator[dict[str, Any]]:
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


def _ring(curve: Curve, optimum: Optimum, family: Family, colour: str) -> Iterator[dict[str, Any]]:
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
