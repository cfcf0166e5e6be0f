"""A grid of panels with lines in them, as one SVG that can be read on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

INK, FAINT = "#808080", "#80808055"
# Middle tones, which can be read on white and on black: an image does not know its page.
BLUE, ORANGE, GREEN, PINK, VIOLET = "#3a8ee6", "#e07b39", "#3fa45b", "#d3549b", "#8a6ee0"
WIDE, HIGH, GAP = 168, 118, 14
LEFT, TOP, BOTTOM = 74, 76, 40
APART = 26
"""Between rows, where the ticks of each stand."""


@dataclass(frozen=True)
class SvgLine:
    """Points that are joined, in a colour; a band about them, if there are seeds to spread."""

    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()
    joined: bool = True
    """Otherwise each point is a dot of its own, …"""
    dot: float = 2.6
    """… of this width."""
    label: str = ""
    """In the panel: of the first line in the upper left corner, of others in the lower right one."""


@dataclass(frozen=True)
class SvgAxis:
    """From low to high, with a text at some values. What lies beyond is drawn at the edge."""

    low: float
    high: float
    ticks: Mapping[float, str]
    strong: float | None = None
    """A value whose line is drawn thicker."""

    def part(self, value: float) -> float:
        """How far along a value is, from 0 to 1."""
        return (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class SvgRow:
    """Panels side by side that share their axes."""

    label: str
    x: SvgAxis
    y: SvgAxis
    panels: Sequence[Sequence[SvgLine]]
    note: str = ""
    """What the axis is, under the row."""


@dataclass(frozen=True)
class SvgFigure:
    """Rows of panels under the names of their columns."""

    title: str
    legend: Sequence[tuple[str, str]]
    """Text and colour."""
    columns: Sequence[str]
    rows: Sequence[SvgRow] = field(default_factory=tuple)
    wide: int = WIDE
    high: int = HIGH
    """Of a panel."""

    def svg(self) -> str:
        """The drawing."""
        wide, high = self.wide, self.high
        width = LEFT + max(len(self.columns), 3) * (wide + GAP)
        height = TOP + len(self.rows) * (high + GAP + APART) + BOTTOM - APART
        pieces = [head(width, height, self.title), legend(self.legend)]
        for column, name in enumerate(self.columns):
            x = LEFT + column * (wide + GAP) + wide / 2
            pieces.append(f'<text x="{x}" y="{TOP - 8}" text-anchor="middle">{escape(name)}</text>')
        for place, row in enumerate(self.rows):
            top = TOP + place * (high + GAP + APART)
            pieces.append(turned(row.label, 14, top + high / 2))
            for column, lines in enumerate(row.panels):
                left = LEFT + column * (wide + GAP)
                pieces += _panel((left, top, wide, high), row, lines, first=column == 0)
            if row.note:
                x = LEFT + len(row.panels) * (wide + GAP) - GAP
                pieces.append(
                    f'<text x="{x}" y="{top + high + 27}" text-anchor="end" font-size="10">'
                    f"{escape(row.note)}</text>"
                )
        return "\n".join([*pieces, "</svg>", ""])


def head(width: float, height: float, title: str) -> str:
    """The opening of a drawing, with its title."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="11" fill="{INK}" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """What the colours are."""
    spans = "    ".join(f'<tspan fill="{colour}">{escape(text)}</tspan>' for text, colour in entries)
    return f'<text x="{LEFT}" y="38" xml:space="preserve">{spans}</text>'


def turned(text: str, x: float, y: float) -> str:
    """A text that runs upwards."""
    return f'<text x="{x}" y="{y}" text-anchor="middle" transform="rotate(-90 {x} {y})">{escape(text)}</text>'


def ticks(values: Sequence[float], *, power: bool = False) -> dict[float, str]:
    """Texts for values; as powers of ten where they are exponents.

    >>> ticks([-1.0, 0.5]), ticks([-3.0], power=True)
    ({-1.0: '-1', 0.5: '0.5'}, {-3.0: '10⁻³'})
    """
    return {value: power_of(10, value) if power else f"{value:g}" for value in values}


def power_of(base: int, exponent: float) -> str:
    """A power as one writes it.

    >>> power_of(10, -12.0), power_of(10, 0.5), power_of(2, 0)
    ('10⁻¹²', '10^0.5', '2⁰')
    """
    if exponent != round(exponent):
        return f"{base}^{exponent:g}"
    return str(base) + f"{exponent:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _panel(
    place: tuple[int, int, int, int], row: SvgRow, lines: Sequence[SvgLine], *, first: bool
) -> list[str]:
    left, top, wide, high = place

    def across(value: float) -> float:
        return left + wide * row.x.part(value)

    def up(value: float) -> float:
        return top + high - high * row.y.part(value)

    pieces = [f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="none" stroke="{FAINT}"/>']
    for value, text in row.y.ticks.items():
        y, thick = up(value), 2 if value == row.y.strong else 1
        pieces.append(f'<path d="M{left} {y:.1f}h{wide}" stroke="{FAINT}" stroke-width="{thick}"/>')
        if first:
            pieces.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in row.x.ticks.items():
        x = across(value)
        pieces.append(f'<path d="M{x:.1f} {top + high}v3" stroke="{INK}"/>')
        pieces.append(
            f'<text x="{x:.1f}" y="{top + high + 14}" text-anchor="{_anchor(row.x.part(value))}" '
            f'font-size="9">{text}</text>'
        )
    for number, line in enumerate(lines):
        good = [place for place, (_, y) in enumerate(line.points) if math.isfinite(y)]
        spots = [(across(line.points[place][0]), up(line.points[place][1])) for place in good]
        if line.label:
            corner = (left + wide - 4, top + high - 5, "end") if number else (left + 4, top + 12, "start")
            pieces.append(
                f'<text x="{corner[0]}" y="{corner[1]}" text-anchor="{corner[2]}" fill="{line.colour}">'
                f"{escape(line.label)}</text>"
            )
        if not line.joined:
            dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in spots)  # much shorter than a circle each
            pieces.append(
                f'<path d="{dots}" stroke="{line.colour}" stroke-width="{line.dot}" stroke-linecap="round"/>'
            )
            continue
        if len(line.lows):
            edge = [(across(line.points[place][0]), up(line.highs[place])) for place in good]
            edge += [(across(line.points[place][0]), up(line.lows[place])) for place in reversed(good)]
            pieces.append(f'<polygon points="{_path(edge)}" fill="{line.colour}" fill-opacity="0.2"/>')
        dash = ' stroke-dasharray="4 3"' if line.dashed else ""
        pieces.append(
            f'<polyline points="{_path(spots)}" fill="none" stroke="{line.colour}" stroke-width="1.6"{dash}/>'
        )
    return pieces


def _anchor(part: float) -> str:
    """A text at an edge stays within its panel: there is one beside it."""
    return "start" if part == 0 else "end" if part == 1 else "middle"


def _path(spots: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
