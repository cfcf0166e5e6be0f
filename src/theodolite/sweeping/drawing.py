"""Loss against the swept quantity as one SVG, from rows alone: columns width and depth, a row a family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from theodolite.core.size import Size
from theodolite.sweeping.colours import colours
from theodolite.sweeping.curves import Curve, Row
from theodolite.sweeping.drift import ALONG, Along, extent
from theodolite.sweeping.families import Family, analyse
from theodolite.sweeping.optimum import Optimum
from theodolite.sweeping.pictures import Range, height, loss_range, on_line, place_range
from theodolite.sweeping.sentences import signed

# Middle tones, which can be read on white and on black: an image does not know its page.
INK, FAINT = "#808080", "#80808055"
WIDE, HIGH, GAP = 300, 190, 56
LEFT, TOP, BOTTOM = 96, 66, 40


def draw(
    rows: Sequence[Row],
    *,
    base: Size,
    optimizer: str,
    over: str = "lr",
    axes: Sequence[str] = (),
    title: str = "",
) -> str:
    """The figure for one optimizer.

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
    width = LEFT + len(shown) * (WIDE + GAP)
    height = TOP + len(families) * (HIGH + GAP) + BOTTOM - GAP
    title = title or f"{optimizer}: held-out loss against {families[0].scale.label}"
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="11" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT}" y="34">dots: the optimum; numbers: its drift per doubling</text>',
    ]
    curves = [curve for family in families for curve in family.curves]
    ranges = place_range(families), loss_range(curves)
    for column, along in enumerate(shown):
        sizes = sorted({size for family in families for size in on_line(family, along)})
        x = LEFT + column * (WIDE + GAP)
        pieces.append(f'<text x="{x}" y="{TOP - 6}">{_legend(sizes, along)}</text>')
        for line, family in enumerate(families):
            place = (x, TOP + line * (HIGH + GAP))
            pieces += _panel(place, family, along, colours(sizes), ranges, first=column == 0)
    return "\n".join([*pieces, "</svg>", ""])


class _Axes:
    """From places and losses to pixels."""

    def __init__(self, place: tuple[float, float], ranges: tuple[Range, Range]) -> None:
        self.left, self.top = place
        (self.first, self.last), (self.low, self.high) = ranges

    def x(self, place: float) -> float:
        return self.left + WIDE * (place - self.first) / (self.last - self.first)

    def y(self, loss: float) -> float:
        return self.top + HIGH - HIGH * (loss - self.low) / (self.high - self.low)


def _panel(
    place: tuple[float, float],
    family: Family,
    along: Along,
    paint: Mapping[Size, str],
    ranges: tuple[Range, Range],
    *,
    first: bool,
) -> list[str]:
    axes = _Axes(place, ranges)
    left, top = place
    box = f'<rect x="{left}" y="{top}" width="{WIDE}" height="{HIGH}"'
    cut = f"panel-{left}-{top}"
    pieces = [f'{box} fill="none" stroke="{FAINT}"/>', f'<clipPath id="{cut}">{box}/></clipPath>']
    if first:
        pieces.append(
            f'<text x="{left - 50}" y="{top + HIGH / 2}" text-anchor="middle" font-size="12" '
            f'transform="rotate(-90 {left - 50} {top + HIGH / 2})">{escape(family.title)}</text>'
        )
    pieces += _ticks(axes, family)
    sizes = on_line(family, along)
    pieces.append(f'<g clip-path="url(#{cut})">')
    for curve, optimum in zip(family.curves, family.optima, strict=True):
        if curve.size in sizes:
            pieces += _curve(axes, curve, optimum, family, paint[curve.size])
    pieces.append("</g>")
    drift = family.drift(along)
    if drift is not None and math.isfinite(drift.slope):
        pieces.append(
            f'<text x="{left + WIDE - 6}" y="{top - 6}" text-anchor="end" font-size="12">'
            f"{signed(drift.slope)}</text>"
        )
    return pieces


def _curve(axes: _Axes, curve: Curve, optimum: Optimum, family: Family, colour: str) -> list[str]:
    points = [
        (axes.x(family.scale.place(value)), axes.y(mean))
        for value, mean in zip(curve.values, curve.means, strict=True)
        if math.isfinite(mean)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    pieces = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>']
    if math.isfinite(optimum.value) and not optimum.noisy:
        x, y = axes.x(family.scale.place(optimum.value)), axes.y(height(curve, optimum, family.scale))
        pieces.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" stroke="{INK}"/>')
    return pieces


def _ticks(axes: _Axes, family: Family) -> list[str]:
    pieces = []
    places = sorted({family.scale.place(value) for curve in family.curves for value in curve.values})
    if family.scale.log:  # whole octaves
        places = [float(e) for e in range(math.ceil(places[0] - 1e-9), math.floor(places[-1] + 1e-9) + 1)]
    for place in places[:: math.ceil(len(places) / 10)]:
        x, y = axes.x(place), axes.top + HIGH
        text = f"2^{place:g}" if family.scale.log else f"{place:.3g}"
        pieces.append(f'<path d="M{x:.1f} {y}v4" stroke="{INK}"/>')
        pieces.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle" font-size="9">{text}</text>')
    for loss in _round_numbers(axes.low, axes.high):
        y = axes.y(loss)
        pieces.append(f'<path d="M{axes.left} {y:.1f}h{WIDE}" stroke="{FAINT}"/>')
        pieces.append(f'<text x="{axes.left - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:g}</text>')
    return pieces


def _round_numbers(low: float, high: float) -> list[float]:
    """Three to six round numbers in between."""
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(step for step in (power, power / 2, power / 5, power / 10) if (high - low) / step >= 3)
    return [round(k * step, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _legend(sizes: Sequence[Size], along: Along) -> str:
    paint = colours(sizes)
    spans = "  ".join(
        f'<tspan fill="{paint[size]}" font-weight="bold">{extent(size, along)}</tspan>' for size in sizes
    )
    return f"{along}  {spans}"
