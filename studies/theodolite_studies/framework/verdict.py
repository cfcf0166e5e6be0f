"""A claim of the paper, what it would take to hold, and what was seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Verdict = Literal["holds", "fails", "unclear"]
MARGIN = 2.0
"""Standard errors over the seeds that a value has to keep away from its threshold for a verdict."""


@dataclass(frozen=True)
class Claim:
    """One row of the table. The threshold was written down before anything was run."""

    claim: str
    paper: str
    threshold: str
    here: str
    verdict: Verdict
    others: str = ""
    """The cases in which it does not hold, if there are several."""


@dataclass(frozen=True)
class Case:
    """A number that decides a claim for one network, once for each seed."""

    where: str
    values: NDArray[np.float64]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return float(np.mean(self.values))

    @property
    def error(self) -> float:
        """The standard error of that; nan of one seed."""
        if len(self.values) < 2 or not np.isfinite(self.values).all():
            return math.nan
        return float(np.std(self.values, ddof=1) / math.sqrt(len(self.values)))

    def verdict(self, limit: float, *, below: bool, level: float | None = None, cases: int = 1) -> Verdict:
        """Is the mean on the right side of the limit, farther from it than the seeds' spread explains?

        Farther is `MARGIN` standard errors or, with a level, as many as Student's t asks for, to one side. A
        claim of several cases fails where one does, so that one has to at level/cases; it holds where all do,
        and each of them may be said to at the level.

        >>> case = Case("here", np.array([0.8, 0.9, 1.0]))
        >>> [case.verdict(limit, below=True) for limit in (1.1, 0.95, 0.5)]
        ['holds', 'unclear', 'fails']
        >>> [case.verdict(limit, below=True, level=0.05) for limit in (1.1, 1.05, 0.75, 0.5)]
        ['holds', 'unclear', 'unclear', 'fails']
        >>> case.verdict(0.5, below=True, level=0.05, cases=12)
        'unclear'
        """
        gap = (limit - self.mean) if below else (self.mean - limit)
        if math.isinf(gap):  # never reached
            return "holds" if gap > 0 else "fails"
        margin = MARGIN
        if level is not None:
            margin = float(stats.t.isf(level if gap >= 0 else level / cases, len(self.values) - 1))
        if math.isnan(gap) or not abs(gap) >= margin * self.error:
            return "unclear"
        return "holds" if gap >= 0 else "fails"


def settled(
    claim: str,
    paper: str,
    threshold: str,
    cases: Sequence[Case],
    *,
    limit: float,
    below: bool,
    unit: str = "",
    level: float | None = None,
) -> Claim:
    """The claim over all its cases: it holds if it does in each of them, and fails if it does in one.

    With a level either is said wrongly with at most that probability, by Student's t.

    What is shown is a case that decided it, the one nearest to failing; one that is not a number goes first.

    >>> settled("flat", "flat", "≤ 1.1", [Case("net", np.array([1.0, 1.02]))], limit=1.1, below=True)
    Claim(claim='flat', paper='flat', threshold='≤ 1.1', here='1.01 ± 0.01 (net)', verdict='holds', others='')
    """
    verdicts = [case.verdict(limit, below=below, level=level, cases=len(cases)) for case in cases]
    overall: Verdict = "fails" if "fails" in verdicts else "unclear" if "unclear" in verdicts else "holds"
    deciding = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict == overall]
    worst = max(deciding, key=lambda case: _badness(case, below=below))
    many = f", {verdicts.count('holds')} of {len(cases)} hold" if len(cases) > 1 else ""
    here = f"{_shown(worst.mean)}{unit} ± {_shown(worst.error)} ({worst.where}{many})"
    others = [
        f"{case.where} {_shown(case.mean)}{unit} ± {_shown(case.error)} {verdict}"
        for case, verdict in zip(cases, verdicts, strict=True)
        if verdict != "holds" and len(cases) > 1
    ]
    return Claim(claim, paper, threshold, here, overall, "; ".join(others))


def table(found: Sequence[Claim]) -> str:
    """claim | paper | threshold | here | verdict."""
    cells = [("claim", "paper", "threshold", "here", "")]
    cells += [(each.claim, each.paper, each.threshold, each.here, each.verdict) for each in found]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in cells
    )


def exceptions(found: Sequence[Claim]) -> str:
    """A line for each claim that does not hold everywhere: where not."""
    lines = [f"{each.claim}: {each.others}" for each in found if each.others]
    return "\n".join(["Where a claim does not hold:", *lines]) if lines else ""


def tally(found: Sequence[Claim]) -> str:
    """How many hold.

    >>> tally([Claim("", "", "", "", "holds"), Claim("", "", "", "", "unclear")])
    '1 of 2 claims holds, none fails, 1 is unclear.'
    """
    counts = {verdict: sum(each.verdict == verdict for each in found) for verdict in ("holds", "fails")}
    unclear = len(found) - sum(counts.values())
    fails = f"{counts['fails'] or 'none'} {'fail' if counts['fails'] > 1 else 'fails'}"
    doubtful = f"{unclear or 'none'} {'are' if unclear > 1 else 'is'} unclear"
    holds = "hold" if counts["holds"] != 1 else "holds"
    return f"{counts['holds']} of {len(found)} claims {holds}, {fails}, {doubtful}."


def _badness(case: Case, *, below: bool) -> float:
    if math.isnan(case.mean):  # which no comparison would find
        return math.inf
    return case.mean if below else -case.mean


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return "?" if math.isnan(value) else "∞" if value > 0 else "-∞"
    return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.0e}"
