"""What a survey has to say: one Finding per thing looked at."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from theodolite.present.figure import Figure

Level = Literal["ok", "error", "note", "warn", "fail"]
Value = str | int | float | bool | None

LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True)
class Evidence:
    """What a Finding rests on: named numbers, a table, figures."""

    numbers: Mapping[str, Value] = field(default_factory=dict)
    rows: tuple[Mapping[str, Value], ...] = ()
    """A table: each row maps the same column titles to values."""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One thing looked at, and what was seen.

    >>> finding = Finding("TH104", "warn", "Depth in the initialisation",
    ...     "attn.proj starts at a std that falls as depth to the −0.50.",
    ...     why="A plan that knows about depth divides by it again.",
    ...     remedy="Give it the std of its neighbours.",
    ...     evidence=Evidence({"slope": -0.5}))
    >>> finding.page
    'docs/findings/TH104.md'
    >>> finding.to_dict()["evidence"]["numbers"]
    {'slope': -0.5}
    """

    code: str
    """`TH` and three digits; each has a page in the documentation."""
    level: Level
    """`ok`, `note` (worth knowing), `warn` (mend before scaling), `fail` (cannot be scaled like this);
    `error`, if the check itself went wrong, which says nothing of the network."""
    title: str
    sentence: str
    """What was seen, with its numbers."""
    why: str
    """Why it matters when the network grows."""
    remedy: str = ""
    """What to do; empty where there is nothing to do."""
    evidence: Evidence = Evidence()
    section: str = ""
    """The section that found it; the survey fills this in."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"TH\d{3}", self.code):
            raise ValueError(f"a finding's code is TH and three digits, not {self.code!r}")
        if self.level not in LEVELS:
            raise ValueError(
                f"{self.code}: a finding's level is one of {', '.join(LEVELS)}, not {self.level!r}"
            )

    @property
    def page(self) -> str:
        """Where the documentation explains this code."""
        return f"docs/findings/{self.code}.md"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values that JSON knows; a number that is not finite becomes its name."""
        return {
            "code": self.code,
            "level": self.level,
            "title": self.title,
            "sentence": self.sentence,
            "why": self.why,
            "remedy": self.remedy,
            "section": self.section,
            "page": self.page,
            "evidence": {
                "numbers": _finite(self.evidence.numbers),
                "rows": [_finite(row) for row in self.evidence.rows],
                "figures": [figure.to_dict() for figure in self.evidence.figures],
            },
        }


def _finite(values: Mapping[str, Value]) -> dict[str, Value]:
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
