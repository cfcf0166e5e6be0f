"""The page of a Tracking: every measure against the steps, one below the other."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from theodolite.core.files import plain
from theodolite.present.figure import ACCENT, Figure, Panel, frame
from theodolite.present.page import figure_html, sheet

if TYPE_CHECKING:
    from theodolite.probes.curvature.tracking import Tracking

FAR_APART = 30.0
"""Positive values of a greater ratio are drawn on a logarithmic axis."""


def page(tracking: Tracking) -> str:
    """The measurements as one self-contained HTML page."""
    drawn = figure(tracking)
    return sheet(
        title="Measurements during training",
        kicker="Measurements during training",
        heading=f"{', '.join(tracking.names)} over {tracking.steps} steps",
        sections=[figure_html(drawn, 0), f"<p>{escape(tracking.cost)}</p>"],
        figures=[drawn],
    )


def figure(tracking: Tracking) -> Figure:
    """A panel for each measure."""
    said = []
    for name in tracking.names:
        values = tracking.values(name)
        said.append(f"{name} goes from {values[0]:.4g} to {values[-1]:.4g}")
    return Figure(
        caption=f"Measured every {tracking.every} steps. Bars: 95 % intervals, where an error is known.",
        alt=". ".join(said),
        panels=tuple(_panel(tracking, name) for name in tracking.names),
    )


def _panel(tracking: Tracking, name: str) -> Panel:
    values = tracking.values(name)
    errors = [1.96 * error if error > 0 else 0.0 for error in (row.errors[name] for row in tracking.rows)]
    drawn: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [row.step for row in tracking.rows],
        "y": plain(values),
        "line": {"color": ACCENT, "width": 2},
        "marker": {"color": ACCENT, "size": 5},
        "hovertemplate": f"step %{{x}}: {escape(name)} %{{y:.4g}}<extra></extra>",
    }
    if any(errors):
        drawn["error_y"] = {
            "type": "data",
            "array": plain(errors),
            "color": ACCENT,
            "thickness": 1,
            "width": 0,
        }
    layout = frame(height=230)
    layout["xaxis"] |= {"title": {"text": "step", "standoff": 6}}
    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > FAR_APART * min(finite):
        layout["yaxis"] |= {"type": "log", "exponentformat": "power"}
    return Panel(name, (drawn,), layout)
