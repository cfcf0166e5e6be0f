"""A colour for each size, from small to large, that can be read on white and on black."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from theodolite.core.size import Size

FIRST_HUE, LAST_HUE = 0.58, 1.07
"""From blue through violet and red to orange."""
LUMINANCE = 0.2
"""Of every colour: a contrast of at least 4 with white and with black."""


def colours(sizes: Sequence[Size]) -> dict[Size, str]:
    """Colours that are as bright as each other, by size.

    >>> colours([Size(64, 4), Size(128, 4)])
    {Size(width=64, depth=4): '#2a7fcd', Size(width=128, depth=4): '#bb6526'}
    """
    steps = max(len(sizes) - 1, 1)
    return {
        size: _colour(FIRST_HUE + (LAST_HUE - FIRST_HUE) * index / steps) for index, size in enumerate(sizes)
    }


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, from 0 for black to 1 for white, as WCAG defines it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _colour(hue: float) -> str:
    low, high = 0.0, 1.0
    for _ in range(20):  # lightness by bisection: luminance rises with it
        middle = (low + high) / 2
        if luminance(_hex(hue, middle)) < LUMINANCE:
            low = middle
        else:
            high = middle
    return _hex(hue, high)


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue % 1, lightness, 0.66))
