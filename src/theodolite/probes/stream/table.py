"""A Stream as a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from theodolite.probes.stream.headroom import Largest
    from theodolite.probes.stream.stream import Stream

COLUMNS = ("stream", "branch", "f/h", "cosine", "∂L/∂h", "∂L/∂f", "max/med", "−branch", "−block")


def table(stream: Stream) -> str:
    """A row for each branch, then what they say together."""
    lines = [f"loss {stream.loss:.4f}", "", "block  " + "".join(f"{name:>10}" for name in COLUMNS)]
    lines.append(_row("start", stream.start, *[math.nan] * 3, stream.start_gradient))
    for index, one in enumerate(stream.reaches):
        last = index + 1 == len(stream.reaches) or stream.reaches[index + 1].block != one.block
        lines.append(
            _row(
                f"{one.block}.{one.branch}",
                one.stream,
                one.added,
                one.share,
                one.cosine,
                one.stream_gradient,
                one.branch_gradient,
                one.peak,
                one.skipped,
                stream.blocks[one.block] if last else None,
            )
        )
    return "\n".join([*lines, "", *_said(stream)])


def _said(stream: Stream) -> list[str]:
    said = [
        f"stream    {stream.growth}",
        f"gradient  {stream.backward}, from the last block to the first",
        f"float16   {_room(stream.largest)}",
    ]
    shares = [(reach.share, reach) for reach in stream.reaches if reach.share > 0]
    if shares:
        least, reach = min(shares, key=lambda pair: pair[0])
        said.append(
            f"bfloat16  keeps 8 bits: of all branches block {reach.block}, branch {reach.branch} adds least, "
            f"2^{math.log2(least):.1f} of the stream"
        )
    said += [
        f"massive   block {reach.block}, branch {reach.branch}: {reach.largest:.4g} at {reach.peak_at}, "
        f"{reach.peak:.0f} times the median"
        for reach in stream.massive[:1]
    ]
    return said + [f"note      {note}" for note in stream.notes]


def _room(largest: Largest) -> str:
    made = f"made by {largest.op}, {largest.where}"
    if math.isnan(largest.value):
        return "not known: all values are taken for statistics"
    if math.isinf(largest.value):
        return f"no headroom: there are values that are no finite numbers, first {made}"
    return f"{largest.headroom:.1f} doublings of headroom: {largest.value:.4g} is the largest value, {made}"


def _row(name: str, *cells: float | None) -> str:
    shown = (f"{_cell(cell):>10}" for cell in (*cells, *[None] * (len(COLUMNS) - len(cells))))
    return f"{name:<7}{''.join(shown)}".rstrip()


def _cell(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}"
