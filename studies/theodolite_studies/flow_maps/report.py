"""Tables and figures of the study of flow maps."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
from scipy import stats

from theodolite import flows
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
    turned,
)
from theodolite.present.text import Column
from theodolite_studies.flow_maps.claims import TESTS, judged_alike
from theodolite_studies.flow_maps.setting import ARMS, IMAGE_JUMPS, JUMPS, MAPS
from theodolite_studies.framework.claims import Array, table
from theodolite_studies.framework.figures import band
from theodolite_studies.framework.paired import POWER, smallest_effect, standing
from theodolite_studies.framework.records import Record, distinct, select

COLOURS = {
    "lagrangian": BLUE,
    "eulerian": GREEN,
    "progressive-midpoint": ORANGE,
    "progressive-uniform": PINK,
    "matching": INK,
}
PICTURE = 2.0
"""Drawn pixels for each of a picture."""


def notes(records: Sequence[Record]) -> str:
    """All errors, distances, spreads, costs and bounds in tables."""
    found = [
        _errors(records),
        _diagonals(records),
        _sensitivity(records),
        _costs(records),
        _bounds(records),
        _images(records),
        _width_losses(records),
    ]
    return "\n\n".join(each for each in found if each)


def _mean(rows: Sequence[Record], name: str) -> Array:
    """The mean over seeds of a list."""
    return np.mean([row[name] for row in rows], axis=0)


def _errors(records: Sequence[Record]) -> str:
    """Mean distances to the exact map, and of distributions."""
    mixture = select(records, part="mixture", diverged=False)
    exact = select(records, part="exact")
    if not mixture:
        return ""
    said = []
    for title, suffix in (
        ("mean distance to the exact map", ""),
        ("sliced Wasserstein distance to the data", " distance"),
    ):
        rows: list[tuple[str, ...]] = []
        for kind, way in [*((kind, "map") for kind in ARMS), ("matching", "euler"), ("matching", "heun")]:
            own = [row for row in select(mixture, kind=kind) if f"{way}{suffix}" in row]
            if own:
                values = [f"{value:.3f}" for value in _mean(own, f"{way}{suffix}")]
                name = kind if way == "map" else f"{way.title()} on matching"
                rows.append((name, *([""] * (len(JUMPS) - len(values))), *values))
        if exact and not suffix:
            rows.append(("Euler on the exact velocity", *(f"{v:.3f}" for v in _mean(exact, "euler"))))
        if suffix:
            value = np.mean([row["data distance"] for row in mixture])
            rows.append(("other data", *([f"{value:.3f}"] * len(JUMPS))))
        columns = [Column("jumps or evaluations"), *(Column(str(number)) for number in JUMPS)]
        said.append(f"{title}, mean over the seeds\n{table(columns, rows)}")
    return "\n\n".join(said)


def _diagonals(records: Sequence[Record]) -> str:
    mixture = select(records, part="mixture", diverged=False)
    rows = []
    for kind in ARMS:
        if own := select(mixture, kind=kind):
            gap = float(np.mean([row["gap"] for row in own]))
            largest = max(row["gradient"] for row in own)
            late = max(max(row["gradients"][len(row["gradients"]) // 2 :]) for row in own)
            rows.append((kind, gap, 100 * gap / flows.three_gaussians().floor(), largest, late))
    columns = [
        Column("loss"),
        Column("above the floor", "{:.4f}".format),
        Column("% of it", "{:.2f}".format),
        Column("largest gradient", "{:.2f}".format),
        Column("in the second half", "{:.2f}".format),
    ]
    title = (
        "loss of the velocity above its floor (mean over the seeds), gradient norms (largest of all seeds)"
    )
    return f"{title}\n{table(columns, rows)}" if rows else ""


def _sensitivity(records: Sequence[Record]) -> str:
    """What was tested, and how far from its threshold a value must be to be told from it."""
    rows, values = [], []
    for name, (observe, limit) in TESTS.items():
        seen = observe(records)
        if seen is not None and len(seen.values) > 2 and seen.error > 0:
            p = float(stats.t.sf((limit - seen.mean) / seen.error, len(seen.values) - 1))
            smallest = smallest_effect(seen.values)
            rows.append((name, limit, seen.mean, seen.values.min(), seen.values.max(), p, smallest))
            values.append(p)
    if not rows:
        return ""
    shown = "{:.2f}".format
    columns = [Column("error of one jump, or its ratio"), Column("threshold", "{:g}".format)]
    columns += [Column(name, shown) for name in ("mean", "least", "largest")]
    columns += [Column("p", "{:.2g}".format), Column("detectable", shown)]
    title = (
        "one-sided tests that the mean is below its threshold; detectable: the distance from it that is seen "
        f"with a probability of {POWER:.0%}"
    )
    stand = [row[0] for row, stands in zip(rows, standing(values), strict=True) if stands]
    after = f"By Holm's rule over these {len(rows)} tests stand: {'; '.join(stand) or 'none'}."
    return f"{title}\n{table(columns, rows)}\n{after}"


def _costs(records: Sequence[Record]) -> str:
    rows = []
    for width in distinct(select(records, part="cost"), "width"):
        own = select(records, part="cost", width=width)
        matching = np.median([row["milliseconds"] for row in own])
        means = [np.mean([row["costs"][kind] for row in own]) for kind in MAPS]
        rows.append((f"{width} wide, {own[0]['num']} examples", matching, *means))
    columns = [Column("a training step"), Column("matching, ms", "{:.3g}".format)]
    columns += [Column(kind, "{:.2f} ×".format) for kind in MAPS]
    return f"processor time of a step over that of matching\n{table(columns, rows)}" if rows else ""


def _bounds(records: Sequence[Record]) -> str:
    """2⟨dz, df⟩/|df|² of close pairs, against the number of steps."""
    ways = {
        "Euler, exact velocity": select(records, part="exact"),
        "Euler on matching": select(records, part="mixture", kind="matching", diverged=False),
        "lagrangian": select(records, part="mixture", kind="lagrangian", diverged=False),
        "progressive-uniform": select(records, part="mixture", kind="progressive-uniform", diverged=False),
    }
    rows: list[tuple[str, ...]] = []
    for name, own in ways.items():
        if own:
            places = np.median(np.array([row["bounds"] for row in own], dtype=float), axis=0)
            rows.append((name, *(_slashed(place) for place in places)))
    if exact := ways["Euler, exact velocity"]:
        place = _slashed(np.median([row["map bounds"] for row in exact], axis=0))
        rows.append(("the exact map", *([place] * len(JUMPS))))
    columns = [Column("jumps or steps"), *(Column(str(number)) for number in JUMPS)]
    title = "2⟨dz, df⟩/|df|² of close pairs: least / 1 % / median, each the median over the seeds"
    return f"{title}\n{table(columns, rows)}" if rows else ""


def _slashed(values: Array) -> str:
    return " / ".join(f"{value:.2g}" for value in values) if np.isfinite(values).all() else "constant"


def _images(records: Sequence[Record]) -> str:
    images = select(records, part="dit-fashion")
    alike = select(judged_alike(records), diverged=False)
    rows: list[tuple[str, ...]] = []
    for kind in distinct(images, "kind"):
        every = select(images, kind=kind)
        own = select(alike, kind=kind)
        facts = (
            f"{len(select(every, diverged=False))} of {len(every)}",
            f"{max((row['gradient'] or np.inf) for row in every):.2g}",
            str(len(own)),
        )
        for way in ("map", "euler"):
            if own and way in own[0]:
                values = (f"{value:.2f}" for value in _mean(own, way))
                rows.append((f"{kind}, {'jumps' if way == 'map' else 'Euler'}", *facts, *values))
        if not own:
            rows.append((kind, *facts, *([""] * len(IMAGE_JUMPS))))
    if not rows:
        return ""
    said = ["feature distance to Fashion-MNIST, mean over the networks that one classifier judged"]
    columns = [Column(name) for name in ("jumps or steps", "ended", "largest gradient", "judged")]
    said.append(table([*columns, *(Column(str(number)) for number in IMAGE_JUMPS)], rows))
    if alike:
        floor = np.mean([row["floor"] for row in alike])
        said.append(f"test images have {floor:.3f}; classifier {alike[0]['classifier']}")
    return "\n".join(said)


def _width_losses(records: Sequence[Record]) -> str:
    """The training loss of plain flows of several widths, at the steps whose samples are drawn."""
    rows = select(records, part="dit-widths")
    if not rows:
        return ""
    widths, moments = sorted(distinct(rows, "width")), sorted(distinct(rows, "step"))
    losses = {(row["width"], row["step"]): f"{row['loss']:.3f}" for row in rows}
    lines = [(str(width), *(losses.get((width, step), "") for step in moments)) for width in widths]
    columns = [Column("width"), *(Column(f"{step} steps") for step in moments)]
    return f"dit-fashion by one plan: training loss, a mean over the last 20 steps\n{table(columns, lines)}"


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Errors against jumps, gradients, feature distances, and samples."""
    mixture = select(records, part="mixture", diverged=False)
    if mixture:
        yield "jumps", _jumps(mixture)
        yield "gradients", _gradients(mixture)
    images = select(records, part="dit-fashion", diverged=False)
    if images:
        yield "features", _features(select(judged_alike(records), diverged=False))
        yield "samples", _samples(images)
    if widths := select(records, part="dit-widths"):
        yield "widths", _widths(widths)


def _logarithmic(low: float, high: float) -> SvgAxis:
    """A decimal axis with texts at 1, 2 and 5 times powers of ten."""
    values = [m * 10.0**k for k in range(-4, 4) for m in (1, 2, 5)]
    inside = [value for value in values if low <= value * 1.001 and value <= high * 1.001]
    return SvgAxis(np.log10(low), np.log10(high), {float(np.log10(v)): f"{v:g}" for v in inside})


def _octaves(numbers: Sequence[int]) -> SvgAxis:
    places = {float(np.log2(number)): str(number) for number in numbers}
    return SvgAxis(0, max(places), places)


def _lines(
    rows: Sequence[Record], numbers: Sequence[int], suffix: str = "", way: str = "map"
) -> list[SvgLine]:
    """A band over the seeds for each loss; beside jumps Euler on matching and, dashed, Heun."""
    found = []
    for kind, colour in COLOURS.items():
        own = select(rows, kind=kind)
        for name in ("euler", "heun") if kind == "matching" and way == "map" else (way,):
            if own and name in own[0]:
                values = np.log10([row[f"{name}{suffix}"] for row in own])
                across = np.log2(numbers[-values.shape[1] :])
                found.append(band(across, values, colour, dashed=name == "heun"))
    return found


def _level(value: float, numbers: Sequence[int]) -> SvgLine:
    ends = 0.0, float(np.log2(numbers[-1]))
    return SvgLine([(x, float(np.log10(value))) for x in ends], VIOLET, dashed=True)


def _legend(heun: bool) -> list[tuple[str, str]]:
    beside = "Euler on matching; dashed: Heun" if heun else "Euler on matching"
    return [(beside if kind == "matching" else kind, colour) for kind, colour in COLOURS.items()]


def _jumps(rows: Sequence[Record]) -> str:
    other = float(np.mean([row["data distance"] for row in rows]))
    panels = [
        _lines(rows, JUMPS),
        _lines(rows, JUMPS, way="euler"),
        [*_lines(rows, JUMPS, " distance"), _level(other, JUMPS)],
    ]
    return SvgFigure(
        "Three Gaussians: jumps of flow maps and steps of samplers",
        [*_legend(heun=True), ("other data", VIOLET)],
        ["jumps: to the exact map", "Euler on each velocity: the same", "jumps: to the data (sliced W₂)"],
        [SvgRow("distance", _octaves(JUMPS), _logarithmic(0.02, 2.0), panels, "jumps or evaluations")],
        wide=230,
        high=220,
    ).svg()


def _gradients(rows: Sequence[Record]) -> str:
    across, panels = SvgAxis(0, 1, {0: "0", 1: "end"}), []
    for suffix in ("", "-unstopped", "-long"):
        panel = []
        for kind, colour in COLOURS.items():
            if own := select(rows, kind=f"{kind}{suffix}"):
                values = np.log10([row["gradients"] for row in own])
                panel.append(band(np.linspace(0, 1, values.shape[1]), values, colour))
        panels.append(panel)
    return SvgFigure(
        "Three Gaussians: largest gradient norm in each fortieth of training",
        list(COLOURS.items()),
        ["gradients stopped", "not stopped", "three times the steps"],
        [SvgRow("norm", across, _logarithmic(0.5, 500.0), panels, "training")],
        wide=230,
        high=160,
    ).svg()


def _features(rows: Sequence[Record]) -> str:
    floor = _level(float(np.mean([row["floor"] for row in rows])), IMAGE_JUMPS)
    panels = [[*_lines(rows, IMAGE_JUMPS, way=way), floor] for way in ("map", "euler")]
    heights = [y for lines in panels for each in lines for _, y in each.points]
    up = _logarithmic(10 ** np.floor(min(heights)), 10 ** np.ceil(max(heights)))
    return SvgFigure(
        "Fashion-MNIST: feature distance of samples",
        [*(each for each in _legend(heun=False) if "uniform" not in each[0]), ("test images", VIOLET)],
        ["jumps", "Euler on each velocity"],
        [SvgRow("feature distance", _octaves(IMAGE_JUMPS), up, panels, "jumps or steps")],
        wide=230,
        high=220,
    ).svg()


def _samples(rows: Sequence[Record]) -> str:
    """Samples of each loss by the number of jumps, of one seed and the same noise."""
    first = [select(rows, kind=kind)[0] for kind in distinct(rows, "kind")]
    names = ["Euler on matching" if row["kind"] == "matching" else row["kind"] for row in first]
    columns = [f"{number} jump{'s' if number > 1 else ''}" for number in IMAGE_JUMPS]
    title = "Fashion-MNIST: samples of the same noise by the number of jumps"
    return picture_grid(title, names, columns, [row["pictures"] for row in first])


def _widths(rows: Sequence[Record]) -> str:
    """Samples of plain flows of several widths as they train."""
    widths, moments = sorted(distinct(rows, "width")), sorted(distinct(rows, "step"))
    own = {(row["width"], row["step"]): row["picture"] for row in rows}
    pictures = [[own.get((width, step), "") for step in moments] for width in widths]
    return picture_grid(
        "dit-fashion: samples of the same noise as networks of several widths train by one plan",
        [f"width {width}" for width in widths],
        [f"{step} steps" for step in moments],
        pictures,
    )


def picture_grid(
    title: str, rows: Sequence[str], columns: Sequence[str], pictures: Sequence[Sequence[str]]
) -> str:
    """PNG images in base64, row by row, as one drawing. An empty text leaves its place empty."""
    sizes = [png_size(each) for row in pictures for each in row if each]
    wide, high = (PICTURE * max(size[axis] for size in sizes) for axis in (0, 1))
    left, top, gap = LEFT - 30, TOP - 20, 10
    total = max(left + len(columns) * (wide + gap), LEFT + 8 * len(title))
    pieces = [head(total, top + len(rows) * (high + gap) + gap, title)]
    for column, name in enumerate(columns):
        x = left + column * (wide + gap) + wide / 2
        pieces.append(f'<text x="{x:g}" y="{top - 8}" text-anchor="middle">{escape(name)}</text>')
    for place, (name, own) in enumerate(zip(rows, pictures, strict=True)):
        y = top + place * (high + gap)
        pieces.append(turned(name, left - 12, y + high / 2))
        for column, content in enumerate(own):
            if content:
                pieces.append(
                    f'<image x="{left + column * (wide + gap):g}" y="{y:g}" width="{wide:g}" '
                    f'height="{high:g}" style="image-rendering:pixelated" '
                    f'href="data:image/png;base64,{content}"/>'
                )
    return "\n".join([*pieces, "</svg>", ""])


def png_size(content: str) -> tuple[int, int]:
    """Width and height, from the header of a PNG image in base64.

    >>> png_size("iVBORw0KGgoAAAANSUhEUgAAAAMAAAACCAAAAAA=")
    (3, 2)
    """
    wide, high = struct.unpack(">II", base64.b64decode(content[:32])[16:24])
    return wide, high
