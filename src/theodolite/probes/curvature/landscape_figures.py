"""Figures of a landscape: contours and surface with the path of training on them, and slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theodolite.core.files import plain
from theodolite.present.figure import FAINT, QUIET, Figure, Panel, frame, guide, line
from theodolite.present.text import number
from theodolite.probes.curvature.axes import Axes, Slice, Trajectory

NUM_LEVELS = 16


def plane_figure(
    axes: Axes,
    places: tuple[NDArray[np.float64], ...],
    values: NDArray[np.float64],
    loss: float,
    path: Trajectory | None,
) -> Figure:
    """The loss on a plane as contours and as a surface."""
    height = _Height(values)
    drawn: dict[str, Any] = {
        "x": plain(places[0]),
        "y": plain(places[1]),
        "z": plain(height(values).T),  # a row for each y
        "text": [[f"{value:.4g}" for value in row] for row in values.T],
        "colorscale": "Viridis",
        "hovertemplate": "(%{x:.3g}, %{y:.3g}): %{text}<extra></extra>",
    }
    walked = " The line is the path of training, which ends in the centre." if path else ""
    spacing = "ratios" if height.log else "distances"
    return Figure(
        caption=f"The loss on the plane, contours at equal {spacing}.{walked} The surface can be turned.",
        alt=f"Contours of the loss on a plane; it is {loss:.4g} at the centre.",
        panels=(_contours(axes, drawn, height, path), _surface(axes, drawn, height)),
    )


def slices_figure(slices: Sequence[Slice]) -> Figure:
    """A panel for each slice."""
    ends = [
        " and ".join(number(end) if math.isfinite(end) else "no place on it" for end in one.doubles)
        for one in slices
    ]
    return Figure(
        caption="The loss along each axis through the centre. Dotted: the parabola of d'Hd, the curvature "
        "at the centre.",
        alt=". ".join(
            f"{one.label}: the loss doubles at {end}" for one, end in zip(slices, ends, strict=True)
        ),
        panels=tuple(map(_slice, slices)),
    )


class _Height:
    """What is drawn for a loss: its logarithm if all losses are positive."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        finite = values[np.isfinite(values)]
        self.log = bool(finite.size) and float(finite.min()) > 0
        drawn = self(finite) if finite.size else np.zeros(1)
        self.low, self.high = float(drawn.min()), float(drawn.max())
        ticks = np.linspace(self.low, self.high, 5).tolist()
        labels = [f"{10**tick if self.log else tick:.3g}" for tick in ticks]
        self.ticks = {"tickvals": ticks, "ticktext": labels}

    def __call__(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log10(values) if self.log else values


def _contours(axes: Axes, drawn: dict[str, Any], height: _Height, path: Trajectory | None) -> Panel:
    size = (height.high - height.low) / NUM_LEVELS or 1.0
    contours = {
        **drawn,
        "type": "contour",
        "contours": {"coloring": "heatmap", "start": height.low, "end": height.high, "size": size},
        "line": {"width": 0.6, "color": "rgba(255,255,255,0.55)"},
        "colorbar": {**height.ticks, "thickness": 10, "outlinewidth": 0},
    }
    data = [contours]
    if path is not None:
        x, y = path.points.T[:2].tolist()
        walked = line(x, y, hover="%{text}", markers=5)
        walked["text"] = [f"checkpoint {at}, {away:.3g} off the plane" for at, away in enumerate(path.away)]
        walked["line"]["color"] = walked["marker"]["color"] = "#ffffff"
        walked["marker"]["line"] = {"color": "#000000", "width": 1}
        data.append(walked)
    cross = {"symbol": "cross-thin", "size": 11, "line": {"color": "#ffffff", "width": 2}}
    data.append(line([0.0], [0.0], mode="markers", marker=cross))
    layout = frame(height=380, x=axes.labels[0], y=axes.labels[1])
    if axes.orthonormal:  # equal scales show true distances
        layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
        layout["xaxis"] |= {"constrain": "domain"}
    return Panel("Contours", tuple(data), layout)


def _surface(axes: Axes, drawn: dict[str, Any], height: _Height) -> Panel:
    layout = frame(height=380)
    del layout["xaxis"], layout["yaxis"]
    axis = {"gridcolor": FAINT, "color": QUIET, "showbackground": False, "zeroline": False}
    layout["scene"] = {
        "xaxis": {**axis, "title": {"text": axes.labels[0]}},
        "yaxis": {**axis, "title": {"text": axes.labels[1]}},
        "zaxis": {**axis, "title": {"text": "loss"}, **height.ticks},
        "dragmode": "turntable",
        "aspectmode": "cube",
        "camera": {"eye": {"x": 1.7, "y": 1.7, "z": 1.0}},
    }
    return Panel("Surface", ({**drawn, "type": "surface", "showscale": False},), layout)


def _slice(one: Slice) -> Panel:
    places = one.places.tolist()
    data = [line(places, one.values.tolist(), hover="%{x:.3g}: %{y:.4g}", markers=4)]
    if math.isfinite(one.exact) and math.isfinite(one.centre):
        index = places.index(0)
        rise, run = (np.diff(of[[index - 1, index + 1]])[0] for of in (one.values, one.places))
        parabola = one.centre + rise / run * one.places + one.exact / 2 * one.places**2
        data.insert(0, line(places, parabola.tolist()))
    finite = one.values[np.isfinite(one.values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    air = 0.06 * (high - low) or 1.0
    layout = frame(height=240, x=one.label, y="loss")
    layout["yaxis"] |= {"nticks": 5, "range": [low - air, high + air]}
    layout["shapes"] = [guide(x=0)]
    return Panel(one.label, tuple(data), layout)
