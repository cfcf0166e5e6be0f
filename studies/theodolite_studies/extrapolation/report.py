"""Tables and figures of the study of extrapolation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

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
    NARROW,
    Kind,
    Trainings,
    in_region,
    rank,
    relative,
)
from theodolite_studies.extrapolation.training import BINS, HIGH, LOW, MIDDLES, bins_of
from theodolite_studies.framework.claims import Observation, table
from theodolite_studies.framework.figures import band
from theodolite_studies.framework.paired import POWER, smallest_effect
from theodolite_studies.framework.records import Record, distinct, select

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
    for width in setting.alone:
        yield f"width {width}, narrower alone", {"width": width, "gaps": NARROW}
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
        *(
            (
                f"width {width}, with a hole or narrower alone",
                {"width": width},
                {"width": width, "gaps": NARROW},
            )
            for width in data.setting.alone
        ),
    ]
    rows = []
    for name, one, other in pairs:
        cells: list[float] = []
        for region in NAMES:
            values = data.octaves(one, other, region)
            cells += [float(np.mean(values)) if len(values) else math.nan, smallest_effect(values, sides=2)]
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


def _ensembles(data: Trainings) -> str:
    own = data.of({}, "ensemble")
    if not own:
        return ""
    rows = []
    parts = {name: (region, bins_of(region)) for region, name in NAMES.items()}
    for name, (where, bins) in {**parts, "all": ("all", range(BINS))}.items():
        cells = [
            np.mean([relative(row, bins, *names) for row in own])
            for names in (("errors", "misses"), ("average", "misses"), ("spread", "average"))
        ]
        ranks = [_mean([rank(row, way, where) for row in own]) for way in ("spread", "speed")]
        rows.append((name, *cells, *ranks))
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
    """Errors over the gap: by width and trained gaps, by numbers of flows, and of ensembles."""
    setting = data.setting
    panels = {
        f"width {width}": [
            *_bands(data.of({"width": width, "gaps": EVERYWHERE}), ORANGE),
            *_bands(data.of({"width": width}), BLUE),
        ]
        for width in setting.widths
    }
    if any(panels.values()):
        legend = [("trained with a hole", BLUE), ("trained on all gaps", ORANGE)]
        yield "widths", _figure("Relative error over the gap, by width", legend, panels)
    panels = {
        f"{num} flows": [
            *_bands(data.of({"num": num, "flips": True}), GREEN),
            *_bands(data.of({"num": num}), BLUE),
        ]
        for num in setting.nums
    }
    ensembles = data.of({}, "ensemble")
    panels[f"{setting.members} networks, {data.num} flows"] = [
        *_bands(ensembles, PINK, "spread"),
        *_bands(ensembles, VIOLET, "average"),
    ]
    if any(panels.values()):
        legend = [("as they are", BLUE), ("mirrored", GREEN), ("average", VIOLET), ("spread", PINK)]
        title = f"Relative error over the gap, width {setting.middle}, by the number of flows"
        yield "data", _figure(title, legend, panels)


def _bands(records: Sequence[Record], colour: str, of: str = "errors") -> list[SvgLine]:
    """The relative errors over the gap, with the range of the seeds; nothing without records."""
    if not records:
        return []
    values = [[relative(row, [place], of) for place in range(BINS)] for row in records]
    return [band(MIDDLES, np.log10(np.array(values)), colour)]


def _figure(title: str, legend: list[tuple[str, str]], panels: Mapping[str, list[SvgLine]]) -> str:
    """Panels over the gap, with the edges of trained gaps."""
    up = SvgAxis(-1.1, 0, {math.log10(value): f"{value:g}" for value in (0.1, 0.2, 0.5, 1)})
    edges = [SvgLine([(edge, up.low), (edge, up.high)], INK, dashed=True) for edge in EDGES]
    row = SvgRow(
        "error", SvgAxis(LOW, HIGH, ticks([1, 2, 3])), up, [edges + lines for lines in panels.values()], "gap"
    )
    return SvgFigure(
        title, [*legend, ("dashed: edges of trained gaps", INK)], [*panels], [row], high=180
    ).svg()
