"""Several measurements of one network's stream side by side: maps of depth × step or × number, and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from theodolite.core import arguments
from theodolite.present.figure import Figure, Panel, frame, heat_map
from theodolite.present.text import Column, listed
from theodolite.probes.stream.result import Stream

TITLES = {
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
"""By quantity of `BranchReading`."""
LINEAR = ("cosine", "skipped")
"""Quantities that are not drawn on a logarithmic scale."""
DRAWN = ("stream", "stream_gradient", "share", "cosine")

RATIOS = tuple(
    Column(name, lambda ratio: "" if math.isnan(ratio) else f"{ratio:.3g}×")
    for name in ("stream", "gradient")
)
"""Columns for the growth of the stream and of its gradient."""


def branch_values(streams: Sequence[Stream], name: str) -> tuple[tuple[float, ...], ...]:
    """One quantity of `BranchReading`, by stream and by branch; nan where it was not measured."""
    arguments.one_of("name", name, TITLES)
    every = ([getattr(one, name) for one in found.branches] for found in streams)
    return tuple(tuple(math.nan if one is None else one for one in row) for row in every)


def depth_maps(
    streams: Sequence[Stream], labels: Sequence[str], axis: str, quantities: Sequence[str] = DRAWN
) -> Figure:
    """A heat map of depth × `axis` for each quantity; `labels` name the columns."""
    return Figure(
        caption=f"Each column is a {axis}: the first branch of the first block at the bottom, the last "
        "branch of the last block at the top.",
        alt=". ".join(_described(streams, labels, axis, name) for name in quantities),
        panels=tuple(_map(streams, labels, axis, name) for name in quantities),
    )


def why_no_ratio(streams: Sequence[Stream], labels: Sequence[str], axis: str) -> Iterator[str]:
    """Lines on the ratios that a table of `RATIOS` leaves empty, with the reason of each."""
    reasons: dict[str, list[str]] = {}
    for label, one in zip(labels, streams, strict=True):
        for name, law, words in (
            ("stream", one.growth, one.growth_in_words),
            ("gradient", one.backward, one.gradient_in_words),
        ):
            if math.isnan(law.ratio):
                reasons.setdefault(f"{name}, {words}", []).append(label)
    for reason, found in reasons.items():
        yield f"{axis} {listed(found)}: {reason}"


def _map(streams: Sequence[Stream], labels: Sequence[str], axis: str, name: str) -> Panel:
    rows = [list(row) for row in zip(*branch_values(streams, name), strict=True)]
    shown = [[_height(name, value) for value in row] for row in rows]
    finite = [value for row in shown for value in row if value is not None]
    drawn = heat_map(
        shown,
        x=labels,
        y=[f"{one.block}.{one.branch}" for one in streams[0].branches],
        hover=f"{axis} %{{x}}, block %{{y}}: %{{text}}",
    )
    drawn["text"] = [
        ["not measured" if math.isnan(value) else f"{value:.4g}" for value in row] for row in rows
    ]
    if finite and name not in LINEAR:
        ticks = [min(finite) + part / 4 * (max(finite) - min(finite)) for part in range(5)]
        drawn["colorbar"] |= {"tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks]}
    layout = frame(height=260, x=axis, y="block")
    layout["xaxis"] |= {"type": "category", "nticks": 8}
    layout["yaxis"] |= {"type": "category", "nticks": 12}
    return Panel(TITLES[name], (drawn,), layout)


def _described(streams: Sequence[Stream], labels: Sequence[str], axis: str, name: str) -> str:
    found = branch_values(streams, name)
    said = [f"{_span(row)} with depth at {axis} {label}" for row, label in zip(found, labels, strict=True)]
    return f"{TITLES[name]}: {', '.join(dict.fromkeys((said[0], said[-1])))}"


def _span(row: Sequence[float]) -> str:
    if any(map(math.isnan, (row[0], row[-1]))):
        return "not measured everywhere"
    return f"from {row[0]:.3g} to {row[-1]:.3g}"


def _height(name: str, value: float) -> float | None:
    """A value on the scale of its map; None if it has no place there."""
    if not math.isfinite(value) or (name not in LINEAR and value <= 0):
        return None
    return value if name in LINEAR else math.log10(value)
