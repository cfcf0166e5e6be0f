"""Text: one number format, one table, and numbers of things in sentences."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal


def number(value: float, digits: int = 3) -> str:
    """A number in so many significant digits; a whole one below 10⁵ in full.

    >>> [number(value) for value in (2**-8, 512.0, 1e-8, 4096, 1.25e6, float("nan"))]
    ['0.00391', '512', '1e-08', '4096', '1.25e+06', '–']
    """
    if math.isnan(value):
        return "–"
    if math.isfinite(value) and abs(value) < 1e5 and float(value).is_integer():
        return str(int(value))
    return f"{value:.{digits}g}"


def as_html(text: str) -> str:
    """Text as HTML; what stands between backticks is set as code, powers and indices above and below.

    >>> as_html("Multiply `head.weight` by 2 < 3.")
    'Multiply <code>head.weight</code> by 2 &lt; 3.'
    >>> as_html("2^-5.25, A·N^−α, m_B/m_D, `2^-7`")
    '2<sup>−5.25</sup>, A·N<sup>−α</sup>, m<sub>B</sub>/m<sub>D</sub>, <code>2^-7</code>'
    """
    pieces = re.split(r"`([^`]+)`", escape(text))  # text and code in turn
    for at, piece in enumerate(pieces):
        if at % 2:
            pieces[at] = f"<code>{piece}</code>"
            continue
        raised = _POWER.sub(lambda found: f"<sup>{found[1].replace('-', '−')}</sup>", piece)
        pieces[at] = _INDEX.sub(r"<sub>\1</sub>", raised)
    return "".join(pieces)


_POWER = re.compile(r"(?<=[\w)])\^([-−]?(?:\d+(?:\.\d+)?|[A-Za-zα-ω]\b))")
_INDEX = re.compile(r"(?<=\bm)_([BD])\b")


def signed(value: float, digits: int = 2) -> str:
    """A number with a true minus sign, and no sign on zero.

    >>> signed(-0.5), signed(0.75), signed(-0.001)
    ('−0.50', '0.75', '0.00')
    """
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def counted(count: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "check"), counted(3, "check"), counted(2, "matrix"), counted(2, "bias")
    ('1 check', '3 checks', '2 matrices', '2 biases')
    """
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """More than one of it."""
    if noun.endswith("matrix"):
        return f"{noun[:-1]}ces"
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def listed(names: Sequence[str]) -> str:
    """Names in a row; of more than three, the first two.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a", "b", "c", "d"])
    ('a', 'a, b and c', 'a, b and 2 more')
    """
    if len(names) > 3:
        return f"{', '.join(names[:2])} and {len(names) - 2} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def duration(seconds: float) -> str:
    """A time in the units one would say it in.

    >>> [duration(seconds) for seconds in (0.42, 59.6, 754, 7261, 200_000)]
    ['0.4 s', '1 min', '13 min', '2 h 1 min', '2 d 7 h']
    """
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    days, left = divmod(hours, 24)
    if not days:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{days} d {left} h" if left else f"{days} d"


def terminal_width(least: int = 40, most: int = 140) -> int:
    """Columns of the terminal, within bounds; 100 where there is none."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, least), most)


def wrapped(text: str, width: int | None = None, *, indent: str = "") -> str:
    """A paragraph, its second and later lines indented."""
    return textwrap.fill(text, width or terminal_width(), subsequent_indent=indent)


def cell(value: Any) -> str:
    """A value in a table: nothing for None and for what is not a number."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return number(value, 4) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: its head.
        show: how a value becomes text.
        side: where the text stands; by default text is flush left and numbers are flush right.
    """

    name: str
    show: Callable[[Any], str] = cell
    side: Literal["left", "right"] | None = None


class Table:
    """Rows of values under the names of their columns: as text, as HTML, as CSV.

    Cells are values, not texts, so that a CSV file keeps their digits. A column without any value is left out
    of the text and of the HTML. Text that is wider than the terminal is wrapped in its widest columns of
    words.

    >>> print(Table(("tensor", "lr"), [("embed", 0.01), ("head", 0.00015625)]))
    tensor         lr
    ─────────────────
    embed        0.01
    head    0.0001563
    """

    def __init__(self, columns: Sequence[str | Column], rows: Sequence[Sequence[Any]]) -> None:
        self.columns = [Column(one) if isinstance(one, str) else one for one in columns]
        self.rows = [tuple(row) for row in rows]
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} values under {len(self.columns)} columns: {row}")

    def text(self, width: int | None = None) -> str:
        """As lines of text: heads, a rule, rows."""
        shown = self._shown()
        if not shown:
            return ""
        widths = [max(len(text) for text in (one.name, *one.texts)) for one in shown]
        excess = sum(widths) + 2 * (len(widths) - 1) - (width or terminal_width())
        while excess > 0:
            # The widest column of words gives way, down to its head or eight characters.
            free = [at for at, one in enumerate(shown) if one.words and widths[at] > max(len(one.name), 8)]
            if not free:
                break
            widths[max(free, key=lambda at: widths[at])] -= 1
            excess -= 1

        def lines(cells: Sequence[str]) -> Iterator[str]:
            broken = [_broken(text, wide) for text, wide in zip(cells, widths, strict=True)]
            for row in itertools.zip_longest(*broken, fillvalue=""):
                placed = zip(row, widths, shown, strict=True)
                yield "  ".join(
                    text.ljust(wide) if one.left else text.rjust(wide) for text, wide, one in placed
                ).rstrip()

        rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
        rows = zip(*(one.texts for one in shown), strict=True)
        return "\n".join(
            [*lines([one.name for one in shown]), rule, *(line for row in rows for line in lines(row))]
        )

    def html(self) -> str:
        """As an HTML table."""
        shown = self._shown()
        kinds = ["" if one.left else ' class="number"' for one in shown]
        heads = "".join(
            f'<th scope="col"{kind}>{escape(one.name)}</th>' for one, kind in zip(shown, kinds, strict=True)
        )
        rows = "".join(
            "<tr>"
            + "".join(
                f'<td data-label="{escape(one.name)}"{kind}>{as_html(text)}</td>'
                for one, text, kind in zip(shown, row, kinds, strict=True)
            )
            + "</tr>"
            for row in zip(*(one.texts for one in shown), strict=True)
        )
        return f'<table class="anatomy"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'

    def csv(self) -> str:
        """As CSV: values in full."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(column.name for column in self.columns)
        writer.writerows(self.rows)
        return out.getvalue()

    def __str__(self) -> str:
        return self.text()

    def _shown(self) -> list[_Shown]:
        """The columns with something in them."""
        found = []
        for place, column in enumerate(self.columns):
            values = [row[place] for row in self.rows]
            texts = [column.show(value) for value in values]
            if any(texts) or not values:
                words = all(value is None or isinstance(value, str) for value in values)
                left = words if column.side is None else column.side == "left"
                found.append(_Shown(column.name, texts, words, left))
        return found


@dataclass(frozen=True)
class _Shown:
    """A column as it is drawn."""

    name: str
    texts: list[str]
    words: bool
    """May it be wrapped?"""
    left: bool


def _broken(text: str, width: int) -> list[str]:
    """Lines of a cell; names without spaces break after dots or anywhere."""
    if len(text) <= width:
        return [text]
    if " " in text:
        return textwrap.wrap(text, width)
    lines = []
    while len(text) > width:
        at = text.rfind(".", 0, width) + 1 or width
        lines.append(text[:at])
        text = text[at:]
    return [*lines, text]
