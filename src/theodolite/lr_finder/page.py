"""The page of an LrRange: the loss against the learning rate, with the interval."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from theodolite.present.figure import ACCENT, FAINT, QUIET, Figure, Panel, frame

if TYPE_CHECKING:
    from theodolite.lr_finder.lr_range import LrRange


def page(found: LrRange) -> str:
    """The search as one self-contained HTML page."""
    from theodolite.present.page import figure_html, sheet, table_html  # stands above

    drawn = figure(found)
    rows = [[group, f"{lr:.3g}"] for group, lr in found.rates.items()]
    groups = [f"<h2>The best rate of each group</h2>{table_html(['group', 'lr'], rows)}"] if rows else []
    title = "Learning rate"
    return sheet(
        title=f"{title} of {found.name}",
        kicker=title,
        heading=found.sentence,
        sections=[f"{figure_html(drawn, 0)}<p>{escape(found.status)}</p>", *groups],
        figures=[drawn],
    )


def figure(found: LrRange, planned: float | None = None) -> Figure:
    """The loss after each leg, one line for each seed; the interval is shaded, the planned rate dotted."""
    dotted = "" if planned is None else f" Dotted: the planned rate, {planned:.2g}."
    interval = " Shaded: the interval; dashed: the best rate." if found.best is not None else ""
    return Figure(
        caption=f"Loss after {found.steps} steps at one learning rate, from the same start; a line for each "
        f"seed, up to where it diverges. The level line is the loss at the start.{interval}{dotted}",
        alt=found.sentence + ("" if planned is None else f"; planned {planned:.2g}"),
        panels=(_panel(found, planned),),
    )


def _panel(found: LrRange, planned: float | None) -> Panel:
    start = sum(curve.start for curve in found.curves) / len(found.curves)
    data: list[dict[str, Any]] = []
    for curve in found.curves:
        legs = [leg for leg in curve.legs if math.isfinite(leg.loss)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"seed {curve.seed}",
                "x": [leg.rate for leg in legs],
                "y": [leg.loss for leg in legs],
                "line": {"color": ACCENT, "width": 2},
                "marker": {"color": ACCENT, "size": 5},
                "hovertemplate": f"seed {curve.seed}, lr %{{x:.2e}}: %{{y:.4g}}<extra></extra>",
            }
        )
    layout = frame(height=280)
    rates = [leg.rate for curve in found.curves for leg in curve.legs] + ([planned] if planned else [])
    low, high = math.log10(min(rates)), math.log10(max(rates))
    air = 0.03 * (high - low)
    layout["xaxis"] |= {
        "type": "log",
        "range": [low - air, high + air],
        "title": {"text": "learning rate", "standoff": 6},
        "exponentformat": "power",
        "dtick": max(1, round((high - low) / 6)),
    }
    layout["yaxis"] |= {"title": {"text": "loss", "standoff": 6}, "nticks": 6}
    layout["shapes"] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": start, "y1": start}
        | {"line": {"color": FAINT, "width": 1}}
    ]
    if found.low is not None and found.high is not None and found.best is not None:
        layout["shapes"] += [_shaded(found.low, found.high), _upright(found.best, "dash")]
    if planned is not None:
        layout["shapes"].append(_upright(planned, "dot"))
    return Panel("Loss after each leg", tuple(data), layout)


def _upright(x: float, dash: str) -> dict[str, Any]:
    line = {"color": QUIET, "width": 1, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _shaded(x0: float, x1: float) -> dict[str, Any]:
    place = {"type": "rect", "x0": x0, "x1": x1, "yref": "paper", "y0": 0, "y1": 1}
    return place | {"fillcolor": ACCENT, "opacity": 0.12, "line": {"width": 0}, "layer": "below"}
