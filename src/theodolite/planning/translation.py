"""Shapes as an optimizer sees them, what Muon makes of them, and its learning rate from AdamW's."""

from __future__ import annotations

import math
from collections import Counter

from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.matrices import MatrixLayout
from theodolite.optimizers.muon import SCALES
from theodolite.planning.rows import PlanRow
from theodolite.present.text import number

ADAMW_RMS = 0.2
"""The root mean square of AdamW's update in training, by Liu et al."""

WRITTEN: dict[str, str] = {
    "none": "1",
    "original": "√({out}/{in})",
    "rms": "0.2·√{most}",
    "spectral": "√({out}/{in})",
}
"""The scales of Muon with numbers for their fans."""


def is_matrix(row: PlanRow) -> bool:
    """Does its optimizer see it as matrices?"""
    spec = OPTIMIZERS.get(row.rule)
    return spec is not None and spec.matrices_only


def fans_seen(row: PlanRow) -> list[tuple[int, int]]:
    """(in, out) of each matrix of one member of the stack: several if rows are fused.

    Of a weight that is not trained by a matrix optimizer too.
    """
    return MatrixLayout((row.in_axes, row.out_axes), row.rows).fans(row.shape)


def stack_of(row: PlanRow) -> int:
    """The number of independent matrices (times blocks of rows) that the tensor holds, as of experts."""
    count = 1
    for axis, length in enumerate(row.shape):
        count *= 1 if axis in (*row.in_axes, *row.out_axes) else length
    return count


def shape_seen(row: PlanRow) -> str:
    """The shape as the optimizer sees it.

    Rows of a fused tensor, experts of a stack, kernels as matrices (out × in·positions), and a weight that
    is stored as (in, out) the other way round.
    """
    stored = "×".join(map(str, row.shape)) or "()"
    if not is_matrix(row):
        return stored
    counts = Counter(fans_seen(row))
    count = stack_of(row)
    seen = " + ".join(
        f"{count * times} of {fan_out}×{fan_in}" if count * times > 1 else f"{fan_out}×{fan_in}"
        for (fan_in, fan_out), times in counts.items()
    )
    (fan_in, fan_out), *others = counts
    plain = len(row.shape) == 2 and (fan_out, fan_in) == row.shape and row.out_axes == (0,)
    return (
        seen
        if plain or (row.rows and not others and row.out_axes == (0,) and len(row.shape) == 2)
        else (f"{seen}, stored {stored}")
    )


def scale_of(row: PlanRow) -> str | None:
    """Muon's scale, by name; None for another optimizer."""
    spec = OPTIMIZERS.get(row.rule)
    return spec.fixed.get("scale") if spec else None


def factor(row: PlanRow) -> str | None:
    """What Muon multiplies its update by, for the shape of this tensor."""
    scale = scale_of(row)
    if scale is None:
        return None
    found = []
    for fan_in, fan_out in fans_seen(row):
        value = SCALES[scale](fan_in, fan_out)
        written = WRITTEN[scale].format(**{"in": fan_in, "out": fan_out, "most": max(fan_in, fan_out)})
        found.append("1" if value == 1 else f"{written} = {number(value)}")
    return "; ".join(dict.fromkeys(found))


def muon_rms(row: PlanRow, scale: str) -> float:
    """The root mean square of Muon's update of a tensor: of `s·UVᵀ`, over all of its matrices.

    One of full rank has the norm `√min(in, out)`, so that its entries have `s/√max(in, out)`.
    """
    fans = fans_seen(row)
    squares = sum(SCALES[scale](*one) ** 2 * min(one) for one in fans)
    return math.sqrt(squares / sum(fan_in * fan_out for fan_in, fan_out in fans))


def rate_ratio(row: PlanRow) -> float:
    """Muon's learning rate over that of AdamW which moves the tensor by the same root mean square."""
    scale = scale_of(row)
    return 1.0 if scale is None else ADAMW_RMS / muon_rms(row, scale)
