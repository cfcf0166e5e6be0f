"""The figures of the depth-expansion study: signal, losses, correlations and alignment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import (
    BLUE,
    GREEN,
    INK,
    LEFT,
    ORANGE,
    PINK,
    TOP,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgLine,
    SvgRow,
    head,
    ticks,
)
from theodolite_studies.depth_expansion.reading import BINS
from theodolite_studies.depth_expansion.values import POINTS, Array, Grid, failures, grids, norm
from theodolite_studies.framework.records import Record

COLOURS = (BLUE, VIOLET, PINK, ORANGE, GREEN, INK)
"""From the least width or depth to the greatest."""
SQUARE = 11
"""Side of an entry of a heat map."""


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """The paper's Figures 1 to 3, and what it has none of: signal against train loss, and alignment."""
    found = grids(records)
    if not found:
        return
    yield "signal", _signal(found).svg()
    yield "matched", _matched(found).svg()
    yield "losses", _losses(found).svg()
    yield "correlations", _correlations(found).svg()
    yield "alignment", _alignment(found).svg()
    matrices = _matrices(found[0])
    if matrices:
        yield "heat", _heat(found[0], matrices)


def _signal(found: Sequence[Grid]) -> SvgFigure:
    rows = []
    for title, value, relative in (
        ("‖v‖ train", norm("train"), False),
        ("‖v‖ test", norm("test"), False),
        ("train, of shallowest", norm("train"), True),
        ("test, of shallowest", norm("test"), True),
    ):
        panels = []
        for grid in found:
            logs_DWS = np.log10(grid.over(value))
            panels.append(_by_width(grid, logs_DWS - logs_DWS[:1] if relative else logs_DWS))
        rows.append(SvgRow(title, _octaves(found[0].depths), _heights(panels), panels, "n, of 6n + 2 layers"))
    return SvgFigure("The mean gradient before the readout", _widths(found[0]), _columns(found), rows)


def _matched(found: Sequence[Grid]) -> SvgFigure:
    """A dot for each network: does the norm read more than the train loss?"""
    rows = []
    for split in ("train", "test"):
        panels = []
        for grid in found:
            x_DWS, y_DWS = (np.log10(grid.over(each)) for each in (_train_loss, norm(split)))
            panels.append(
                [
                    SvgLine(
                        list(zip(x_DWS[:, w].ravel().tolist(), y_DWS[:, w].ravel().tolist(), strict=True)),
                        _colour(w),
                        joined=False,
                    )
                    for w in range(len(grid.widths))
                ]
            )
        known = [x for panel in panels for line in panel for x, _ in line.points]
        rows.append(SvgRow(f"‖v‖ {split}", _logarithmic(known), _heights(panels), panels, "train loss"))
    return SvgFigure("The same against the train loss", _widths(found[0]), _columns(found), rows)


def _losses(found: Sequence[Grid]) -> SvgFigure:
    by_depth, by_width = [], []
    for grid in found:
        losses_DWS = np.log10(grid.over(lambda one: one["test_loss"]))
        by_depth.append(_by_width(grid, losses_DWS))
        by_width.append(
            [_band(np.log2(grid.widths), losses_DWS[d], _colour(d)) for d in range(len(grid.depths))]
        )
    rows = [
        SvgRow("test loss", _octaves(found[0].depths), _heights(by_depth), by_depth, "n, coloured by width"),
        SvgRow("test loss", _octaves(found[0].widths), _heights(by_width), by_width, "width, coloured by n"),
    ]
    legend = [
        (f"width {width} or n {depth}", _colour(place))
        for place, (width, depth) in enumerate(zip(found[0].widths, found[0].depths, strict=False))
    ]
    return SvgFigure("Test loss over depth and width", legend, _columns(found), rows)


def _correlations(found: Sequence[Grid]) -> SvgFigure:
    """Shares of the pairs in each bin, of channels and of single entries."""
    rows = []
    for grid in found:
        deepest = [one for one in grid.records if one["depth"] == grid.depths[-1]]
        for title in ("channels", "entries"):
            panels = [
                [
                    _histogram(
                        [
                            one["entries"][stage] if title == "entries" else one["points"][point]["pairs"]
                            for one in deepest
                            if one["width"] == width
                        ],
                        _colour(place),
                    )
                    for place, width in enumerate(grid.widths)
                ]
                for stage, point in enumerate(POINTS)
            ]
            x, y = SvgAxis(-1, 1, ticks([-1.0, 0.0, 1.0])), SvgAxis(0, 0.4, ticks([0.0, 0.2, 0.4]))
            rows.append(SvgRow(f"{grid.regime}, {title}", x, y, panels, "correlation; share of pairs"))
    title = "Correlations of gradients, deepest networks"
    return SvgFigure(title, _widths(found[0]), POINTS, rows)


def _histogram(pairs: Sequence[Record], colour: str) -> SvgLine:
    middles = [-1 + (2 * place + 1) / BINS for place in range(BINS)]
    counts = np.sum([np.zeros(BINS), *(each["counts"] for each in pairs if "counts" in each)], axis=0)
    shares = counts / max(float(counts.sum()), 1.0)
    return SvgLine(list(zip(middles, shares.tolist(), strict=True)), colour)


def _alignment(found: Sequence[Grid]) -> SvgFigure:
    rows = []
    for grid in found:
        sizes = grid.records[0]["points"]["pool"]["alignment"]["sizes"]
        depth, panels = grid.depths[-1], []
        for point in POINTS:
            panel = []
            for place, width in enumerate(grid.widths):
                for name in ("crossed", "bound"):
                    shares_TS = np.array([grid.of(depth, width, failures(point, name, n)) for n in sizes])
                    points = list(zip(np.log2(sizes).tolist(), shares_TS.mean(1).tolist(), strict=True))
                    panel.append(SvgLine(points, _colour(place), dashed=name == "bound"))
            panels.append(panel)
        y = SvgAxis(0, 1, ticks([0.0, 0.5, 1.0]))
        rows.append(SvgRow(grid.regime, _octaves(sizes), y, panels, "images in each sample"))
    title = "How often a train and a test sample do not align; dashed: the bound"
    return SvgFigure(title, _widths(found[0]), POINTS, rows)


def _matrices(grid: Grid) -> list[tuple[str, Sequence[Sequence[float]]]]:
    """Of the narrowest, deepest network, where they were kept."""
    for one in grid.records:
        if one["width"] == grid.widths[0] and one["depth"] == grid.depths[-1]:
            pairs = {point: one["points"][point]["pairs"] for point in POINTS}
            found = [(point, each["matrix"]) for point, each in pairs.items() if "matrix" in each]
            if found:
                return found
    return []


def _heat(grid: Grid, matrices: Sequence[tuple[str, Sequence[Sequence[float]]]]) -> str:
    """Squares: blue for negative correlations, orange for positive ones, clear for none."""
    apart = 30
    width = LEFT + sum(len(matrix) * SQUARE + apart for _, matrix in matrices)
    height = TOP + max(len(matrix) for _, matrix in matrices) * SQUARE + 20
    title = f"Correlations of gradients, width {grid.widths[0]}, n {grid.depths[-1]}"
    pieces, left = [head(max(width, 420), height, title)], LEFT
    for name, matrix in matrices:
        pieces.append(f'<text x="{left}" y="{TOP - 8}">{name}</text>')
        for down, row in enumerate(matrix):
            for across, value in enumerate(row):
                pieces.append(
                    f'<rect x="{left + across * SQUARE}" y="{TOP + down * SQUARE}" width="{SQUARE}" '
                    f'height="{SQUARE}" fill="{ORANGE if value > 0 else BLUE}" '
                    f'fill-opacity="{min(1.0, abs(value)):.2f}"/>'
                )
        left += len(matrix) * SQUARE + apart
    return "\n".join([*pieces, "</svg>", ""])


def _by_width(grid: Grid, values_DWS: Array) -> list[SvgLine]:
    return [_band(np.log2(grid.depths), values_DWS[:, w], _colour(w)) for w in range(len(grid.widths))]


def _band(xs: Sequence[float] | Array, values_XS: Array, colour: str) -> SvgLine:
    """The mean over seeds, and the lowest and highest of them."""
    points = [(float(x), float(mean)) for x, mean in zip(xs, values_XS.mean(1), strict=True)]
    return SvgLine(points, colour, lows=values_XS.min(1).tolist(), highs=values_XS.max(1).tolist())


def _colour(place: int) -> str:
    return COLOURS[min(place, len(COLOURS) - 1)]


def _widths(grid: Grid) -> list[tuple[str, str]]:
    return [(f"width {width}", _colour(place)) for place, width in enumerate(grid.widths)]


def _columns(found: Sequence[Grid]) -> list[str]:
    return [grid.regime for grid in found]


def _octaves(values: Sequence[int]) -> SvgAxis:
    return SvgAxis(
        math.log2(values[0]), math.log2(values[-1]), {math.log2(value): f"{value}" for value in values}
    )


def _heights(panels: Sequence[Sequence[SvgLine]]) -> SvgAxis:
    return _logarithmic([y for panel in panels for line in panel for _, y in line.points])


def _logarithmic(logs: Sequence[float]) -> SvgAxis:
    """An axis of decimal logarithms with round values on it, as few as there can be but three."""
    low, high = math.floor(min(logs) * 10) / 10, math.ceil(max(logs) * 10 + 1e-9) / 10
    decades = range(math.floor(low), math.ceil(high) + 1)
    for digits in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        marks = [digit * 10.0**decade for decade in decades for digit in digits]
        inside = {math.log10(mark): f"{mark:g}" for mark in marks if low <= math.log10(mark) <= high}
        if len(inside) >= 3:
            break
    return SvgAxis(low, high, inside)


def _train_loss(one: Record) -> float:
    return one["train_loss"]
