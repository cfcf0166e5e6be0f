"""Figures as plain data: small panels in plotly's format, with colours named, not fixed.

A colour is the name of a CSS variable of the page (`var(--ink)`): the page's script puts in what the
variable stands for, so that one figure serves light, dark and paper. Nothing here imports plotly; the
page carries its script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from theodolite.core.files import plain
from theodolite.present.text import signed

INK, QUIET, FAINT, ACCENT = "var(--ink)", "var(--quiet)", "var(--rule)", "var(--accent)"


@dataclass(frozen=True)
class Panel:
    """One pair of axes: plotly's `data` and `layout`, and a title that the page sets in its own type."""

    title: str
    data: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """Small multiples under one caption."""

    caption: str
    alt: str
    """What a reader who cannot see it should know."""
    panels: tuple[Panel, ...]

    def to_dict(self) -> dict[str, Any]:
        """As values that JSON knows."""
        found: dict[str, Any] = plain(self)
        return found


def power_law(
    title: str,
    x: Sequence[float],
    y: Sequence[float],
    *,
    x_title: str,
    slope: float,
    y_range: tuple[float, float],
) -> Panel:
    """Positive values against a size on two logarithmic axes, beside a flat line from the first of them.

    `y_range` is given, not found, so that panels side by side share it.
    """
    low, high = (math.log10(bound) for bound in y_range)
    level = line(x, [y[0]] * len(x))
    points = line(x, y, hover=f"{x_title} %{{x}}: %{{y:.4g}}", markers=7)
    falls, rises = slope < -0.05, slope > 0.05
    # A line that falls ends in the lower right, one that rises in the upper right: the label stands left.
    corner = ("left" if falls or rises else "right", "bottom" if falls else "top")
    label = {
        "xref": "paper",
        "yref": "paper",
        "x": 0.04 if falls or rises else 1.0,
        "y": 0.02 if falls else 0.98,
        "xanchor": corner[0],
        "yanchor": corner[1],
        "text": f"slope {signed(slope)}",
        "showarrow": False,
        "font": {"size": 13, "color": ACCENT},
    }
    layout = frame(height=190, x=x_title)
    pad = 0.08 * (math.log10(max(x)) - math.log10(min(x)))
    layout["xaxis"] |= {
        "type": "log",
        "tickvals": list(x),
        "ticktext": [f"{value:g}" for value in x],
        "range": [math.log10(min(x)) - pad, math.log10(max(x)) + pad],
    }
    layout["yaxis"] |= {
        "type": "log",
        "range": [low, high],
        "tickvals": (ticks := _ticks(*y_range)),
        "ticktext": [f"{tick:g}" for tick in ticks],
    }
    layout["annotations"] = [label]
    return Panel(title, (level, points), layout)


def stacked_bars(
    title: str,
    x: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    *,
    x_title: str,
) -> Panel:
    """Bars that add up, one colour for each part."""
    data = tuple(
        bars(x, heights, color=colors[name], hover=f"{name}: %{{y:,}}") | {"name": name}
        for name, heights in parts.items()
    )
    layout = frame(height=200, x=x_title)
    layout |= {"barmode": "stack", "bargap": 0.25 if len(x) <= 26 else 0.0}
    layout["xaxis"] |= {"type": "category", "ticks": "", "tickvals": _spaced(x), "tickangle": 0}
    layout["yaxis"] |= {"nticks": 4, "exponentformat": "B", "rangemode": "tozero"}
    return Panel(title, data, layout)


def line(
    x: Sequence[Any], y: Sequence[float | None], *, hover: str = "", markers: int = 0, **more: Any
) -> dict[str, Any]:
    """A line through points, with markers of a size if that is given; without `hover`, dotted and quiet."""
    color = ACCENT if hover else QUIET
    drawn: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "x": list(x),
        "y": plain(list(y)),
        "line": {"color": color, "width": 2} if hover else {"color": color, "width": 1, "dash": "dot"},
    }
    drawn |= _hover(hover)
    return drawn | ({"marker": {"color": color, "size": markers}} if markers else {}) | more


def guide(*, x: float | None = None, y: float | None = None) -> dict[str, Any]:
    """A thin line across the panel: dotted and upright at x, or level at y."""
    if x is not None:
        style = {"color": QUIET, "width": 1, "dash": "dot"}
        return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": style}
    ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}
    return {"type": "line", **ends, "line": {"color": FAINT, "width": 1}}


def bars(
    x: Sequence[Any], y: Sequence[float | None], *, color: str = ACCENT, hover: str = ""
) -> dict[str, Any]:
    """Bars; `hover` is the text under the pointer."""
    marker = {"color": color, "line": {"width": 0}}
    return {"type": "bar", "x": list(x), "y": plain(list(y)), "marker": marker, **_hover(hover)}


def heat_map(
    z: Sequence[Sequence[float | None]],
    *,
    x: Sequence[Any] | None = None,
    y: Sequence[Any] | None = None,
    colors: str = "Viridis",
    hover: str = "",
) -> dict[str, Any]:
    """A matrix as colours, with a thin colour bar."""
    places = {name: list(value) for name, value in (("x", x), ("y", y)) if value is not None}
    bar = {"thickness": 10, "outlinewidth": 0}
    return {
        "type": "heatmap",
        **places,
        "z": plain(z),
        "colorscale": colors,
        "colorbar": bar,
        **_hover(hover),
    }


def _hover(text: str) -> dict[str, str]:
    return {"hovertemplate": f"{text}<extra></extra>"} if text else {"hoverinfo": "skip"}


def frame(*, height: int, x: str = "", y: str = "") -> dict[str, Any]:
    """A layout with quiet axes, their titles, and nothing else on it."""
    axis = {
        "automargin": True,
        "fixedrange": True,  # a finger that scrolls the page must not drag an axis
        "showgrid": False,
        "zeroline": False,
        "showline": True,
        "linecolor": FAINT,
        "linewidth": 1,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": FAINT,
    }
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "font": {
            "family": "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', "
            "'Liberation Sans', Arial, sans-serif",
            "size": 12,
            "color": QUIET,
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "hoverlabel": {"bgcolor": "var(--paper)", "bordercolor": FAINT, "font": {"color": INK}},
        "xaxis": axis | _titled(x),
        "yaxis": axis | _titled(y),
    }


def _titled(text: str) -> dict[str, Any]:
    return {"title": {"text": text, "standoff": 6}} if text else {}


def _spaced(labels: Sequence[str]) -> list[str]:
    """The two ends, and as many labels between them, at a round distance, as a narrow figure has room for."""
    step = next(step for k in range(9) for step in (10**k, 2 * 10**k, 5 * 10**k) if len(labels) <= 8 * step)
    inner = range(1, len(labels) - 1) if step == 1 else range(1 + step, len(labels) - step // 2, step)
    return [labels[0], *(labels[index] for index in inner), labels[-1]]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers 1, 2, 5 × 10^k inside the range; no more than four of them."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    inside = [m * 10.0**k for k in decades for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    inside = [float(f"{tick:.12g}") for tick in inside]
    return inside[:: max(1, math.ceil(len(inside) / 4))]
