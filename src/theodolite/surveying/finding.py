"""Findings: what a survey says about one thing it checked. Each comes from a `Check`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

from theodolite.core.files import plain, read_dataclass
from theodolite.present.figure import Figure
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Column, Table, plural

Level = Literal["ok", "error", "note", "warn", "fail"]
Value = str | int | float | bool | None

LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True)
class Evidence:
    """What a finding rests on: named numbers, a table, figures."""

    numbers: Mapping[str, Value] = field(default_factory=dict)
    rows: tuple[Mapping[str, Value], ...] = ()
    """A table: each row maps the same column titles to values."""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Finding(Result):
    """The outcome of one check.

    >>> finding = Finding("TH104", "warn", "Depth in the initialisation",
    ...     "The initial std of attn.proj falls with depth, with exponent −0.50.",
    ...     why="A plan that scales with depth divides by it again.",
    ...     remedy="Use the same std as for the other matrices.",
    ...     evidence=Evidence({"slope": -0.5}))
    >>> finding.documentation
    'docs/findings/TH104.md'
    >>> finding.to_dict()["evidence"]["numbers"]
    {'slope': -0.5}
    """

    kind: ClassVar[str] = "finding"
    loads: ClassVar[bool] = True

    code: str
    """`TH` and three digits. Each code has a page in the documentation."""
    level: Level
    """`ok`, `note` (worth knowing), `warn` (fix before scaling), `fail` (cannot be scaled like this).
    `error` means that the check itself failed, which says nothing about the network."""
    title: str = ""
    sentence: str = ""
    """What was found, with its numbers."""
    why: str = ""
    """Why it matters when the network grows."""
    remedy: str = ""
    """What to do. Empty if there is nothing to do."""
    evidence: Evidence = Evidence()
    section: str = ""
    """The section that found it. The survey fills this in."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"TH\d{3}", self.code):
            raise ValueError(f"a finding's code is TH and three digits, not {self.code!r}")
        if self.level not in LEVELS:
            raise ValueError(
                f"{self.code}: a finding's level is one of {', '.join(LEVELS)}, not {self.level!r}"
            )

    @property
    def documentation(self) -> str:
        """The documentation page of this code."""
        return f"docs/findings/{self.code}.md"

    def blocks(self) -> Iterator[Block]:
        """What was found, what to do, why it matters, and the evidence."""
        yield Heading(f"{self.title} ({self.code}, {self.level})")
        yield self.sentence
        if self.remedy:
            yield f"→ {self.remedy}"
        yield self.why
        if (rows := self.table()) is not None:
            yield rows
        if self.evidence.numbers:
            yield Table(("quantity", Column("value", side="left")), list(self.evidence.numbers.items()))
        yield from self.evidence.figures

    def table(self) -> Table | None:
        """The rows of the evidence."""
        rows = self.evidence.rows
        return Table(list(rows[0]), [tuple(row.values()) for row in rows]) if rows else None

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values. A number that is not finite becomes its name."""
        evidence = self.evidence
        return plain(self) | {
            "documentation": self.documentation,
            "evidence": {
                "numbers": _finite(evidence.numbers),
                "rows": [_finite(row) for row in evidence.rows],
                "figures": plain(evidence.figures),
            },
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The finding from what `to_dict` gave."""
        if isinstance(content, dict):
            content = {key: value for key, value in content.items() if key != "documentation"}
        found: Self = read_dataclass(cls, content, "the finding")
        return found


@dataclass(frozen=True)
class Check:
    """One thing that a section checks. Its findings share a code, a title and a reason.

    >>> heads = Check("TH106", "Attention heads and width", why="The scale depends on the head size.")
    >>> heads.finding("ok", "The network has no attention.").title
    'Attention heads and width'
    """

    code: str
    title: str
    why: str

    def finding(
        self,
        level: Level,
        sentence: str,
        *,
        title: str = "",
        remedy: str = "",
        numbers: Mapping[str, Value] | None = None,
        rows: Sequence[Mapping[str, Value]] = (),
        figures: Sequence[Figure] = (),
    ) -> Finding:
        """A finding of this check; `title` replaces the usual one. Cells that a row lacks are None."""
        columns = dict.fromkeys(column for row in rows for column in row)
        table = tuple({column: row.get(column) for column in columns} for row in rows)
        evidence = Evidence(numbers or {}, table, tuple(figures))
        return Finding(self.code, level, title or self.title, sentence, self.why, remedy, evidence)


def all_of(count: int, noun: str) -> str:
    """All of them, to begin a sentence.

    >>> all_of(1, "branch"), all_of(2, "branch"), all_of(3, "branch")
    ('The only branch', 'Both branches', 'All 3 branches')
    """
    if count == 1:
        return f"The only {noun}"
    return f"Both {plural(noun)}" if count == 2 else f"All {count:,} {plural(noun)}"


def times(factor: float) -> str:
    """A factor in two digits, a large one in three or more.

    >>> times(3.14159), times(144.2)
    ('3.1', '144')
    """
    return rounded(factor) if factor >= 100 else f"{factor:.2g}"


def rounded(value: float) -> str:
    """A number in three digits, a large one to the unit.

    >>> rounded(0.01234), rounded(41123.4)
    ('0.0123', '41,123')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def with_minus(value: object) -> str:
    """Text with true minus signs.

    >>> with_minus("-0.45 (-0.89 to -0.01)")
    '−0.45 (−0.89 to −0.01)'
    """
    return str(value).replace("-", "−")


def _finite(values: Mapping[str, Value]) -> dict[str, Value]:
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
