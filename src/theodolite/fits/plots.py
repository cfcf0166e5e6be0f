"""Pieces of the figures of a fit: points, curves, bands and axes in plotly's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from theodolite.fits.minimizing import Array
from theodolite.present.figure import ACCENT, INK, frame

MOST_CURVES = 6
"""Curves drawn where there are many: at quantiles of what sets them apart."""


def points(x: Array, y: Array, name: str) -> dict[str, Any]:
    """Measured values; `name` says what x is."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": _rounded(x),
        "y": _rounded(y),
        "marker": {"color": ACCENT, "size": 5, "opacity": 0.7},
        "hovertemplate": f"{name} %{{x:.4g}}: %{{y:.4g}}<extra></extra>",
    }


def line(x: Array, y: Array) -> dict[str, Any]:
    """A fitted curve."""
    style = {"line": {"color": INK, "width": 1.5}, "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines", "x": _rounded(x), "y": _rounded(y), **style}


def band(x: Array, low: Array, high: Array) -> dict[str, Any]:
    """The interval around a curve."""
    around, edge = np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])
    fill = {"fill": "toself", "fillcolor": "rgba(128,128,128,0.2)", "line": {"width": 0}, "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines", "x": _rounded(around), "y": _rounded(edge), **fill}


def axes(x_title: str, y_title: str = "", *, log: bool = True, log_y: bool = False) -> dict[str, Any]:
    """A layout with titles; x is logarithmic, y if asked for."""
    layout, decades = frame(height=260, x=x_title, y=y_title), {"type": "log", "exponentformat": "power"}
    layout["xaxis"] |= decades if log else {}
    layout["yaxis"] |= {"nticks": 6, **(decades if log_y else {})}
    return layout


def spread(num: int) -> list[int]:
    """Which of `num` curves are drawn."""
    return sorted({round(place) for place in np.linspace(0, num - 1, min(num, MOST_CURVES))})


def _rounded(values: Sequence[float] | Array) -> list[float | None]:
    """Six digits; None for what is not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]
