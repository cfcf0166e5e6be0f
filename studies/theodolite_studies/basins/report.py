"""The tables below the claims of the study of basins, and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

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
from theodolite_studies.basins.claims import (
    FIRST_CRITERION,
    MOVED,
    in_training,
    lines_of,
    networks_of,
    over_networks,
    spectra_of,
)
from theodolite_studies.basins.lines import PAIRS
from theodolite_studies.basins.shifts import CRITERIA, SHIFTS
from theodolite_studies.framework.claims import Observation, table
from theodolite_studies.framework.figures import dots, line, log10
from theodolite_studies.framework.paired import Paired
from theodolite_studies.framework.records import Record, distinct, select

COLOURS = (BLUE, GREEN, ORANGE, PINK, VIOLET)
ORDER = ("first", "second", "third", "fourth")
SHORT = "{:.2f}".format


def notes(records: Sequence[Record]) -> str:
    """Barriers and distances, spectra, and correlations."""
    return "\n\n".join(found for found in (_lines(records), _spectra(records), _shifts(records)) if found)


def _lines(records: Sequence[Record]) -> str:
    rows = []
    for pair in PAIRS:
        names = [one.where for one in lines_of(records, pair)]
        for place, name in enumerate(names):
            network, _, rates = name.partition(", ")
            own = select(records, part="lines", pair=pair, network=network, rates=rates)
            rise, chord, distance, norm = (
                lines_of(records, pair, value)[place] for value in ("rise", "chord", "distance", "norm")
            )
            stored = SHORT(np.mean([row["stored"] for row in own])) if network == "normed" else ""
            ends = np.mean([row["ends"] for row in own], axis=0)
            spread = f"{rise.values.min():.2f} to {rise.values.max():.2f}"
            rows.append((pair, name, *ends, rise.mean, spread, chord.mean, stored, distance.mean, norm.mean))
    if not rows:
        return ""
    columns = (
        Column("line"),
        Column("network"),
        *(Column(name, "{:.4f}".format) for name in ("loss at 0", "loss at 1")),
        Column("rise/loss", SHORT),
        Column("from seed to seed"),
        Column("over the chord", SHORT),
        Column("stored statistics"),
        *(Column(name, "{:.1f}".format) for name in ("distance", "norm")),
    )
    return table(columns, rows)


def _spectra(records: Sequence[Record]) -> str:
    rows = []
    for width, classes, separation in sorted(
        {(row["width"], row["classes"], row["separation"]) for row in select(records, part="spectra")}
    ):
        own = spectra_of(records, width=width, classes=classes, separation=separation)
        counts, ruled = (sorted(row[key] for row in own) for key in ("outliers", "wide gaps"))
        means = {
            key: float(np.mean([row[key] for row in own]))
            for key in ("loss", "sharp", "r_e", "r_e by density", "k_h1", "k_h1 by density")
        }
        share = float(np.mean([row["near"] / row["size"] for row in own]))
        by_density = float(np.mean([row["near by density"] for row in own]))
        rows.append(
            (
                f"{width}, {classes}, {separation:g}",
                own[0]["size"],
                means["loss"],
                " ".join(str(count) for count in counts),
                " ".join(str(count) for count in ruled),
                means["sharp"],
                share,
                by_density,
                *(means[key] for key in ("r_e", "r_e by density", "k_h1", "k_h1 by density")),
            )
        )
    if not rows:
        return ""
    columns = (
        Column("width, classes, separation"),
        Column("parameters"),
        Column("loss", "{:.3f}".format),
        Column("outliers by seed"),
        Column("beyond a wide gap"),
        Column("their mean", SHORT),
        *(Column(name, "{:.3f}".format) for name in ("near zero", "by `density`")),
        *(Column(name, "{:.3f}".format) for name in ("r_e", "by `density`", "K_H1", "by `density`")),
    )
    return table(columns, rows)


def _shifts(records: Sequence[Record]) -> str:
    by_seed = networks_of(records)
    if not by_seed:
        return ""
    everything = [row for rows in by_seed.values() for row in rows]
    lost = len(select(records, part="shifts")) - len(everything)
    ruled = {
        "accuracy on clean data": over_networks(records, lambda row, _: row["clean"][0]),
        "loss of training": over_networks(records, lambda row, _: row["loss"]),
        "largest eigenvalue": over_networks(records, in_training(-1)),
    }
    ruled |= {
        criterion: over_networks(records, in_training(place))
        for place, criterion in enumerate(CRITERIA, FIRST_CRITERION)
    }
    rows = [(name, *(_interval(one) for one in found)) for name, found in ruled.items()]
    ranges = [
        f"{name} {min(found):.2f} to {max(found):.2f}"
        for name in SHIFTS
        if (found := [row[name][0] for row in everything])
    ]
    means = [
        (name, *(float(np.mean([row[name][place] for row in everything])) for place in range(4)))
        for name in ("train", *SHIFTS)
    ]
    shown = table(
        (Column("data"), *(Column(name, "{:.3f}".format) for name in ("accuracy", *CRITERIA))), means
    )
    said = (
        f"{len(everything)} networks, {len(by_seed)} seeds, {lost} diverged. Accuracy: {', '.join(ranges)}."
    )
    head = "Rank correlation with the accuracy on shifted data, over networks; mean and 95 % interval by seed"
    return "\n\n".join((said, shown, f"{head}:\n{table(('measured in training', *MOVED), rows)}"))


def _interval(seen: Observation) -> str:
    low, high = Paired(seen.values).interval
    return f"{seen.mean:+.2f} ({low:+.2f} to {high:+.2f})"


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Losses on lines, spectra, and criteria against accuracy."""
    if select(records, part="lines"):
        yield "lines", _line_figure(select(records, part="lines"))
    if select(records, part="spectra"):
        yield "spectra", _spectrum_figure(records)
    if networks_of(records):
        yield "shifts", _shift_figure(records)


def _line_figure(rows: Sequence[Record]) -> str:
    paint = dict(zip(PAIRS, COLOURS, strict=False))
    kinds = list(dict.fromkeys((row["network"], row["rates"]) for row in rows))
    panels = [
        [
            line(row["places"], log10(row["losses"]), paint[row["pair"]])
            for row in select(rows, network=network, rates=rates)
        ]
        for network, rates in kinds
    ]
    up = SvgAxis(-2.5, 0.5, ticks([-2, -1, 0], power=True))
    return SvgFigure(
        "The loss on the line between two networks, each seed",
        list(paint.items()),
        [f"{network}, {rates}" for network, rates in kinds],
        [SvgRow("loss", SvgAxis(0, 1, ticks([0, 0.5, 1])), up, panels, "place on the line")],
    ).svg()


def _spectrum_figure(records: Sequence[Record]) -> str:
    keys = ("width", "classes", "separation")
    panels: list[list[SvgLine]] = []
    titles = []
    for key in keys:
        values = [
            value
            for value in sorted(distinct(select(records, part="spectra"), key))
            if spectra_of(records, **{key: value})
        ]
        titles.append(f"{key} {', '.join(f'{value:g}' for value in values)}")
        panels.append(
            [
                line(range(1, len(tops[0]) + 1), np.log10(np.mean(tops, axis=0)), colour)
                for value, colour in zip(values, COLOURS, strict=False)
                if (tops := [row["top"] for row in spectra_of(records, **{key: value})])
            ]
        )
    up = SvgAxis(-2, 1, ticks([-2, -1, 0, 1], power=True))
    return SvgFigure(
        "The largest eigenvalues of the Hessian, mean of the seeds",
        [("values in the order named:", INK), *zip(ORDER, COLOURS, strict=False)],
        titles,
        [SvgRow("eigenvalue", SvgAxis(1, 20, ticks([1, 5, 10, 15, 20])), up, panels, "rank")],
        wide=200,
    ).svg()


def _shift_figure(records: Sequence[Record]) -> str:
    rows = [row for own in networks_of(records).values() for row in own]
    shift = MOVED[-1]
    drawn = []
    for place, criterion in enumerate(CRITERIA, FIRST_CRITERION):
        panels = [
            [dots(log10(row[where][place] for row in rows), [row[shift][0] for row in rows], BLUE)]
            for where in ("train", shift)
        ]
        drawn.append(
            SvgRow(
                "accuracy",
                SvgAxis(-3, 0.3, ticks([-3, -2, -1, 0], power=True)),
                SvgAxis(0.4, 1, ticks([0.5, 0.75, 1])),
                panels,
                criterion,
            )
        )
    return SvgFigure(
        f"Accuracy on shifted data ({shift}) against the criteria, each network",
        [(f"{len(rows)} networks", BLUE)],
        ["criterion on training data", "on shifted data"],
        drawn,
        wide=220,
    ).svg()
