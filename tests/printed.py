"""Does a program print what a document says? Words exactly, numbers as closely as CPUs agree on them.

Another CPU sums in another order, so that the last digits of a trained loss, a fit or a bootstrap differ:

- words, signs, lines and blank lines have to be equal. Columns may be wider or narrower, and text that is
  wrapped at the edge of the terminal may be wrapped elsewhere;
- a count has to be equal: a number without a point or an exponent, unless the words around it say that it is
  a ratio, a limit, an estimate or how long an iteration took (`×404`, `48 times lower`, `from 35 on`,
  `about 5385`, `after 435 products`);
- any other number may differ by 2 %; by one in its last digit if it has two digits or more. One of a single
  digit, as 0.1, is more often chosen than measured;
- in `1.2 (1.1 to 1.4)` and `1.2 ± 0.1` the ends may differ by a fifth of the interval's width, but not by
  more than a fifth of themselves unless zero is between them; the number before them by a tenth of the width;
  all of them by one in the last digit;
- what rounding leaves of zero, as in `outputs differ by 6.7e-07`, may be ten times larger or smaller, or 0.

In what is said `...` stands for anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOLERANCE = 0.02
COLUMNS = 100

_NUMBER = r"(?<![\w.])[+\-−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?(?!\w|\.\d)"
_TOKEN = re.compile(rf"\.\.\.|(?P<number>{_NUMBER})|.", re.S)
_MEASURED = re.compile(
    rf"(?<!\S)×(?P<factor>{_NUMBER})|from (?P<limit>{_NUMBER}) on\b|about (?P<estimate>{_NUMBER})"
    rf"|after (?P<work>{_NUMBER}) products"
    rf"|(?P<ratio>{_NUMBER}) times (?:as|too|that|its|lower|higher|larger|smaller)\b"
)
_ROUNDING = re.compile(rf"(?:(?:differ|gradients) by|exact to) (?P<left>{_NUMBER})")
_INTERVAL = re.compile(rf"(?:(?P<middle>{_NUMBER}) \()?(?P<low>{_NUMBER}) to (?P<high>{_NUMBER})")
_SPREAD = re.compile(rf"(?P<middle>{_NUMBER}) ± (?P<spread>{_NUMBER})")


@dataclass(frozen=True)
class Token:
    """A number, with how far another may be from it, or one character of anything else."""

    text: str
    value: float | None = None
    tolerance: float = 0.0
    rounding: bool = False

    def allows(self, other: Token) -> bool:
        if self.value is None or other.value is None:
            return self.text == other.text
        low, high = sorted((abs(self.value), abs(other.value)))
        if self.rounding and high < 1e-4 and (low == 0 or high <= 10 * low):
            return True
        return abs(self.value - other.value) <= self.tolerance


def difference(said: str, printed: str, tolerance: float = TOLERANCE) -> str | None:
    """Where the two differ first, or None if they agree."""
    expected, found = list(_tokens(said, tolerance)), list(_tokens(printed, tolerance))
    pieces = _split(expected)
    at = 0
    for index, piece in enumerate(pieces):
        end = len(found) - len(piece)
        starts = range(at, end + 1)
        if index == 0:
            starts = range(0, 1)
        elif index == len(pieces) - 1:
            starts = range(max(at, end), max(at, end) + 1)
        agreed = {start: _agreed(piece, found[start:]) for start in starts or (at,)}
        at, length = max(agreed.items(), key=lambda item: (item[1], -item[0]))
        if length < len(piece):
            return _shown(piece, length, found, at + length)
        at += length
    return None if at == len(found) else _shown(pieces[-1], len(pieces[-1]), found, at)


def _agreed(piece: Sequence[Token], found: Sequence[Token]) -> int:
    """How many tokens agree before the first two that do not."""
    for index, (one, other) in enumerate(zip(piece, found, strict=False)):
        if not one.allows(other):
            return index
    return min(len(piece), len(found))


def _split(tokens: Sequence[Token]) -> list[list[Token]]:
    """What stands between `...`."""
    pieces: list[list[Token]] = [[]]
    for token in tokens:
        if token.text == "...":
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def _shown(piece: Sequence[Token], length: int, found: Sequence[Token], at: int) -> str:
    before = "".join(token.text for token in piece[max(0, length - 40) : length])
    said, printed = (
        "".join(token.text for token in rest[:40]) or "nothing" for rest in (piece[length:], found[at:])
    )
    return f"after {before!r} it says {said!r} and prints {printed!r}"


def _tokens(text: str, tolerance: float) -> Iterator[Token]:
    text = _laid_out(text)
    around = _tolerances_of_intervals(text)
    surely = {match.start(match.lastgroup or 0) for match in _MEASURED.finditer(text)} | around.keys()
    rounding = {match.start("left") for match in _ROUNDING.finditer(text)}
    for match in _TOKEN.finditer(text):
        if match["number"] is None:
            yield Token(match[0])
            continue
        measured = match.start() in surely
        value, unit = _value(match[0]), _unit(match[0]) or float(measured)
        last_digit = 1.0001 * unit if measured or abs(value) > 9.5 * unit else 0.0
        usual = max(tolerance * abs(value), last_digit) if unit else 0.0
        allowed = max(usual, around.get(match.start(), 0.0))
        yield Token(match[0], value, allowed, match.start() in rounding)


def _laid_out(text: str) -> str:
    """With one blank between columns, and in the place of a line break where the line was full."""
    text = re.sub(r"([─━═-])\1{2,}", r"\1\1\1", text)
    lines = text.strip("\n").split("\n")
    laid = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        words = following.split()
        wrapped = words and len(line.rstrip()) + 1 + len(words[0]) > COLUMNS
        laid += " ".join(line.split()) + (" " if wrapped else "\n")
    return laid


def _tolerances_of_intervals(text: str) -> dict[int, float]:
    """By where they start: the ends of intervals, and the numbers in them."""
    allowed = {}
    for match in _INTERVAL.finditer(text):
        low, high = _value(match["low"]), _value(match["high"])
        width = abs(high - low)
        if match["middle"] is None and not any(map(_unit, (match["low"], match["high"]))):
            continue
        for name, end in (("low", low), ("high", high)):
            allowed[match.start(name)] = width / 5 if low * high < 0 else min(width, abs(end)) / 5
        allowed[match.start("middle")] = width / 10
    for match in _SPREAD.finditer(text):
        spread = _value(match["spread"])
        allowed[match.start("spread")] = allowed[match.start("middle")] = spread / 5
    return allowed


def _value(number: str) -> float:
    return float(number.replace("−", "-").replace(",", ""))


def _unit(number: str) -> float:
    """One in the last digit of a number with a point or an exponent; of a count, nothing."""
    mantissa, _, exponent = number.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals or exponent else 0.0
