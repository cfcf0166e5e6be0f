"""Figures of a sweep: loss or metric against the swept quantity, a curve for each size; page and SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from theodolite.core.size import Size
from theodolite.fleet.run import OWN
from theodolite.present.figure import INK, Figure, Panel, frame, line
from theodolite.present.svg import SvgAxis, SvgFigure, SvgLine, SvgRow
from theodolite.present.text import signed
from theodolite.sweeping.curves import Optimum, Scale, SweepCurve, labels
from theodolite.sweeping.families import Family, optimum_text
from theodolite.sweeping.transfer import ALONG, Along, lines_of

Range = tuple[float, float]
PALETTE = (
    *((42, 127, 205), (101, 114, 224), (140, 100, 223), (181, 76, 218)),
    *((213, 50, 187), (216, 66, 129), (218, 72, 72), (187, 101, 38)),
)
"""Red, green and blue of colours of equal luminance, from blue through violet and red to orange. They can be
read on white and on black."""


def figures(families: Sequence[Family]) -> tuple[Figure, ...]:
    """For each optimizer, along width and along depth, a panel for each parameterization.

    The panel of the workload's own optimizer is beside those of every other.
    """
    found = []
    optimizers = [*dict.fromkeys(family.optimizer for family in families)]
    for optimizer in [one for one in optimizers if one != OWN] or optimizers:
        mine = [family for family in families if family.optimizer in (optimizer, OWN)]
        drawn: list[Along | None] = [*_directions(mine)]
        for along in drawn or [None]:  # one size has no direction
            found.append(_figure(mine, along))
    return tuple(found)


def _directions(families: Sequence[Family]) -> list[Along]:
    return [along for along in ALONG if any(on_line(family, along) for family in families)]


def on_line(family: Family, along: Along | None) -> list[Size]:
    """The sizes that are drawn together: the line through the base, or the longest one; all for None."""
    sizes = [curve.size for curve in family.curves]
    lines = [sizes] if along is None else lines_of(sizes, along)
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


def _points(curve: SweepCurve, scale: Scale) -> list[tuple[float, float]]:
    """Places and mean losses, without those that diverged."""
    pairs = zip(curve.values, curve.means, strict=True)
    return [(scale.place(value), float(mean)) for value, mean in pairs if math.isfinite(mean)]


def _mark(curve: SweepCurve, optimum: Optimum, scale: Scale) -> tuple[float, float]:
    """Where the optimum is marked: on the line that is drawn, not on the parabola."""
    place = scale.place(optimum.value)
    places, means = zip(*_points(curve, scale), strict=True)
    return place, float(np.interp(place, places, means))


def _figure(families: Sequence[Family], along: Along | None) -> Figure:
    chosen = [(family, on_line(family, along)) for family in families]
    chosen = [(family, sizes) for family, sizes in chosen if sizes]
    sizes = sorted({size for _, mine in chosen for size in mine})
    paint, scale, shows = colours(sizes), families[0].scale, families[0].criterion.name
    named = labels(sizes)
    shown = [curve for family in families for curve in family.curves if curve.size in sizes]
    whose = " and ".join(dict.fromkeys(family.optimizer for family, _ in chosen))
    ranges = place_range(families), loss_range(shown)
    return Figure(
        caption=f"{whose}: {shows} against {scale.label} at {', '.join(named.values())}, from "
        "blue to orange. Bands: least and greatest of the seeds. Discs: the optimum.",
        alt=". ".join(_described(family, mine, named) for family, mine in chosen),
        panels=tuple(_panel(family, mine, paint, ranges, named) for family, mine in chosen),
    )


def _panel(
    family: Family,
    sizes: Sequence[Size],
    paint: Mapping[Size, str],
    ranges: tuple[Range, Range],
    named: Mapping[Size, str],
) -> Panel:
    drawn = [pair for pair in zip(family.curves, family.optima, strict=True) if pair[0].size in sizes]
    lines = [
        trace
        for curve, _ in drawn
        for trace in _traces(curve, family.scale, paint[curve.size], named[curve.size])
    ]
    discs = [
        _disc(*pair, family.scale, paint[pair[0].size], named[pair[0].size])
        for pair in drawn
        if _is_marked(pair[1])
    ]
    title = "log<sub>2</sub> " + family.scale.name if family.scale.log else family.scale.name
    layout = frame(height=300, x=title, y=family.criterion.name)
    layout["xaxis"] |= {"range": list(ranges[0]), "nticks": 9}
    layout["yaxis"] |= {"range": list(ranges[1])}
    return Panel(family.title, (*lines, *discs), layout)


def _traces(curve: SweepCurve, scale: Scale, colour: str, name: str) -> Iterator[dict[str, Any]]:
    """The band over the seeds, then the means. Points that diverged are left out."""
    kept = np.isfinite(curve.means)
    places, means = zip(*_points(curve, scale), strict=True) if kept.any() else ((), ())
    columns = [[loss for loss in column if not math.isnan(loss)] for column in curve.losses.T[kept].tolist()]
    if any(len(column) > 1 for column in columns):
        edge = [*map(min, columns), *reversed([*map(max, columns)])]
        none = {"width": 0, "color": colour}
        yield line([*places, *reversed(places)], edge, fill="toself", fillcolor=f"{colour}33", line=none)
    yield line(
        places,
        means,
        hover=f"{name} at %{{text}}: %{{y:.4f}}",
        mode="lines+markers",
        name=name,
        text=[scale.text(scale.value(place)) for place in places],
        line={"color": colour, "width": 2},
        marker={"color": colour, "size": 5},
    )


def _is_marked(optimum: Optimum) -> bool:
    return math.isfinite(optimum.value) and not optimum.noisy


def _disc(curve: SweepCurve, optimum: Optimum, scale: Scale, colour: str, name: str) -> dict[str, Any]:
    place, height = _mark(curve, optimum, scale)
    return line(
        [place],
        [height],
        hover=f"{name}: best {optimum_text(optimum, scale)}",
        mode="markers",
        marker={"color": colour, "size": 11, "line": {"color": INK, "width": 1.5}},
    )


def _described(family: Family, sizes: Sequence[Size], named: Mapping[Size, str]) -> str:
    scale, by = family.scale, family.criterion
    best = [
        f"{named[optimum.size]} best {'' if optimum.noisy else 'at '}{optimum_text(optimum, scale, by)}"
        for optimum in family.optima
        if optimum.size in sizes
    ]
    return f"{family.title}: {', '.join(best)}"


def draw(families: Sequence[Family], *, title: str = "") -> str:
    """Loss against the swept quantity as SVG: columns width and depth, a row for each family."""
    shown = _directions(families)
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
        title=title or f"{families[0].criterion.name} against {scale.label}",
        legend=[(name, paint[size]) for size, name in labels(sizes).items()],
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
            found.append(SvgLine(_points(curve, family.scale), paint[curve.size]))
            if _is_marked(optimum):
                mark = _mark(curve, optimum, family.scale)
                found.append(SvgLine([mark], paint[curve.size], joined=False, dot=7.0))
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
    at = np.linspace(0, len(PALETTE) - 1, len(sizes))
    channels = [np.interp(at, range(len(PALETTE)), channel) for channel in zip(*PALETTE, strict=True)]
    pixels = np.stack(channels, axis=1).round().astype(int).tolist()
    return {size: "#" + bytes(pixel).hex() for size, pixel in zip(sizes, pixels, strict=True)}
