"""The sizes of a sweep: lines through the base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from theodolite.core.errors import UseError
from theodolite.core.size import Size


def sizes_of(
    *,
    sizes: Iterable[Size] | None,
    widths: Sequence[int],
    depths: Sequence[int],
    product: bool,
    base: Size | None,
    own: Size,
) -> tuple[tuple[Size, ...], Size]:
    """All sizes, the base among them, and the base.

    Without a base it is the least width and depth that are given, or the workload's own. Widths come at the
    depth of the base and depths at its width, unless all their combinations are asked for.

    >>> found, base = sizes_of(sizes=None, widths=[128, 256], depths=[4, 8], product=False, base=None,
    ...                        own=Size(64, 2))
    >>> [str(size) for size in found], str(base)
    (['128 × 4', '128 × 8', '256 × 4'], '128 × 4')
    """
    if sizes is not None:
        if widths or depths:
            raise UseError("sizes and widths or depths are both given: give sizes, or widths and depths")
        listed = list(sizes)
        if not listed:
            raise UseError("sizes is empty: give at least one Size, or leave it out")
        for size in listed:
            if not isinstance(size, Size):
                raise UseError(f"{size!r} is no size: give a Size, for example Size(256, 4)")
        chosen = base or min(listed)
        return tuple(sorted({*listed, chosen})), chosen
    chosen = base or Size(min(widths, default=own.width), min(depths, default=own.depth))
    if product:
        found = {
            Size(width, depth) for width in widths or [chosen.width] for depth in depths or [chosen.depth]
        }
    else:
        found = {Size(width, chosen.depth) for width in widths}
        found |= {Size(chosen.width, depth) for depth in depths}
    return tuple(sorted({*found, chosen})), chosen
