"""Tables and figures of the study of extrapolation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import optimize, stats

from theodolite.data.two_cylinders import Region
from theodolite.present.svg import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgLine,
    SvgRow,
    ticks,
)
from theodolite.present.text import Column
from theodolite_studies.extrapolation.readings import (
    EVERYWHERE,
    NAMES,
    Kind,
    Trainings,
    in_region,
    rank,
    relative,
)
from theodolite_studies.extrapolation.training import BINS, HIGH, LOW, MIDDLES
from theodolite_studies.framework.claims import Array, Observation, table
from theodolite_studies.framework.figures import band
from theodolite_studies.framework.paired import less
from theodolite_studies.framework.records import Record, distinct, select

POWER, LEVEL = 0.8, 0.05
PAINT = (GREEN, ORANGE, PINK, BLUE, VIOLET)
EDGES = (0.5, 1.0, 2.0, 2.5)
"""Of trained gaps."""


def notes(data: Trainings) -> str:
    """Errors of every kind of network, what could have been seen, and what the spread of members tells."""
    found = (_flows(data), _errors(data), _visible(data), _ensembles(data))
    return "\n\n".join(each for each in found if each)


def _kinds(data: Trainings) -> Iterator[tuple[str, Kind]]:
    """Every kind of network, with its name."""
    setting = data.setting
    for width in setting.widths:
        yield f"width {width}", {"width": width}
    for width in setting.widths:
        yield f"width {width}, everywhere", {"width": width, "gaps": EVERYWHERE}
    for num in setting.nums:
        if num != data.num:
            yield f"{num} flows", {"num": num}
    for num in setting.nums[:2]:
        yield f"{num} flows, mirrored", {"num": num, "flips": True}
    for width in (setting.widths[0], setting.widths[-1]):
        for octave in setting.octaves:
            yield f"width {width}, rate × 2^{octave:g}", {"width": width, "octave": octave}


def _flows(data: Trainings) -> str:
    rows = select(data.records, part="flow")
    if not rows:
        return ""
    found = []
    for gap in distinct(rows, "gap"):
        own = select(rows, gap=gap)
        largest = [max(row[name] for row in own) for name in ("residual", "through", "apart")]
        found.append((gap, min(row["order"] for row in own), *largest))
    columns = ["gap", "power", "residual", "through surfaces", "off least squares"]
    return (
        "the flow: the power of the step with which differences for divergence and curl vanish; over the\n"
        "largest speed: these at a step of 0.002, flow through surfaces, distance from least squares\n"
        f"{table(columns, found)}"
    )


def _errors(data: Trainings) -> str:
    rows = []
    for name, kind in _kinds(data):
        if own := data.of(kind):
            cells = [_mean_and_error([in_region(row, region) for row in own]) for region in NAMES]
            rows.append((name, *cells, _mean([row["fit"] for row in own]), len(own)))
    if not rows:
        return ""
    missed = [math.sqrt(float(np.mean([_square(row, region) for row in data.of({})]))) for region in NAMES]
    columns: list[str | Column] = ["network", *NAMES.values(), Column("fit", "{:.3f}".format), "seeds"]
    said = ", ".join(f"{one:.2f} {name}" for one, name in zip(missed, NAMES.values(), strict=True))
    return (
        "root mean squared errors over those of interpolation ± standard errors; fit: on trained flows\n"
        f"{table(columns, rows)}\n"
        f"What interpolation misses, in the unit of the loss: {said}"
    )


def _square(record: Record, region: Region) -> float:
    return in_region({**record, "ones": [1.0] * BINS}, region, "misses", "ones") ** 2


def _mean(values: Sequence[float | None]) -> float:
    return float(np.mean(np.array(values, dtype=float)))


def _mean_and_error(values: Sequence[float]) -> str:
    seen = Observation("", np.array(values))
    return f"{seen.mean:.3f} ± {seen.error:.3f}" if len(values) > 1 else f"{seen.mean:.3f}"


def _visible(data: Trainings) -> str:
    """Changes of the error in octaves, and the smallest that a paired test would have found."""
    first, last = data.setting.widths[0], data.setting.widths[-1]
    few, more, most = data.setting.nums[0], data.num, data.setting.nums[-1]
    pairs: list[tuple[str, Kind, Kind]] = [
        (f"width {first} to {last}", {"width": last}, {"width": first}),
        (f"{few} to {most} flows", {"num": most}, {"num": few}),
        *(
            (f"{num} flows, mirrored or not", {"num": num, "flips": True}, {"num": num})
            for num in dict.fromkeys((few, more))
        ),
        *(
            (
                f"width {width}, with a hole or everywhere",
                {"width": width},
                {"width": width, "gaps": EVERYWHERE},
            )
            for width in data.setting.widths
        ),
    ]
    rows = []
    for name, one, other in pairs:
        cells: list[float] = []
        for region in NAMES:
            values = data.octaves(one, other, region)
            cells += [float(np.mean(values)) if len(values) else math.nan, smallest_effect(values)]
        if math.isfinite(cells[0]):
            rows.append((name, *cells))
    if not rows:
        return ""
    columns: list[str | Column] = ["compared"]
    for name in NAMES.values():
        columns += [Column(name, "{:+.2f}".format), Column("visible", "{:.2f}".format)]
    return (
        "log₂ of the ratio of errors, paired by seed; visible: the smallest that a two-sided test at 5 % "
        f"finds with a power of {POWER:g}\n{table(columns, rows)}"
    )


def smallest_effect(values: Array) -> float:
    """The mean that a two-sided paired t-test with the spread of these values finds with a power of 0.8.

    >>> round(smallest_effect(np.array([-0.1, 0.0, 0.1, 0.0, 0.0, 0.0])), 3)
    0.091
    """
    num = len(values)
    if num < 2 or not np.isfinite(values).all():
        return math.nan
    error = float(np.std(values, ddof=1)) / math.sqrt(num)
    limit = stats.t.isf(LEVEL / 2, num - 1)
    shift = optimize.brentq(lambda shift: stats.nct.sf(limit, num - 1, shift) - POWER, 0.0, 50.0)
    return float(shift) * error


def _ensembles(data: Trainings) -> str:
    own = data.of({}, "ensemble")
    if not own:
        return ""
    rows = []
    for region, name in NAMES.items():
        cells = [
            np.mean([in_region(row, region, *names) for row in own])
            for names in (("errors", "misses"), ("average", "misses"), ("spread", "average"))
        ]
        ranks = [_mean([rank(row, way, region) for row in own]) for way in ("spread", "speed")]
        rows.append((name, *cells, *ranks))
    ranks = [_mean([rank(row, way) for row in own]) for way in ("spread", "speed")]
    rows.append(("all", math.nan, math.nan, math.nan, *ranks))
    columns: list[str | Column] = [
        "gaps",
        *(Column(name, "{:.3f}".format) for name in ("one network", "average")),
        *(Column(name, "{:.2f}".format) for name in ("spread/error", "rank of spread", "rank of speed")),
    ]
    return (
        f"{data.setting.members} networks: their errors, that of their average, their spread over it; rank "
        f"correlations with it of the spread and of the largest coarse speed\n{table(columns, rows)}"
    )


def figures(data: Trainings) -> Iterator[tuple[str, str]]:
    """Errors over the gap, by width, data and training; and the cost of the gaps that were left out."""
    setting = data.setting
    widths = [(f"width {width}", {"width": width}) for width in setting.widths]
    nums: list[tuple[str, Kind]] = [(f"{num} flows", {"num": num}) for num in setting.nums]
    few = setting.nums[0]
    nums.append((f"{few} flows, mirrored", {"num": few, "flips": True}))
    if any(data.of(kind) for _, kind in widths):
        yield "widths", _over_gaps("Relative error over the gap, by width", data, widths)
    if any(data.of(kind) for _, kind in nums[::2]):
        yield "data", _over_gaps("Relative error over the gap, by the number of flows", data, nums)
    if costs := _cost_lines(data):
        yield "cost", costs


def _over_gaps(title: str, data: Trainings, kinds: Sequence[tuple[str, Kind]]) -> str:
    lines: list[SvgLine] = []
    legend: list[tuple[str, str]] = []
    for (name, kind), colour in zip(kinds, PAINT, strict=False):
        if own := data.of(kind):
            lines.append(band(MIDDLES, np.log10(np.array([_by_bin(row) for row in own])), colour))
            legend.append((name, colour))
    up = SvgAxis(-1.2, 0, {-1: "0.1", math.log10(0.2): "0.2", math.log10(0.5): "0.5", 0: "1"})
    return _figure(title, legend, lines, up)


def _cost_lines(data: Trainings) -> str:
    lines: list[SvgLine] = []
    legend: list[tuple[str, str]] = []
    for width, colour in zip(data.setting.widths, PAINT, strict=False):
        found = [
            {row["seed"]: np.array(_by_bin(row)) for row in data.of({"width": width, **other})}
            for other in ({}, {"gaps": EVERYWHERE})
        ]
        if seeds := sorted(found[0].keys() & found[1].keys()):
            ratios = np.array([less(*(np.log2(each[seed]) for each in found)) for seed in seeds])
            lines.append(band(MIDDLES, ratios, colour))
            legend.append((f"width {width}", colour))
    if not legend:
        return ""
    up = SvgAxis(-0.5, 1.5, {-0.5: "0.7", 0: "1", 1: "2"}, strong=0)
    return _figure("Error over that of a network that was trained on all gaps", legend, lines, up)


def _by_bin(record: Record) -> list[float]:
    return [relative(record, [place]) for place in range(BINS)]


def _figure(title: str, legend: list[tuple[str, str]], lines: Sequence[SvgLine], up: SvgAxis) -> str:
    """One panel over the gap, with the edges of trained gaps."""
    edges = [SvgLine([(edge, up.low), (edge, up.high)], INK, dashed=True) for edge in EDGES]
    across = SvgAxis(LOW, HIGH, ticks([0.2, 0.5, 1, 1.5, 2, 2.5, 3]))
    row = SvgRow("error", across, up, [[*edges, *lines]], "gap in radii")
    return SvgFigure(
        title, [*legend, ("dashed: edges of trained gaps", INK)], [""], [row], wide=520, high=260
    ).svg()
