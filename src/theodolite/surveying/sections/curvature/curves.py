"""Figures of curvature for the page: the excess along an axis, and the density of the spectrum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from theodolite.present.figure import ACCENT, FAINT, QUIET, Figure, Panel, frame
from theodolite.probes.curvature.density import Density
from theodolite.surveying.edges import Ends
from theodolite.surveying.sections.curvature.zones import Axis, Zones

TITLES = {"T": "Logits divided by T", "α": "Weights multiplied by α"}
PLACES = 600
"""At which the density is drawn."""
LEAST = 0.1
"""Of an eigenvalue: below this the density is only the tail of its smearing."""


def zone_figure(zones: Zones) -> Figure:
    """Both axes side by side, on one scale."""
    axes = zones.temperature, zones.scale
    ends = [end for axis in axes for one in axis.excess for end in (one.low, one.high)]
    air = 0.08 * (max(ends) - min(ends)) or 1.0
    y_range = min(0.0, min(ends)) - air, max(ends) + air
    return Figure(
        caption="Excess of positive curvature Tr(H)/‖H‖ against the temperature and against the scale of "
        "the weights, with 95 % intervals. Shaded: the zone, where it has at least half of its peak. "
        "Dotted: this network, at 1.",
        alt=". ".join(_said(axis) for axis in axes),
        panels=tuple(_panel(axis, y_range) for axis in axes),
    )


def density_figure(spectrum: Density, ends: Ends) -> Figure:
    """How many eigenvalues there are of which size, down to a single one."""
    grid = spectrum.grid(PLACES)
    # So that one eigenvalue by itself is as high as 1.
    values = spectrum.size * spectrum.values(grid) * spectrum.width * math.sqrt(2 * math.pi)
    shown = values.clamp(min=LEAST)
    top = math.log10(float(shown.max())) + 0.3
    layout = frame(height=260)
    layout["xaxis"] |= {"title": {"text": "eigenvalue", "standoff": 6}, "nticks": 9}
    layout["yaxis"] |= {
        "type": "log",
        "title": {"text": "eigenvalues", "standoff": 6},
        "range": [math.log10(LEAST), top],
        **_ticks(math.log10(LEAST), top),
    }
    layout["shapes"] = [_upright(0.0)]
    line = _line(grid.tolist(), shown.tolist(), "%{x:.3g}: %{y:.3g}<extra></extra>") | {
        "fill": "tozeroy",
        "fillcolor": FAINT,
    }
    negative = float((spectrum.weights * (spectrum.nodes < 0)).sum(1).mean())
    return Figure(
        caption=f"Density of the Hessian's {spectrum.size:,} eigenvalues: about how many lie at each place, "
        f"each smeared by {spectrum.width:.2g}. What stands apart from the bulk is an outlier.",
        alt=f"Eigenvalues from {ends.smallest:.3g} to {ends.largest:.3g}, most of them near zero, "
        f"{100 * negative:.0f} % of them below it",
        panels=(Panel("Spectrum of the Hessian", (line,), layout),),
    )


def _panel(axis: Axis, y_range: tuple[float, float]) -> Panel:
    places, excess = list(axis.places), axis.excess
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": [*places, *reversed(places)],
        "y": [*(one.low for one in excess), *(one.high for one in reversed(excess))],
        "fill": "toself",
        "fillcolor": FAINT,
        "line": {"width": 0, "color": FAINT},
        "hoverinfo": "skip",
    }
    line = _line(places, [one.value for one in excess], f"{axis.name} %{{x:.3g}}: %{{y:.3g}}<extra></extra>")
    line |= {"mode": "lines+markers", "marker": {"color": ACCENT, "size": 6}}
    low, high = math.log10(places[0]), math.log10(places[-1])
    air = 0.03 * (high - low)
    layout = frame(height=240)
    layout["xaxis"] |= {
        "type": "log",
        "range": [low - air, high + air],
        "title": {"text": axis.name, "standoff": 6},
        **_ticks(low - air, high + air),
    }
    layout["yaxis"] |= {"range": list(y_range), "nticks": 5, "title": {"text": "excess", "standoff": 6}}
    layout["shapes"] = [_level(0.0), _upright(1.0)]
    if axis.zone is not None:
        ends = (max(axis.zone.low, low - air), min(axis.zone.high, high + air))
        layout["shapes"].append(_shaded(*(10**end for end in ends)))
    return Panel(TITLES[axis.name], (band, line), layout)


def _ticks(low: float, high: float) -> dict[str, Any]:
    """Powers of ten on a logarithmic axis, at most seven; over a short one 2 and 5 between them."""
    if high - low < 3:
        places = [m * 10.0**k for k in range(math.floor(low), math.ceil(high)) for m in (1, 2, 5)]
        places = [place for place in places if low <= math.log10(place) <= high]
        return {"tickvals": places, "ticktext": [f"{place:g}" for place in places]}
    powers = range(math.ceil(low), math.floor(high) + 1)
    powers = powers[:: math.ceil(len(powers) / 7)]
    return {"tickvals": [10.0**power for power in powers], "ticktext": [_power(power) for power in powers]}


def _power(power: int) -> str:
    """A power of ten, written out where it is near to 1.

    >>> _power(-1), _power(3), _power(-5)
    ('0.1', '1000', '10⁻⁵')
    """
    if abs(power) <= 3:
        return f"{10.0**power:g}"
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _line(x: Sequence[float], y: Sequence[float], hover: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": list(y),
        "line": {"color": ACCENT, "width": 2},
        "hovertemplate": hover,
    }


def _upright(x: float) -> dict[str, Any]:
    line = {"color": QUIET, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _level(y: float) -> dict[str, Any]:
    line = {"color": FAINT, "width": 1}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _shaded(x0: float, x1: float) -> dict[str, Any]:
    return {
        "type": "rect",
        "x0": x0,
        "x1": x1,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "fillcolor": ACCENT,
        "opacity": 0.12,
        "line": {"width": 0},
        "layer": "below",
    }


def _said(axis: Axis) -> str:
    at = axis.places[axis.excess.index(axis.peak)]
    return (
        f"{TITLES[axis.name]}: the excess is {axis.start.t.value:.2g} at 1 and at most "
        f"{axis.peak.value:.2g}, at {axis.name} = {at:.2g}"
    )
