"""What a coordinate study found: the slope that is furthest off for each network, and small multiples.

Values are divided by the plan's at the centre of the grid and branches multiplied by the depth, so that a
parameterization that keeps its promise is a level line through 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from theodolite.core.size import Size
from theodolite.planning.parameterization import WITHOUT_FACTORY
from theodolite.present.svg import BLUE, INK, ORANGE, SvgAxis, SvgFigure, SvgLine, SvgRow
from theodolite.probes.scaling.coordinates import AXES, Axis, Slope, fit_slopes, worst_first
from theodolite.probes.scaling.first_steps import Track
from theodolite_studies.framework.claims import Decided
from theodolite_studies.framework.figures import line
from theodolite_studies.framework.records import Record, distinct, select

OPTIMIZERS = ("adamw", "muon-kimi")
TOLERANCE = 0.1
QUANTITIES = (
    "stream.first",
    "stream.middle",
    "stream",
    "branch.0",
    "branch.1",
    "logits",
    "change of stream",
    "change of branch.0",
    "change of branch.1",
    "change of logits",
)
"""In the order in which a record holds them. All networks of the study have two branches in a block."""
Data = tuple[Sequence[Record], Size, int]
"""The records, the size where both lines of sizes meet, and the steps of a run."""


def tracks_of(
    records: Iterable[Record], name: str, optimizer: str, parameterization: str
) -> tuple[Track, ...]:
    """The tracks of one network trained in one way, with the steps that were kept."""
    return tuple(
        Track(
            size=Size(record["width"], record["depth"]),
            seed=record["seed"],
            status=record["status"],
            values={
                quantity: tuple(math.nan if value is None else value for value in values)
                for quantity, values in zip(QUANTITIES, record["values"], strict=True)
            },
            expected={quantity: 1 / (2 * record["depth"]) for quantity in QUANTITIES if "branch" in quantity},
            branches=(),
            stream=(),
        )
        for record in select(records, network=name, optimizer=optimizer, parameterization=parameterization)
    )


def claims(data: Data) -> list[Decided]:
    """For each optimizer, axis and network: is every slope of the plan within the tolerance?"""
    records, *_ = data
    found = []
    for optimizer in OPTIMIZERS:
        for axis in sorted(AXES):
            for name in distinct(select(records, optimizer=optimizer), "network"):
                planned, standard = (
                    _furthest(tracks_of(records, name, optimizer, kind), axis) for kind in WITHOUT_FACTORY
                )
                if planned is not None:
                    found.append(
                        Decided(
                            f"{name}, {optimizer}: sizes do not depend on the {axis}",
                            "constant",
                            f"slopes within ±{TOLERANCE:g}",
                            f"{_worded(planned)}; standard {_worded(standard) if standard else 'not run'}",
                            "holds" if planned.within(TOLERANCE) else "fails",
                        )
                    )
    return found


def _furthest(tracks: Sequence[Track], axis: Axis) -> Slope | None:
    """The slope that is furthest from what it should be after the last step."""
    slopes = worst_first(slope for slope in fit_slopes(tracks) if slope.judged and slope.axis == axis)
    return slopes[0] if slopes else None


def _worded(slope: Slope) -> str:
    if math.isnan(slope.excess):
        return f"{slope.quantity}: diverged"
    return f"{slope.quantity} {slope.excess:+.2f} ± {(slope.high - slope.low) / 2:.2f}"


COLUMNS = {
    "stream": "stream",
    "branch.0": "attention",
    "branch.1": "feed-forward",
    "change of stream": "Δ stream",
    "change of branch.0": "Δ attention",
    "change of branch.1": "Δ feed-forward",
    "change of logits": "Δ logits",
}
COLOURS = {"plan": BLUE, "standard": ORANGE}
OCTAVES = SvgAxis(-3.0, 5.0, {-2: "¼", 0: "1", 2: "4", 4: "16"}, strong=0)


def figures(data: Data) -> Iterator[tuple[str, str]]:
    """One for each optimizer and axis: a row for each network, a column for each quantity."""
    records, centre, steps = data
    for optimizer in distinct(records, "optimizer"):
        mine = select(records, optimizer=optimizer)
        for axis in AXES:
            rows = []
            for name in distinct(mine, "network"):
                tracks: dict[str, tuple[Track, ...]] = {
                    kind: tracks_of(mine, name, optimizer, kind) for kind in WITHOUT_FACTORY
                }
                sizes = sorted({_along(track.size, axis) for own in tracks.values() for track in own})
                if len(sizes) > 1:
                    x = SvgAxis(
                        math.log2(sizes[0]),
                        math.log2(sizes[-1]),
                        {math.log2(size): str(size) for size in sizes[::2]},
                    )
                    panels = [_panel(tracks, quantity, axis, centre) for quantity in COLUMNS]
                    rows.append(SvgRow(name, x, OCTAVES, panels))
            title = f"{optimizer}: root mean squares against {axis}, after {steps} steps"
            legend = [
                ("plan", BLUE),
                ("standard (dashed)", ORANGE),
                (f"of the plan's value at {centre}; branches × depth", INK),
                ("numbers: slope, less what it should be", INK),
            ]
            figure = SvgFigure(title, legend, list(COLUMNS.values()), rows, wide=104, high=76)
            yield f"{optimizer}-{axis}", figure.svg()


def _panel(tracks: Mapping[str, Sequence[Track]], quantity: str, axis: Axis, centre: Size) -> list[SvgLine]:
    values = {kind: _values(own, quantity, axis, centre) for kind, own in tracks.items()}
    scale = values["plan"].get(_along(centre, axis))
    if scale is None:  # the plan's run there diverged: there is nothing to measure by
        return []
    lines = []
    for kind, own in values.items():
        heights = (math.log2(value / scale) for value in own.values())
        drawn = line(map(math.log2, own), heights, COLOURS[kind], dashed=kind == "standard")
        found = [each for each in fit_slopes(tracks[kind]) if (each.quantity, each.axis) == (quantity, axis)]
        label = ""
        if found:
            label = f"{found[0].excess:+.2f}" if math.isfinite(found[0].excess) else "diverged"
        lines.append(dataclasses.replace(drawn, label=label))
    return lines


def _along(size: Size, axis: Axis) -> int:
    return size.width if axis == "width" else size.depth


def _values(tracks: Sequence[Track], quantity: str, axis: Axis, centre: Size) -> dict[int, float]:
    """By size along the axis: the geometric mean over seeds; sizes where a run diverged are left out."""
    found: dict[int, list[float]] = {}
    other: Axis = "depth" if axis == "width" else "width"
    for track in tracks:
        if _along(track.size, other) == _along(centre, other):
            depths = track.size.depth / centre.depth if "branch" in quantity else 1.0
            found.setdefault(_along(track.size, axis), []).append(track.values[quantity][-1] * depths)
    return {
        size: math.exp(sum(map(math.log, values)) / len(values))
        for size, values in sorted(found.items())
        if all(math.isfinite(value) and value > 0 for value in values)
    }
