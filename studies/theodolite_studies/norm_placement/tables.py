"""Below the claims of the norm-placement study: a row for each network, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from theodolite_studies.framework.paired import Paired, less
from theodolite_studies.framework.records import Record
from theodolite_studies.norm_placement.cases import judged, unbracketed
from theodolite_studies.norm_placement.values import KINDS, Array, Table, Values


def notes(records: Sequence[Record]) -> str:
    """A row for each network, and placements against one another seed by seed."""
    table = Table(records)
    return "\n\n".join(each for each in (_networks(table), _pairs(table)) if each)


def _networks(table: Table) -> str:
    cells: list[tuple[str, ...]] = [
        ("network", "best lr", "loss", "at 2×", "4×", "8×", "reach", "stream", "end", "gradient", "end")
    ]
    cells += [_network(table, *names) for names in _names(table)]
    heading = (
        "Held-out loss at the best learning rate and how much is lost above it; learning rates that end\n"
        "within 0.1 of the best of all placements, + if an edge of what was tried is among them; size of\n"
        "the stream after the last block, and gradient of the first block over the last's, before and\n"
        "after training. ! is a best at an edge, or of a network that ends alike at all learning rates:"
    )
    return f"{heading}\n{_aligned(cells)}"


def _names(table: Table) -> list[tuple[str, int, str]]:
    """Placement, depth and parameterization of every network; at base size there is one of the latter."""
    return [
        (placement, depth, kind)
        for depth in table.depths
        for kind in KINDS
        for placement in table.all
        if (one := table.of(placement, depth, kind)) and (kind == KINDS[0] or not one.is_base)
    ]


def _network(table: Table, placement: str, depth: int, kind: str) -> tuple[str, ...]:
    one = table.of(placement, depth, kind)
    assert one is not None
    lost = [_shown(one.lost(octaves), sign="+") for octaves in (1, 2, 3)]
    name = f"{placement} × {depth} {'both' if one.is_base else kind}"
    best = f"2^{one.best_at}{' !' if unbracketed(one) else ''}"
    reach = f"{one.reach.mean():.1f}{'+' if one.reaches_edge else ''}"
    return (name, best, _shown(one.best), *lost, reach, *_sizes(one))


def _sizes(one: Values) -> list[str]:
    if not one.steps:
        return ["–"] * 4
    found = [np.sqrt(one.variance("first")), np.sqrt(one.variance("last"))]
    found += [one.slope("first"), one.slope("last")]
    return [f"{float(value.mean()):.3g}" for value in found]


def _pairs(table: Table) -> str:
    lines = []
    for placement, depth, kind in _names(table):
        one, pre = table.of(placement, depth, kind), table.of("pre", depth, kind)
        if one is not None and pre is not None and placement != "pre":
            name = f"{placement} − pre × {depth} {'both' if one.is_base else kind}"
            found = judged(name, (one, pre), partial(_difference, one, pre), unbracketed)
            lines.append((name, str(Paired(found.values)), f"({found.doubt})" if found.doubt else ""))
    return (
        f"Losses at the best learning rates, paired by seed, with 95 % intervals:\n{_aligned(lines)}"
        if lines
        else ""
    )


def _difference(one: Values, other: Values) -> Array:
    return less(one.best, other.best)


def _shown(values: Array, sign: str = "") -> str:
    mean = float(values.mean())
    if math.isnan(mean):
        return "–"
    return f"{mean:{sign}.3f}" if math.isfinite(mean) else "∞"


def _aligned(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
