"""Lines of figures, from arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from theodolite.present.svg import SvgLine
from theodolite_studies.framework.claims import Array


def line(xs: Iterable[float], ys: Iterable[float], colour: str, *, dashed: bool = False) -> SvgLine:
    """A line through points."""
    return SvgLine([(float(x), float(y)) for x, y in zip(xs, ys, strict=True)], colour, dashed)


def dots(xs: Iterable[float], ys: Iterable[float], colour: str) -> SvgLine:
    """Points that are not joined."""
    return SvgLine([(float(x), float(y)) for x, y in zip(xs, ys, strict=True)], colour, joined=False)


def band(xs: Iterable[float], values: Array, colour: str, *, dashed: bool = False) -> SvgLine:
    """The mean over seeds of values (seeds, points), and a band from the least to the largest of them."""
    points = [(float(x), float(y)) for x, y in zip(xs, values.mean(0), strict=True)]
    return SvgLine(points, colour, dashed, values.min(0).tolist(), values.max(0).tolist())


def log10(values: Iterable[float]) -> Array:
    """Decimal logarithms; nan, which is not drawn, of what has none."""
    found = np.array(list(values), dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(found > 0, np.log10(found), np.nan)
