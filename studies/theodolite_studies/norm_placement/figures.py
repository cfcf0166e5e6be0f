"""The figures of the norm-placement study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgLine,
    SvgRow,
    power_of,
    ticks,
)
from theodolite_studies.framework.records import Record
from theodolite_studies.norm_placement.values import KINDS, Array, Table

COLOURS = {"pre": ORANGE, "post": BLUE, "peri": GREEN, "out": VIOLET, "none": PINK}
MOMENTS = (BLUE, VIOLET, PINK, ORANGE)
"""Of four readings, the first to the last."""
TICKS = 5
"""Most powers of ten beside a row."""
HIGHEST = 1.0
"""Nats above the lowest loss at which a panel ends."""


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Stream and gradient over the blocks of the deepest network; losses against learning rates."""
    table = Table(records)
    for name, title in (("stream", "The stream"), ("gradient", "The gradient of the stream")):
        figure = _profiles(table, name, title)
        if figure is not None:
            yield name, figure.svg()
    yield "rates", _rates(table).svg()


def _profiles(table: Table, name: str, title: str) -> SvgFigure | None:
    depth = table.depths[-1]
    found = {(p, kind): table.of(p, depth, kind) for kind in KINDS for p in table.placements}
    there = [one for one in found.values() if one is not None and one.steps]
    if not there:
        return None
    steps = _few(there[0].steps)
    logs = [np.log10(one.profile(name, step)) for one in there for step in steps]
    known = np.concatenate([log[np.isfinite(log)].ravel() for log in logs])
    if not known.size:
        return None
    low, high = math.floor(known.min() * 2) / 2, math.ceil(known.max() * 2) / 2
    powers = range(math.ceil(low), math.floor(high) + 1)
    few = powers[:: math.ceil(len(powers) / TICKS)]
    y = SvgAxis(low, high, ticks([float(power) for power in few], power=True))
    x = SvgAxis(0, depth, ticks([0.0, depth / 2, float(depth)]))
    rows = []
    for kind in KINDS:
        panels = []
        for placement in table.placements:
            one = found[placement, kind]
            panels.append(
                [
                    _band(range(depth + 1), np.log10(one.profile(name, step)), colour)
                    for step, colour in zip(steps, MOMENTS, strict=False)
                ]
                if one is not None
                else []
            )
        rows.append(SvgRow(kind, x, y, panels, note="block" if kind == KINDS[-1] else ""))
    legend = [(f"step {step}", colour) for step, colour in zip(steps, MOMENTS, strict=False)]
    return SvgFigure(f"{title}, root mean square over {depth} blocks", legend, table.placements, rows)


def _rates(table: Table) -> SvgFigure:
    every = [one for kind in KINDS for p in table.all for d in table.depths if (one := table.of(p, d, kind))]
    exponents = sorted({exponent for one in every for exponent in one.exponents})
    low = min(float(one.best.min()) for one in every)
    low = math.floor(low * 10) / 10 if math.isfinite(low) else 0.0
    y = SvgAxis(low, low + HIGHEST, ticks([round(low + part * HIGHEST, 1) for part in (0.0, 0.5, 1.0)]))
    x = SvgAxis(exponents[0], exponents[-1], {float(each): power_of(2, each) for each in exponents})
    rows = []
    for kind in KINDS:
        panels = []
        for depth in table.depths:
            lines = []
            for placement in table.all:
                one = table.of(placement, depth, kind)
                if one is not None:
                    losses = np.stack([one.at(exponent) for exponent in one.exponents], axis=1)
                    lines.append(_band(one.exponents, losses, COLOURS[placement]))
            panels.append(lines)
        rows.append(SvgRow(kind, x, y, panels, note="learning rate" if kind == KINDS[-1] else ""))
    legend = [(placement, COLOURS[placement]) for placement in table.all]
    columns = [f"depth {depth}" for depth in table.depths]
    return SvgFigure("Held-out loss against the learning rate", legend, columns, rows)


def _band(xs: Sequence[float], values: Array, colour: str) -> SvgLine:
    """The mean over seeds, and the lowest and highest of them."""
    means = values.mean(0)
    points = [(float(x), float(mean)) for x, mean in zip(xs, means, strict=True)]
    return SvgLine(points, colour, lows=values.min(0).tolist(), highs=values.max(0).tolist())


def _few(steps: Sequence[int]) -> list[int]:
    """Four of them at most, the first and the last among them."""
    places = np.linspace(0, len(steps) - 1, min(len(steps), len(MOMENTS))).round()
    return [steps[int(place)] for place in places]
