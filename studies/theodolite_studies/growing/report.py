"""Tables and figures of the growing study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, PINK, VIOLET, SvgAxis, SvgFigure, SvgLine, SvgRow
from theodolite_studies.framework.claims import table
from theodolite_studies.framework.figures import dots, line
from theodolite_studies.framework.paired import paired
from theodolite_studies.framework.records import Record, distinct, select
from theodolite_studies.growing.claims import PARTS, losses, share
from theodolite_studies.growing.envelope import HELD, envelope
from theodolite_studies.growing.ranking import (
    SIGNALS,
    VARIANTS,
    Correlation,
    correlation,
    in_two_orders,
    realised,
    together,
)

COLOURS = {
    "none": INK,
    "scratch": PINK,
    "signal": ORANGE,
    "jump": "#c9a227",
    "even": BLUE,
    "stack": GREEN,
    "random": VIOLET,
    "weakest": "#5b9aa0",
    "tried": "#b5651d",
}


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Loss against compute, gains against the signal, and loss against depth."""
    if grown := select(records, part="growing", way=lambda way: way != "base"):
        yield "curves", _curves(grown).svg()
    if ranking := select(records, part="ranking"):
        yield "ranking", _ranking(ranking).svg()
    if growths := select(records, part="envelope"):
        yield "envelope", _envelope(growths).svg()


def _curves(records: Sequence[Record]) -> SvgFigure:
    sizes = sorted(distinct(records, "added"))
    panels: list[list[SvgLine]] = []
    for added in sizes:
        lines = []
        for way, colour in COLOURS.items():
            if own := select(records, added=added, way=way):
                curves = np.array([one["curve"] for one in own], dtype=float)
                lines.append(line(np.log10(curves[0, :, 0]), curves[:, :, 1].mean(0), colour))
        panels.append(lines)
    drawn = [each for panel in panels for each in panel]
    logs = [x for each in drawn for x, _ in each.points]
    ends = [y for each in drawn for _, y in each.points[len(each.points) // 3 :] if math.isfinite(y)]
    ends = ends or [0.0, 1.0]
    x = _axis(min(logs), max(logs), power=True)
    row = SvgRow("held-out loss", x, _axis(min(ends), max(ends)), panels, note="FLOPs spent")
    legend = [(way, colour) for way, colour in COLOURS.items() if select(records, way=way)]
    return SvgFigure("Loss against compute", legend, [f"+{added} blocks" for added in sizes], [row])


def _ranking(records: Sequence[Record]) -> SvgFigure:
    moments = sorted(int(moment) for moment in records[0]["gained"])
    seeds = sorted(distinct(records, "seed"))
    colours = dict(zip(seeds, (BLUE, ORANGE, GREEN, PINK, VIOLET), strict=False))
    rows = []
    for variant in VARIANTS:
        panels = []
        for moment in moments:
            gained, gains = (realised(records, variant, moment, column) for column in ("gained", "gain"))
            panels.append(
                [
                    dots(np.log10(np.maximum(gains[seed], 1e-12)), gained[seed], colours[seed])
                    for seed in gained
                ]
            )
        points = [point for panel in panels for each in panel for point in each.points]
        (left, right), (bottom, top) = ((min(own), max(own)) for own in zip(*points, strict=True))
        label = "new block trained" if variant == "new" else "all trained"
        note = "gain of the signal" if variant == VARIANTS[-1] else ""
        rows.append(SvgRow(label, _axis(left, right, power=True), _axis(bottom, top), panels, note))
    legend = [(f"seed {seed}", colour) for seed, colour in colours.items()]
    titles = [f"after {moment} steps" for moment in moments]
    return SvgFigure("What a block gained, by the signal of its place", legend, titles, rows)


def _envelope(records: Sequence[Record]) -> SvgFigure:
    def means(kind: str, column: str) -> list[tuple[float, float]]:
        own = select(records, kind=kind, loss=lambda loss: loss is not None)
        return [
            (float(value), float(np.mean([one["loss"] for one in select(own, **{column: value})])))
            for value in sorted(distinct(own, column))
        ]

    grown, alone = means("grown", "depth"), means("alone", "steps")
    beside = [(point[0], other[1]) for point, other in zip(grown, alone, strict=False)]
    sizes = [(math.log10(size), loss) for size, loss in means("coupled", "parameters")]
    heights = [loss for _, loss in (*grown, *beside, *sizes)]
    y = _axis(min(heights), max(heights))
    rows = []
    if grown:
        deepest = grown[-1][0]
        x = SvgAxis(0, deepest, {0.0: "0", deepest / 2: f"{deepest / 2:g}", deepest: f"{deepest:g}"})
        panel = [SvgLine(grown, ORANGE), SvgLine(beside, INK, dashed=True)]
        rows.append(SvgRow("loss", x, y, [panel], note="blocks"))
    if len(sizes) > 1:
        across = _axis(sizes[0][0], sizes[-1][0], power=True)
        rows.append(SvgRow("loss", across, y, [[SvgLine(sizes, BLUE)]], note="parameters"))
    legend = [("grown block by block", ORANGE), ("one block, as long", INK), ("from scratch", BLUE)]
    return SvgFigure("Loss against depth and size", legend, [""], rows)


def _axis(low: float, high: float, *, power: bool = False) -> SvgAxis:
    """From low to high with a little room, and three texts."""
    room = 0.04 * (high - low) or 0.5
    marks = [low, (low + high) / 2, high]
    texts = {mark: f"{10**mark:.1e}" if power else f"{mark:.3g}" for mark in marks}
    return SvgAxis(low - room, high + room, texts)


def notes(records: Sequence[Record]) -> str:
    """A table for each part that there are records of."""
    tables = (_grown, _ranked, _covered, _enveloped)
    return "\n\n".join(
        text for part, told in zip(PARTS, tables, strict=True) for text in told(select(records, part=part))
    )


def _grown(records: Sequence[Record]) -> Iterator[str]:
    for added in sorted(distinct(records, "added")):
        own = select(records, added=added, way=lambda way: way != "base")
        none = losses(own, added, "none")
        rows = []
        for way in distinct(own, "way"):
            end, first = losses(own, added, way), losses(own, added, way, "first")
            less = str(paired(end, none)) if way != "none" and end.keys() & none.keys() else "–"
            mine = select(own, way=way)
            steps = sorted(distinct(mine, "steps"))
            places = " ".join(",".join(map(str, one["places"])) for one in mine if "places" in one)
            means = (f"{np.mean(list(found.values())):.4f}" for found in (first, end))
            made = "–".join(str(each) for each in dict.fromkeys((steps[0], steps[-1])))
            rows.append((way, *means, less, made, places or "–"))
        heading = (
            f"Held-out loss with {added} more blocks, when all have spent the same; p of each by itself:"
        )
        columns = ("way", "at first", "at the end", "less none", "steps", "places by seed")
        yield f"{heading}\n{table(columns, rows)}"


def _ranked(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    moments = sorted(int(moment) for moment in records[0]["gained"])
    columns = [(variant, moment) for variant in VARIANTS for moment in moments]
    gained = {each: realised(records, *each, "gained") for each in columns}
    rows: list[tuple[str, ...]] = [("after steps", *(str(moment) for _, moment in columns))]
    for name, words in SIGNALS.items():
        signals = {variant: realised(records, variant, moments[0], name) for variant in VARIANTS}
        found = [correlation(together(signals[each[0]], gained[each])) for each in columns]
        rows.append((words, *map(_over_points, found)))
    agreed = [correlation(in_two_orders(records, *each)) for each in columns]
    rows.append(("another order of data", *map(_over_points, agreed)))
    means = [np.mean([each.mean() for each in gained[column].values()]) for column in columns]
    spreads = [np.mean([each.std(ddof=1) for each in gained[column].values()]) for column in columns]
    rows.append(("gained, mean ± spread over points", *map("{:+.4f} ± {:.4f}".format, means, spreads)))
    heading = (
        "Rank correlation of what a block gained with what was known before. The intervals are over the\n"
        f"points of these {len(gained[columns[0]])} networks, as if points were independent, which "
        "neighbours are not; they say nothing\nof other networks:"
    )
    yield f"{heading}\n{table(('trained', *(variant for variant, _ in columns)), rows)}"


def _over_points(found: Correlation) -> str:
    low, high = found.over_points
    return f"{found.value:+.2f} ({low:+.2f} to {high:+.2f})"


def _covered(records: Sequence[Record]) -> Iterator[str]:
    rows = []
    for one in records:
        tries = one["repetitions"]
        part, low, high = share(one["wrong"], tries)
        wrong = (f"{100 * part:.2f} %", f"{100 * low:.2f} to {100 * high:.2f} %")
        issued, above = f"{100 * one['issued'] / tries:.1f} %", f"{100 * one['above'] / tries:.2f} %"
        means = (f"{one['lower']:.4f}", f"{one['truth']:.4f}")
        rows.append((one["splits"], one["regime"], one["method"], str(tries), issued, *wrong, above, *means))
    if rows:
        columns = ("splits", "to gain", "bound by", "tries", "issued", "wrong", "95 %")
        found = table((*columns, "bound > truth", "bound", "truth"), rows)
        yield f"Certificates; wrong ones are shares of all tries:\n{found}"


def _enveloped(records: Sequence[Record]) -> Iterator[str]:
    known = select(records, loss=lambda loss: loss is not None)
    rows = []
    for steps in sorted({one["steps"] for one in known if one["kind"] != "coupled"}):
        both = [select(known, steps=steps, kind=kind) for kind in ("grown", "alone")]
        means = (f"{np.mean([one['loss'] for one in own]):.4f}" if own else "–" for own in both)
        first, last = "–", "–"
        if grown := both[0]:
            first, last = str(grown[0]["depth"]), f"{np.mean([one['gain'] for one in grown]):.2g}"
        rows.append((str(steps), first, *means, last))
    if rows:
        columns = ("steps", "blocks", "grown", "one block", "gain of the next")
        yield f"One block after the other:\n{table(columns, rows)}"
    found = envelope(records)
    if found is None:
        return
    alone = found.alone
    lines = [
        ("s", found.s),
        ("E, what is left at any depth", found.floor),
        ("exponent in depth, 1/(s − 1)", f"{1 / (found.s.value - 1):.4g}; of a power law {found.in_depth}"),
        ("exponent in parameters, foretold", found.foretold),
        ("exponent in parameters, from scratch", found.measured),
        ("slope of log gain by log excess loss", found.coupling and f"{found.coupling:.3g}"),
        ("s of one block for the same steps", alone and alone.s),
        ("exponent that it would foretell", alone and alone.foretold),
        ("held-out error, grown", found.rivals),
        ("held-out error, one block", alone and alone.rivals),
    ]
    rows = [(name, str(value)) for name, value in lines if value is not None]
    yield "\n".join(
        [
            "Exponents:",
            table(("of", "value"), rows),
            f"Held-out errors are of log loss at the last {HELD} stages, by fits to the others, by seed.",
            "One block that trains on gains no depth. Where its s cannot be told from that of the network",
            "that grows, what is fitted may be training time.",
        ]
    )
