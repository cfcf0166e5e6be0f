"""The tables and figures of the norm-placement study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from theodolite.present.svg import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgRow,
    power_of,
    ticks,
)
from theodolite_studies.framework.claims import Array, table
from theodolite_studies.framework.figures import band
from theodolite_studies.framework.paired import Paired, less
from theodolite_studies.norm_placement.claims import judged, unbracketed
from theodolite_studies.norm_placement.runs import KINDS, NetworkRuns, RunTable

COLOURS = {"pre": ORANGE, "post": BLUE, "peri": GREEN, "out": VIOLET, "none": PINK}
MOMENTS = (BLUE, VIOLET, PINK, ORANGE)
"""Of four readings, the first to the last."""
TICKS = 5
"""Most powers of ten beside a row."""
HIGHEST = 1.0
"""Nats above the lowest loss at which a panel ends."""


def figures(table: RunTable) -> Iterator[tuple[str, str]]:
    """Stream and gradient over the blocks of the deepest network; losses against learning rates."""
    for name, title in (("stream", "The stream"), ("gradient", "The gradient of the stream")):
        figure = _profiles(table, name, title)
        if figure is not None:
            yield name, figure.svg()
    yield "rates", _rates(table).svg()


def _profiles(table: RunTable, name: str, title: str) -> SvgFigure | None:
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
                    band(range(depth + 1), np.log10(one.profile(name, step)), colour)
                    for step, colour in zip(steps, MOMENTS, strict=False)
                ]
                if one is not None
                else []
            )
        rows.append(SvgRow(kind, x, y, panels, note="block" if kind == KINDS[-1] else ""))
    legend = [(f"step {step}", colour) for step, colour in zip(steps, MOMENTS, strict=False)]
    return SvgFigure(f"{title}, root mean square over {depth} blocks", legend, table.placements, rows)


def _rates(table: RunTable) -> SvgFigure:
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
                    lines.append(band(one.exponents, losses, COLOURS[placement]))
            panels.append(lines)
        rows.append(SvgRow(kind, x, y, panels, note="learning rate" if kind == KINDS[-1] else ""))
    legend = [(placement, COLOURS[placement]) for placement in table.all]
    columns = [f"depth {depth}" for depth in table.depths]
    return SvgFigure("Held-out loss against the learning rate", legend, columns, rows)


def _few(steps: Sequence[int]) -> list[int]:
    """Four of them at most, the first and the last among them."""
    places = np.linspace(0, len(steps) - 1, min(len(steps), len(MOMENTS))).round()
    return [steps[int(place)] for place in places]


def notes(table: RunTable) -> str:
    """A row for each network, and placements against one another seed by seed."""
    return "\n\n".join(each for each in (_networks(table), _pairs(table)) if each)


def _networks(runs: RunTable) -> str:
    columns = ("network", "best lr", "loss", "at 2×", "4×", "8×", "reach", "stream", "end", "gradient", "end")
    heading = (
        "Held-out loss at the best learning rate and how much is lost above it; learning rates that end\n"
        "within 0.1 of the best of all placements, + if an edge of what was tried is among them; size of\n"
        "the stream after the last block, and gradient of the first block over the last's, before and\n"
        "after training. ! is a best at an edge, or of a network that ends alike at all learning rates:"
    )
    return f"{heading}\n{table(columns, [_network(runs, *names) for names in _names(runs)])}"


def _names(table: RunTable) -> list[tuple[str, int, str]]:
    """Placement, depth and parameterization of every network; at base size there is one of the latter."""
    return [
        (placement, depth, kind)
        for depth in table.depths
        for kind in KINDS
        for placement in table.all
        if (one := table.of(placement, depth, kind)) and (kind == KINDS[0] or not one.is_base)
    ]


def _network(table: RunTable, placement: str, depth: int, kind: str) -> tuple[str, ...]:
    one = table.of(placement, depth, kind)
    assert one is not None
    lost = [_shown(one.lost(octaves), sign="+") for octaves in (1, 2, 3)]
    name = f"{placement} × {depth} {'both' if one.is_base else kind}"
    best = f"2^{one.best_at}{' !' if unbracketed(one) else ''}"
    reach = f"{one.reach.mean():.1f}{'+' if one.reaches_edge else ''}"
    return (name, best, _shown(one.best), *lost, reach, *_sizes(one))


def _sizes(one: NetworkRuns) -> list[str]:
    if not one.steps:
        return ["–"] * 4
    found = [np.sqrt(one.variance("first")), np.sqrt(one.variance("last"))]
    found += [one.slope("first"), one.slope("last")]
    return [f"{float(value.mean()):.3g}" for value in found]


def _pairs(runs: RunTable) -> str:
    rows = []
    for placement, depth, kind in _names(runs):
        one, pre = runs.of(placement, depth, kind), runs.of("pre", depth, kind)
        if one is not None and pre is not None and placement != "pre":
            name = f"{placement} − pre × {depth} {'both' if one.is_base else kind}"
            found = judged(name, (one, pre), partial(less, one.best, pre.best), unbracketed)
            rows.append((name, str(Paired(found.values)), f"({found.doubt})" if found.doubt else ""))
    if not rows:
        return ""
    heading = "Losses at the best learning rates, paired by seed, with 95 % intervals:"
    return f"{heading}\n{table(('pair', 'difference', 'doubt'), rows)}"


def _shown(values: Array, sign: str = "") -> str:
    mean = float(values.mean())
    if math.isnan(mean):
        return "–"
    return f"{mean:{sign}.3f}" if math.isfinite(mean) else "∞"
