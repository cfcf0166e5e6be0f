"""Claims as rows of data: what is claimed, what would make it hold, and what was observed.

A study lists its claims. Each has a function that decides it from the study's data; `at_most`, `at_least`,
`lower`, `count_at_most` and `all_within` make such functions from observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from theodolite.present.text import Column, Table
from theodolite_studies.framework.paired import Paired, Verdict
from theodolite_studies.framework.records import Record, select

Array = NDArray[np.float64]
Decision = tuple[str, Verdict, str]
"""What was seen, in words; the verdict; and the cases in which it does not hold, if there are several."""
MARGIN = 2.0
"""Standard errors over the seeds by which a value must differ from its threshold for a verdict."""


@dataclass(frozen=True)
class Claim:
    """One row of the table. Thresholds were written down before anything was run.

    Args:
        statement: what is claimed. `{data.name}` in it, and in the threshold, is an attribute of the data.
        paper: what the paper says.
        threshold: what would make it hold, in words.
        decide: the decision from the study's data; None if there is no data on it.
    """

    statement: str
    paper: str
    threshold: str
    decide: Callable[[Any], Decision | None]


@dataclass(frozen=True)
class Decided:
    """A claim, and what came out."""

    statement: str
    paper: str
    threshold: str
    here: str
    verdict: Verdict
    others: str = ""
    """The cases in which it does not hold, if there are several."""


def decide(claims: Iterable[Claim], data: Any) -> list[Decided]:
    """Decide every claim that there is data on."""
    found = []
    for claim in claims:
        if (decision := claim.decide(data)) is not None:
            statement, threshold = (text.format(data=data) for text in (claim.statement, claim.threshold))
            found.append(Decided(statement, claim.paper, threshold, *decision))
    return found


def report_claims(found: Sequence[Decided]) -> str:
    """The table of claims, how many hold, and where the others do not; empty for no claims."""
    if not found:
        return ""
    rows = [(each.statement, each.paper, each.threshold, each.here, each.verdict) for each in found]
    said = [table(("claim", "paper", "threshold", "here", "verdict"), rows), tally(found)]
    if exceptions := [f"{each.statement}: {each.others}" for each in found if each.others]:
        said.append("\n".join(["Where a claim does not hold:", *exceptions]))
    return "\n\n".join(said)


def table(columns: Sequence[str | Column], rows: Sequence[Sequence[Any]]) -> str:
    """A table with one line for each row, however wide."""
    return Table(columns, rows).text(width=10_000)


def tally(found: Sequence[Decided]) -> str:
    """How many hold.

    >>> tally([Decided("", "", "", "", "holds"), Decided("", "", "", "", "unclear")])
    '1 of 2 claims holds, none fails, 1 is unclear.'
    """
    counts = {verdict: sum(each.verdict == verdict for each in found) for verdict in ("holds", "fails")}
    unclear = len(found) - sum(counts.values())
    fails = f"{counts['fails'] or 'none'} {'fail' if counts['fails'] > 1 else 'fails'}"
    doubtful = f"{unclear or 'none'} {'are' if unclear > 1 else 'is'} unclear"
    holds = "hold" if counts["holds"] != 1 else "holds"
    return f"{counts['holds']} of {len(found)} claims {holds}, {fails}, {doubtful}."


@dataclass(frozen=True)
class Observation:
    """A number that decides a claim in one case, such as one network: a value for each seed."""

    where: str
    values: Array
    doubt: str = ""
    """Why it can decide nothing, whatever its values are."""

    @property
    def title(self) -> str:
        """Where, and why it can decide nothing."""
        return f"{self.where}: {self.doubt}" if self.doubt else self.where

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return float(np.mean(self.values))

    @property
    def error(self) -> float:
        """The standard error of the mean; nan for one seed."""
        if len(self.values) < 2 or not np.isfinite(self.values).all():
            return math.nan
        return float(np.std(self.values, ddof=1) / math.sqrt(len(self.values)))

    def verdict(self, limit: float, *, below: bool, level: float | None = None, cases: int = 1) -> Verdict:
        """Is the mean on the claimed side of the limit, by more than the spread of the seeds explains?

        By more is `MARGIN` standard errors or, with a level, what Student's t requires, one-sided. A claim
        of several cases fails where one fails, so failures are tested at level/cases; it holds where all
        hold, each at the level.

        >>> seen = Observation("here", np.array([0.8, 0.9, 1.0]))
        >>> [seen.verdict(limit, below=True) for limit in (1.1, 0.95, 0.5)]
        ['holds', 'unclear', 'fails']
        >>> [seen.verdict(limit, below=True, level=0.05) for limit in (1.1, 1.05, 0.75, 0.5)]
        ['holds', 'unclear', 'unclear', 'fails']
        >>> seen.verdict(0.5, below=True, level=0.05, cases=12)
        'unclear'
        """
        if self.doubt:
            return "unclear"
        gap = (limit - self.mean) if below else (self.mean - limit)
        if math.isinf(gap):  # never reached
            return "holds" if gap > 0 else "fails"
        margin = MARGIN
        if level is not None:
            margin = float(stats.t.isf(level if gap >= 0 else level / cases, len(self.values) - 1))
        if math.isnan(gap) or not abs(gap) >= margin * self.error:
            return "unclear"
        return "holds" if gap >= 0 else "fails"


Observe = Callable[[Any], Sequence[Observation]]
Decide = Callable[[Any], Decision | None]


def at_most(limit: float, observe: Observe, *, unit: str = "", level: float | None = None) -> Decide:
    """The mean of every observation is at most the limit.

    It holds if it does in each of them, and fails if it fails in one. With a level either is said wrongly
    with at most that probability, by Student's t.

    >>> at_most(1.1, lambda data: [Observation("net", np.array([1.0, 1.02]))])(None)
    ('1.01 ± 0.01 (net)', 'holds', '')
    """
    return partial(_limited, observe, limit, below=True, unit=unit, level=level)


def at_least(limit: float, observe: Observe, *, unit: str = "", level: float | None = None) -> Decide:
    """The mean of every observation is at least the limit; see `at_most`."""
    return partial(_limited, observe, limit, below=False, unit=unit, level=level)


def _limited(
    observe: Observe, limit: float, data: Any, *, below: bool, unit: str, level: float | None
) -> Decision | None:
    found = observe(data)
    verdicts = [each.verdict(limit, below=below, level=level, cases=len(found)) for each in found]

    def shown(each: Observation) -> str:
        return f"{_number(each.mean)}{unit} ± {_number(each.error)}"

    return _decision(found, verdicts, lambda each: each.mean if below else -each.mean, shown, shown)


def lower(observe: Observe) -> Decide:
    """The mean of every observation, a difference paired by seed, is below zero by the paired t-test.

    It holds if the whole interval of each lies below zero, and fails if that of one lies above.
    """

    def decided(data: Any) -> Decision | None:
        found = observe(data)
        verdicts: list[Verdict] = [
            "unclear" if each.doubt else Paired(each.values).verdict(below=True) for each in found
        ]

        def shown(each: Observation) -> str:
            test = Paired(each.values)
            return f"{test.mean:+.3f}, p {test.p:.2g}" if math.isfinite(test.p) else str(test)

        return _decision(
            found,
            verdicts,
            lambda each: Paired(each.values).mean,
            shown,
            lambda each: str(Paired(each.values)),
        )

    return decided


def count_at_most(limit: float, noun: str, observe: Observe) -> Decide:
    """Every observation, one number of all seeds together, which has no spread, is at most the limit."""

    def decided(data: Any) -> Decision | None:
        found = observe(data)
        verdicts: list[Verdict] = [
            "unclear" if each.doubt else "holds" if each.mean <= limit else "fails" for each in found
        ]

        def shown(each: Observation) -> str:
            return f"{each.mean:g} {noun}{'' if each.mean == 1 else 's'}"

        return _decision(found, verdicts, lambda each: each.mean, shown, lambda each: f"{each.mean:g}")

    return decided


def all_within(limit: float, numbers: Callable[[Any], Sequence[float]]) -> Decide:
    """No number is above the limit, which is that of rounding."""

    def decided(data: Any) -> Decision | None:
        found = numbers(data)
        if not found:
            return None
        return f"{max(found):.1g} at most", "holds" if max(found) <= limit else "fails", ""

    return decided


def _decision(
    found: Sequence[Observation],
    verdicts: Sequence[Verdict],
    badness: Callable[[Observation], float],
    shown: Callable[[Observation], str],
    listed: Callable[[Observation], str],
) -> Decision | None:
    """Show the observation that decided: the one nearest to failing; one that is not a number goes first."""
    if not found:
        return None
    overall: Verdict = "fails" if "fails" in verdicts else "unclear" if "unclear" in verdicts else "holds"
    judged = list(zip(found, verdicts, strict=True))
    deciding = [each for each, verdict in judged if verdict == overall]
    worst = max(deciding, key=lambda each: math.inf if math.isnan(badness(each)) else badness(each))
    many = f", {verdicts.count('holds')} of {len(found)} hold" if len(found) > 1 else ""
    others = [
        f"{each.title} {listed(each)} {verdict}"
        for each, verdict in judged
        if verdict != "holds" and len(found) > 1
    ]
    return f"{shown(worst)} ({worst.title}{many})", overall, "; ".join(others)


def per(
    keys: str | Sequence[str],
    value: str | Callable[[Record], float | None],
    label: str | Callable[..., str] = "",
    **only: Any,
) -> Observe:
    """An observation for each combination of the keys among the records, a value of each record of it.

    Args:
        keys: of a record.
        value: a key of a record, or a function of it.
        label: names a combination: a format of its values, or a function of them.
        only: which records are looked at; see `select`.
    """
    read = value if callable(value) else lambda record: record[value]
    return each(keys, lambda records: np.array([read(one) for one in records], dtype=float), label, **only)


def each(
    keys: str | Sequence[str],
    values: Callable[[list[Record]], Array],
    label: str | Callable[..., str] = "",
    **only: Any,
) -> Observe:
    """The same with a function of all records of a combination, which gives a value for each seed."""
    names = [keys] if isinstance(keys, str) else list(keys)
    named = label if callable(label) else (label or " ".join("{}" for _ in names)).format

    def observe(records: Sequence[Record]) -> list[Observation]:
        groups: dict[tuple[Any, ...], list[Record]] = {}
        for record in select(records, **only):
            groups.setdefault(tuple(record[name] for name in names), []).append(record)
        return [Observation(named(*group), values(own)) for group, own in groups.items()]

    return observe


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "?" if math.isnan(value) else "∞" if value > 0 else "-∞"
    return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.0e}"
