"""Parse the values of an axis: `2^-12:2^-5`, `0,0.1`, and for a search `0.01:1:log`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from theodolite.core.arguments import is_number, parse_number
from theodolite.core.errors import UseError
from theodolite.core.files import parse_json

MOST_VALUES = 200
"""Of a range; more are taken for a typing error."""


@dataclass(frozen=True)
class Range:
    """An interval for a search to choose from, on a logarithmic or linear scale.

    >>> Range(0.01, 1.0)
    Range(low=0.01, high=1.0, log=True)
    >>> Range(1.0, 0.01)
    Traceback (most recent call last):
    theodolite.UseError: the range goes from 1 to 0.01: write the lower end first
    """

    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        _check_ends(self.low, self.high)
        if self.log and self.low <= 0:
            raise UseError(
                f"the range starts at {self.low:g}, which has no logarithm: start above 0, or say linear"
            )


def parse_axis(text: str) -> list[Any] | Range:
    """The values of an axis, or the range in which to search.

        2^-12:2^-5        a factor of two between neighbours
        2^-12:2^-5:0.5    half an octave between neighbours
        0,0.1,0.3         these
        0.01:1:log        all between, for a search; or 0:0.3:linear
        [0.9,0.95],[0.9,0.99]    lists, as JSON writes them

    >>> parse_axis("2^-9:2^-7:0.5")
    [0.001953125, 0.0027621358640099515, 0.00390625, 0.005524271728019903, 0.0078125]
    >>> parse_axis("0,0.1"), parse_axis("paper,none"), parse_axis("0.01:1:log")
    ([0, 0.1], ['paper', 'none'], Range(low=0.01, high=1.0, log=True))
    """
    found: list[Any] = []
    if "[" in text:
        found = parse_json(f"[{text}]", f"{text!r} is no list as JSON writes it: it")
        return found
    start, _, kind = text.rpartition(":")
    if kind in ("log", "linear"):
        low, colon, high = start.partition(":")
        if not colon:
            raise UseError(f"{text!r} has one end: write LOW:HIGH:{kind}")
        return Range(parse_number(low), parse_number(high), log=kind == "log")
    for item in text.split(","):
        if not item.strip():
            raise UseError(
                f"{text!r} has an empty value: write numbers with a comma between them, or LOW:HIGH"
            )
        found += _octaves(item) if ":" in item else [_value(item.strip())]
    return found


def parse_whole_numbers(text: str) -> list[int]:
    """Widths and depths: `128,256,512`, or `128:1024` for every doubling.

    >>> parse_whole_numbers("2:16")
    [2, 4, 8, 16]
    """
    found = parse_axis(text)
    if isinstance(found, Range):
        raise UseError(f"{text!r} is a range to search in: here write values, or LOW:HIGH for octaves")
    for value in found:
        if not is_number(value) or value != int(value) or value < 1:
            raise UseError(f"{value!r} in {text!r} is no positive whole number")
    return [int(value) for value in found]


def _value(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    if text[0].isalpha() and text.lower() not in ("nan", "inf", "infinity"):
        return text
    return parse_number(text)


def _octaves(text: str) -> list[float]:
    """From LOW to HIGH, a factor of two, or of 2^STEP, between neighbours."""
    low, high, *rest = (parse_number(part) for part in text.split(":"))
    step = rest[0] if rest else 1.0
    if len(rest) > 1 or step <= 0:
        raise UseError(
            f"{text!r} is no range: write LOW:HIGH, or LOW:HIGH:STEP with a step in octaves, above 0"
        )
    _check_ends(low, high, text.partition(":")[0])
    if low <= 0:
        raise UseError(
            f"{text!r} starts at {low:g}, but a range goes in octaves: start above 0, or list values"
        )
    num = math.floor(math.log2(high / low) / step + 1e-9) + 1
    if num > MOST_VALUES:
        raise UseError(f"{text!r} has {num} values: take a longer step than {step:g} octaves")
    return [low * 2.0 ** (step * index) for index in range(num)]


def _check_ends(low: float, high: float, lower: str | None = None) -> None:
    """Refuse ends in the wrong order; `lower` is the lower one as it was written."""
    if low == high:
        alone = f"{low:g}" if lower is None else lower
        raise UseError(f"the range goes from {low:g} to {high:g}: for one value, write {alone} alone")
    if not low < high:
        raise UseError(f"the range goes from {low:g} to {high:g}: write the lower end first")
