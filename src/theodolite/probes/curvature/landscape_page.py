"""The page of a Landscape: contours and the surface, the path of training on them, and the slices."""

from __future__ import annotations

import json
import math
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from theodolite.core.files import plain
from theodolite.present.figure import ACCENT, FAINT, INK, QUIET, Figure, Panel, frame
from theodolite.present.page import figure_html, sheet, table_html

if TYPE_CHECKING:
    from theodolite.probes.curvature.landscape import Landscape
    from theodolite.probes.curvature.slicing import Slice

COLOURS = "Viridis"
NUM_LEVELS = 16


def page(landscape: Landscape) -> str:
    """The landscape as one self-contained HTML page."""
    drawn = figures(landscape)
    said = "".join(f"<p>{escape(line)}</p>" for line in str(landscape).partition("\n\n")[0].splitlines())
    rows = [
        [one.label, *(_end(end) for end in one.doubles), f"{one.parabola:.4g}", f"{one.exact:.4g}"]
        for one in landscape.slices
    ]
    columns = ("axis", "doubles behind at", "doubles ahead at", "curvature: parabola", "d'Hd")
    return sheet(
        title="Loss landscape",
        kicker=f"Loss landscape along {landscape.axes.kind} axes",
        heading=f"The loss is {landscape.loss:.4g} at the centre.",
        sections=[
            "".join(figure_html(figure, n) for n, figure in enumerate(drawn)),
            said + table_html(columns, rows),
        ],
        figures=drawn,
    )


def as_json(landscape: Landscape) -> str:
    """The numbers, as JSON; what is not finite is null."""
    found: dict[str, Any] = {
        "landscape": {
            "axes": landscape.axes.kind,
            "labels": landscape.axes.labels,
            "lengths": landscape.axes.lengths,
            "angle": landscape.axes.angle,
            "loss": landscape.loss,
            "batch_norm": landscape.batch_norm,
        },
        "places": landscape.places,
        "values": landscape.values,
        "slices": landscape.slices,
    }
    if landscape.path is not None:
        found["path"] = {"points": landscape.path.points, "explained": landscape.path.explained}
    return json.dumps(plain(found), indent=1, ensure_ascii=False, allow_nan=False)


def figures(landscape: Landscape) -> tuple[Figure, ...]:
    """The plane, if there is one, and the slices."""
    slices = Figure(
        caption="The loss along each axis through the centre. Dotted: the parabola of d'Hd, the curvature "
        "at the centre.",
        alt=". ".join(f"{one.label}: the loss doubles at {_both(one)}" for one in landscape.slices),
        panels=tuple(_slice(one) for one in landscape.slices),
    )
    if landscape.values.ndim == 1:
        return (slices,)
    height = _Height(landscape.values)
    walked = " The line is the path of training, which ends in the centre." if landscape.path else ""
    plane = Figure(
        caption=f"The loss on the plane, {height.said}.{walked} The surface can be turned.",
        alt=f"Contours of the loss on a plane; it is {landscape.loss:.4g} at the centre.",
        panels=(_contours(landscape, height), _surface(landscape, height)),
    )
    return plane, slices


class _Height:
    """What is drawn for a loss: its logarithm where all losses are positive."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        finite = values[np.isfinite(values)]
        self.log = bool(finite.size) and float(finite.min()) > 0
        self.said = "contours at equal ratios" if self.log else "contours at equal distances"
        drawn = self(finite) if finite.size else np.zeros(1)
        self.low, self.high = float(drawn.min()), float(drawn.max())

    def __call__(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log10(values) if self.log else values

    def bar(self) -> dict[str, Any]:
        ticks = np.linspace(self.low, self.high, 5).tolist()
        return {
            "tickvals": ticks,
            "ticktext": [f"{10**tick if self.log else tick:.3g}" for tick in ticks],
            "thickness": 10,
            "outlinewidth": 0,
        }


def _contours(landscape: Landscape, height: _Height) -> Panel:
    size = (height.high - height.low) / NUM_LEVELS or 1.0
    drawn = {
        "type": "contour",
        "x": plain(landscape.places[0]),
        "y": plain(landscape.places[1]),
        "z": plain(height(landscape.values).T),  # a row for each y
        "text": [[f"{value:.4g}" for value in row] for row in landscape.values.T],
        "colorscale": COLOURS,
        "contours": {"coloring": "heatmap", "start": height.low, "end": height.high, "size": size},
        "line": {"width": 0.6, "color": "rgba(255,255,255,0.55)"},
        "colorbar": height.bar(),
        "hovertemplate": "(%{x:.3g}, %{y:.3g}): %{text}<extra></extra>",
    }
    data = [drawn, *_path(landscape), _centre()]
    layout = frame(height=380)
    for axis, label in zip(("xaxis", "yaxis"), landscape.axes.labels, strict=True):
        layout[axis] |= {"title": {"text": label, "standoff": 6}}
    if landscape.axes.orthonormal:  # a distance is a distance in every direction
        layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
        layout["xaxis"] |= {"constrain": "domain"}
    return Panel("Contours", tuple(data), layout)


def _path(landscape: Landscape) -> list[dict[str, Any]]:
    if landscape.path is None:
        return []
    points = landscape.path.points
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": plain(points[:, 0]),
            "y": plain(points[:, 1]),
            "text": [
                f"checkpoint {index}, {away:.3g} off the plane"
                for index, away in enumerate(landscape.path.away)
            ],
            "line": {"color": "#ffffff", "width": 2},
            "marker": {"color": "#ffffff", "size": 5, "line": {"color": "#000000", "width": 1}},
            "hovertemplate": "%{text}<extra></extra>",
        }
    ]


def _centre() -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [0.0],
        "y": [0.0],
        "marker": {"symbol": "cross-thin", "size": 11, "line": {"color": "#ffffff", "width": 2}},
        "hoverinfo": "skip",
    }


def _surface(landscape: Landscape, height: _Height) -> Panel:
    drawn = {
        "type": "surface",
        "x": plain(landscape.places[0]),
        "y": plain(landscape.places[1]),
        "z": plain(height(landscape.values).T),
        "text": [[f"{value:.4g}" for value in row] for row in landscape.values.T],
        "colorscale": COLOURS,
        "showscale": False,
        "hovertemplate": "(%{x:.3g}, %{y:.3g}): %{text}<extra></extra>",
    }
    layout = frame(height=380)
    del layout["xaxis"], layout["yaxis"]
    axis = {"gridcolor": FAINT, "color": QUIET, "showbackground": False, "zeroline": False}
    layout["scene"] = {
        "xaxis": {**axis, "title": {"text": landscape.axes.labels[0]}},
        "yaxis": {**axis, "title": {"text": landscape.axes.labels[1]}},
        "zaxis": {**axis, "title": {"text": "loss"}, **_ticks(height.bar())},
        "dragmode": "turntable",
        "aspectmode": "cube",
        "camera": {"eye": {"x": 1.7, "y": 1.7, "z": 1.0}},
    }
    return Panel("Surface", (drawn,), layout)


def _ticks(bar: dict[str, Any]) -> dict[str, Any]:
    return {name: bar[name] for name in ("tickvals", "ticktext")}


def _slice(one: Slice) -> Panel:
    height = _Height(one.values)
    data: list[dict[str, Any]] = []
    centre = float(one.values[one.places == 0][0])
    if math.isfinite(one.exact) and math.isfinite(centre):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": plain(one.places),
                "y": plain(_tangent(one, centre)),
                "line": {"color": QUIET, "width": 1.5, "dash": "dot"},
                "hoverinfo": "skip",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": plain(one.places),
            "y": plain(one.values),
            "line": {"color": ACCENT, "width": 2},
            "marker": {"color": ACCENT, "size": 4},
            "hovertemplate": "%{x:.3g}: %{y:.4g}<extra></extra>",
        }
    )
    layout = frame(height=240)
    layout["xaxis"] |= {"title": {"text": one.label, "standoff": 6}}
    layout["yaxis"] |= {"title": {"text": "loss", "standoff": 6}, "nticks": 5}
    if math.isfinite(height.high):
        finite = one.values[np.isfinite(one.values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        air = 0.06 * (high - low) or 1.0
        layout["yaxis"] |= {"range": [low - air, high + air]}
    layout["shapes"] = [
        {
            "type": "line",
            "x0": 0,
            "x1": 0,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": INK, "width": 0.5},
        }
    ]
    return Panel(one.label, tuple(data), layout)


def _tangent(one: Slice, centre: float) -> NDArray[np.float64]:
    """The parabola with the loss, the slope and the curvature of the centre."""
    index = int(np.flatnonzero(one.places == 0)[0])
    before, after = index - 1, index + 1
    slope = (one.values[after] - one.values[before]) / (one.places[after] - one.places[before])
    return centre + slope * one.places + one.exact / 2 * one.places**2


def _end(where: float) -> str:
    if math.isnan(where):
        return "–"
    return f"{where:.3g}" if math.isfinite(where) else "not on it"


def _both(one: Slice) -> str:
    return " and ".join(map(_end, one.doubles))
