"""Tables and figures of the depth-expansion study: signal, losses, correlations and alignment."""

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
from theodolite_studies.depth_expansion.grid import (
    POINTS,
    RegimeGrid,
    Regimes,
    Split,
    Value,
    best_gain,
    coherence,
    effective,
    explained_by,
    failures,
    loss_on_test,
    norm,
    slopes,
)
from theodolite_studies.depth_expansion.reading import BINS
from theodolite_studies.framework.claims import Array, table
from theodolite_studies.framework.figures import band, dots, line
from theodolite_studies.framework.records import Record, select

SPLITS: tuple[Split, ...] = ("train", "test")
COLOURS = (BLUE, VIOLET, PINK, ORANGE, GREEN, INK)
"""From the least width or depth to the greatest."""
SQUARE = 11
"""Side of an entry of a heat map."""


def figures(regimes: Regimes) -> Iterator[tuple[str, str]]:
    """The paper's Figures 1 to 3, and what it has none of: signal against train loss, and alignment."""
    found = regimes.grids
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


def _signal(found: Sequence[RegimeGrid]) -> SvgFigure:
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


def _matched(found: Sequence[RegimeGrid]) -> SvgFigure:
    """A dot for each network: does the norm read more than the train loss?"""
    rows = []
    for split in SPLITS:
        panels = []
        for grid in found:
            x_DWS, y_DWS = (np.log10(grid.over(each)) for each in (_train_loss, norm(split)))
            panels.append(
                [
                    dots(x_DWS[:, place].ravel(), y_DWS[:, place].ravel(), _colour(place))
                    for place in range(len(grid.widths))
                ]
            )
        known = [x for panel in panels for each in panel for x, _ in each.points]
        rows.append(SvgRow(f"‖v‖ {split}", _logarithmic(known), _heights(panels), panels, "train loss"))
    return SvgFigure("The same against the train loss", _widths(found[0]), _columns(found), rows)


def _losses(found: Sequence[RegimeGrid]) -> SvgFigure:
    by_depth, by_width = [], []
    for grid in found:
        losses_DWS = np.log10(grid.over(loss_on_test))
        by_depth.append(_by_width(grid, losses_DWS))
        by_width.append(
            [band(np.log2(grid.widths), losses_DWS[d].T, _colour(d)) for d in range(len(grid.depths))]
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


def _correlations(found: Sequence[RegimeGrid]) -> SvgFigure:
    """Shares of the pairs in each bin, of channels and of single entries."""
    rows = []
    for grid in found:
        deepest = select(grid.records, depth=grid.deep)
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
    return line(middles, shares, colour)


def _alignment(found: Sequence[RegimeGrid]) -> SvgFigure:
    rows = []
    for grid in found:
        panels = []
        for point in POINTS:
            panel = []
            for place, width in enumerate(grid.widths):
                for name in ("crossed", "bound"):
                    values = (failures(point, name, size) for size in grid.sizes)
                    shares = [grid.of(grid.deep, width, value).mean() for value in values]
                    panel.append(line(np.log2(grid.sizes), shares, _colour(place), dashed=name == "bound"))
            panels.append(panel)
        y = SvgAxis(0, 1, ticks([0.0, 0.5, 1.0]))
        rows.append(SvgRow(grid.regime, _octaves(grid.sizes), y, panels, "images in each sample"))
    title = "How often a train and a test sample do not align; dashed: the bound"
    return SvgFigure(title, _widths(found[0]), POINTS, rows)


def _matrices(grid: RegimeGrid) -> list[tuple[str, Sequence[Sequence[float]]]]:
    """Of the narrowest, deepest network, where they were kept."""
    for one in grid.records:
        if one["width"] == grid.widths[0] and one["depth"] == grid.depths[-1]:
            pairs = {point: one["points"][point]["pairs"] for point in POINTS}
            found = [(point, each["matrix"]) for point, each in pairs.items() if "matrix" in each]
            if found:
                return found
    return []


def _heat(grid: RegimeGrid, matrices: Sequence[tuple[str, Sequence[Sequence[float]]]]) -> str:
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


def _by_width(grid: RegimeGrid, values_DWS: Array) -> list[SvgLine]:
    return [
        band(np.log2(grid.depths), values_DWS[:, place].T, _colour(place))
        for place in range(len(grid.widths))
    ]


def _colour(place: int) -> str:
    return COLOURS[min(place, len(COLOURS) - 1)]


def _widths(grid: RegimeGrid) -> list[tuple[str, str]]:
    return [(f"width {width}", _colour(place)) for place, width in enumerate(grid.widths)]


def _columns(found: Sequence[RegimeGrid]) -> list[str]:
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


def notes(regimes: Regimes) -> str:
    """Tables for each regime."""
    parts = (_networks, _followed, _correlated, _failing)
    said = [part(grid) for grid in regimes.grids for part in parts]
    said.append(f"{regimes.diverged} networks diverged and are left out." if regimes.diverged else "")
    return "\n\n".join(each for each in said if each)


def _networks(grid: RegimeGrid) -> str:
    values: tuple[Value, ...] = (
        lambda one: one["train_loss"],
        loss_on_test,
        lambda one: one["test_right"],
        norm("train"),
        norm("test"),
        coherence("train"),
        coherence("test"),
        best_gain,
    )
    rows = []
    for width in grid.widths:
        for depth in grid.depths:
            found = [grid.of(depth, width, value) for value in values]
            shown = [f"{found[0].mean():.4f}", _spread(found[1]), f"{found[2].mean():.1%}"]
            rows.append((f"width {width} n {depth}", *shown, *(f"{each.mean():.2g}" for each in found[3:])))
    heading = (
        f"{grid.regime}: means over seeds {', '.join(map(str, grid.seeds))}, ± their standard deviation; "
        "share of test\nimages right; the mean gradient before the readout, and in units of one image's "
        "spread; the\nlargest tr(MS⁻¹Mᵀ) of one more block, on test images:"
    )
    columns = ("train loss", "test loss", "right", "‖v‖ train", "test", "/√trΣ train", "test", "gain")
    return f"{heading}\n{table(('network', *columns), rows)}"


def _followed(grid: RegimeGrid) -> str:
    """Does the norm read anything but the train loss?"""
    rows: list[tuple[str, ...]] = []
    for name, value in (
        ("‖v‖ train", norm("train")),
        ("‖v‖ test", norm("test")),
        ("‖v‖/√trΣ train", coherence("train")),
        ("‖v‖/√trΣ test", coherence("test")),
    ):
        alone, given = slopes(grid, value), slopes(grid, value, _train_loss)
        explained = _spread(explained_by(grid, value, _train_loss))
        by_size = (_spread(alone["depth"]), _spread(alone["width"]), "", _spread(alone["explained"]))
        rows.append((name, *by_size, explained))
        keys = ("depth", "width", "given 0", "explained")
        rows.append(("  given the loss", *(_spread(given[key]) for key in keys), ""))
    alone = slopes(grid, _train_loss)
    own = (_spread(alone["depth"]), _spread(alone["width"]), "", _spread(alone["explained"]), "")
    rows.append(("train loss", *own))
    bias = np.median(grid.over(lambda one: norm("train")(one) / one["train_bias"]))
    heading = (
        f"{grid.regime}: slopes over all networks, with the train loss held and without. The mean gradient\n"
        f"before the readout is Wᵀ∇_b L; its norm is {bias:.2g} × that of the bias's gradient (median):"
    )
    columns = ("log of", "on log n", "log width", "log train loss", "R²", "R² of the train loss alone")
    return f"{heading}\n{table(columns, rows)}"


def _correlated(grid: RegimeGrid) -> str:
    rows = []
    for width in grid.widths:
        for point in POINTS:
            own = select(grid.records, depth=grid.deep, width=width)
            pairs = select((one["points"][point]["pairs"] for one in own), near=lambda near: near is not None)
            if pairs:
                quantiles = np.mean([each["quantiles"] for each in pairs], axis=0)
                rows.append(
                    (
                        f"width {width} n {grid.deep}",
                        point,
                        f"{pairs[0]['alive']}",
                        *(f"{value:.3f}" for value in quantiles),
                        f"{np.mean([each['beyond'] for each in pairs]):.0%}",
                        f"{grid.of(grid.deep, width, effective(point)).mean():.1f}",
                        f"{np.mean([each['edge'] for each in pairs]):.2f}",
                    )
                )
    heading = (
        f"{grid.regime}: correlations of gradients over images; C = λ_max/(trΣ/d), and what it would be\n"
        "of as many vectors of uncorrelated coordinates of one variance:"
    )
    columns = ("point", "channels", "|r| median", "90 %", "99 %", "> 2/√N", "C", "noise")
    return f"{heading}\n{table(('deepest network', *columns), rows)}"


def _failing(grid: RegimeGrid) -> str:
    rows = []
    for width in (grid.widths[0], grid.widths[-1]):
        for point in POINTS:
            for name, title in (("fresh", "test, test"), ("crossed", "train, test"), ("bound", "bound")):
                shares = [
                    grid.of(grid.deep, width, failures(point, name, size)).mean() for size in grid.sizes
                ]
                first = (f"width {width} n {grid.deep}", point) if name == "fresh" else ("", "")
                rows.append((*first, title, *(f"{share:.3f}" for share in shares)))
    heading = f"{grid.regime}: how often mean gradients of two samples do not align, by the samples' size:"
    return f"{heading}\n{table(('deepest network', 'point', 'samples', *map(str, grid.sizes)), rows)}"


def _spread(values: Array) -> str:
    if len(values) < 2:
        return f"{values.mean():.3f}"
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def _train_loss(one: Record) -> float:
    return float(one["train_loss"])
