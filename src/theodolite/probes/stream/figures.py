"""Figures of the stream: against depth, and against depth and step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from theodolite.core.files import plain
from theodolite.present.figure import ACCENT, FAINT, QUIET, Figure, Panel, frame

if TYPE_CHECKING:
    from theodolite.probes.stream.history import StreamCourse
    from theodolite.probes.stream.stream import Stream

COLOURS = "Viridis"
TITLES: Mapping[str, str] = {
    "stream": "RMS of the stream",
    "added": "RMS of the branches",
    "share": "Branch over stream, ‖f‖/‖h‖",
    "cosine": "Cosine of neighbours",
    "stream_gradient": "RMS of the stream's gradient",
    "branch_gradient": "RMS of the branches' gradients",
    "largest": "Largest entry of the stream",
    "peak": "Largest entry over the median",
    "skipped": "Loss without the branch, minus the loss",
}
RATIOS = ("stream", "added", "share", "stream_gradient", "branch_gradient", "largest", "peak")
"""Quantities that are drawn on a logarithmic scale."""


def profile_figure(stream: Stream) -> Figure:
    """Sizes, gradients and what each block is worth, against depth."""
    reaches = stream.reaches
    places = [one.block + (one.branch + 1) / _branches(stream, one.block) for one in reaches]
    sizes = _lines(
        "Stream (line) and branches (dots)",
        [(0.0, stream.start), *zip(places, (one.stream for one in reaches), strict=True)],
        list(zip(places, (one.added for one in reaches), strict=True)),
    )
    gradients = _lines(
        "Gradient in the stream",
        [(0.0, stream.start_gradient), *zip(places, (one.stream_gradient for one in reaches), strict=True)],
    )
    panels = [sizes, gradients]
    if any(one is not None for one in stream.blocks):
        panels.append(_bars("Loss without the block, minus the loss", stream.blocks))
    return Figure(
        caption="Root mean squares of the stream, of what the branches add to it and of its gradient, "
        "from the first block to the last; and what the loss is more without each block.",
        alt=f"Stream: {stream.growth}. Gradient, from the last block to the first: {stream.backward}",
        panels=tuple(panels),
    )


def course_figure(course: StreamCourse, quantities: Sequence[str]) -> Figure:
    """A map of depth against step for each quantity."""
    return Figure(
        caption="Each column is a look at the stream: the first branch of the first block at the bottom, the "
        "last branch of the last block at the top.",
        alt=". ".join(_told(course, name) for name in quantities),
        panels=tuple(_map(course, name) for name in quantities),
    )


def _map(course: StreamCourse, name: str) -> Panel:
    columns = course.values(name)
    rows = [list(row) for row in zip(*columns, strict=True)]
    shown = [[_height(name, value) for value in row] for row in rows]
    finite = [value for row in shown for value in row if value is not None]
    bar: dict[str, Any] = {"thickness": 10, "outlinewidth": 0}
    if finite and name in RATIOS:
        ticks = [min(finite) + part / 4 * (max(finite) - min(finite)) for part in range(5)]
        bar |= {"tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks]}
    labels = [f"{one.block}.{one.branch}" for one in course.streams[0].reaches]
    drawn = {
        "type": "heatmap",
        "x": [str(step) for step in course.steps],
        "y": labels,
        "z": shown,
        "text": [[f"{value:.4g}" for value in row] for row in rows],
        "colorscale": COLOURS,
        "colorbar": bar,
        "hovertemplate": "step %{x}, block %{y}: %{text}<extra></extra>",
    }
    layout = frame(height=260)
    layout["xaxis"] |= {"type": "category", "title": {"text": "step", "standoff": 6}, "nticks": 8}
    layout["yaxis"] |= {"type": "category", "title": {"text": "block", "standoff": 6}, "nticks": 12}
    return Panel(TITLES[name], (drawn,), layout)


def _height(name: str, value: float) -> float | None:
    if not math.isfinite(value) or (name in RATIOS and value <= 0):
        return None
    return math.log10(value) if name in RATIOS else value


def _told(course: StreamCourse, name: str) -> str:
    first, last = course.values(name)[0], course.values(name)[-1]
    return (
        f"{TITLES[name]}: from {first[0]:.3g} to {first[-1]:.3g} with depth at step {course.steps[0]}, "
        f"from {last[0]:.3g} to {last[-1]:.3g} at step {course.steps[-1]}"
    )


def _lines(
    title: str, line: Sequence[tuple[float, float]], dots: Sequence[tuple[float, float]] = ()
) -> Panel:
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [x for x, _ in line],
            "y": plain([y for _, y in line]),
            "line": {"color": ACCENT, "width": 2},
            "hovertemplate": "block %{x:.1f}: %{y:.3g}<extra></extra>",
        }
    ]
    if dots:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [x for x, _ in dots],
                "y": plain([y for _, y in dots]),
                "marker": {"color": QUIET, "size": 5},
                "hovertemplate": "branch at %{x:.1f}: %{y:.3g}<extra></extra>",
            }
        )
    layout = frame(height=220)
    layout["xaxis"] |= {"title": {"text": "block", "standoff": 6}}
    layout["yaxis"] |= {"type": "log", "exponentformat": "power", "nticks": 5}
    return Panel(title, tuple(data), layout)


def _bars(title: str, blocks: Sequence[float | None]) -> Panel:
    bars = {
        "type": "bar",
        "x": list(range(len(blocks))),
        "y": plain(list(blocks)),
        "marker": {"color": ACCENT, "line": {"width": 0}},
        "hovertemplate": "block %{x}: %{y:.3g}<extra></extra>",
    }
    layout = frame(height=220)
    layout["xaxis"] |= {"title": {"text": "block", "standoff": 6}}
    layout["yaxis"] |= {"zeroline": True, "zerolinecolor": FAINT, "nticks": 5}
    return Panel(title, (bars,), layout)


def _branches(stream: Stream, block: int) -> int:
    return sum(one.block == block for one in stream.reaches)
