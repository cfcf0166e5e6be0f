"""Cases of the norm-placement study: what decides a claim, and why it may not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from theodolite_studies.framework.paired import Paired, less
from theodolite_studies.framework.verdict import Case, Claim, Verdict, settled
from theodolite_studies.norm_placement.values import Array, Table, Values

DEEP = 12
"""Blocks from which a network counts as deep."""
Doubt = Callable[[Values], str]
"""Why a network cannot decide a claim; empty if it can."""


@dataclass(frozen=True)
class Judged(Case):
    """A case that decides nothing if there is a doubt, whatever its values are."""

    doubt: str = ""

    def verdict(self, limit: float, *, below: bool, level: float | None = None, cases: int = 1) -> Verdict:
        """Is the mean on the right side of the limit?"""
        return "unclear" if self.doubt else super().verdict(limit, below=below, level=level, cases=cases)

    def below_zero(self) -> Verdict:
        """Are they below zero, by the paired t-test?"""
        return "unclear" if self.doubt else Paired(self.values).verdict(below=True)


def judged(
    where: str, networks: Sequence[Values], value: Callable[[], Array], doubt: Doubt = lambda one: ""
) -> Judged:
    """The value of some networks, which have to have the same seeds and learning rates.

    Learning rates below all of another network's are no matter: some placements are tried lower than others.
    """
    lowest = max(one.exponents[0] for one in networks)
    grids = {(one.seeds, *(each for each in one.exponents if each >= lowest)) for one in networks}
    if len(grids) > 1 or not all(one.is_whole for one in networks):
        why = "not the same seeds and learning rates"
        return Judged(f"{where}: {why}", np.array([math.nan]), why)
    doubts: dict[str, dict[str, None]] = {}
    for one in networks:
        if said := doubt(one):
            doubts.setdefault(said, {})[one.placement] = None
    why = "; ".join(f"{', '.join(names)} {said}" for said, names in doubts.items())
    return Judged(f"{where}: {why}" if why else where, value(), why)


def unbracketed(one: Values) -> str:
    """Why the best learning rate of a network is not known."""
    if one.is_stuck:
        return "learns at no rate tried"
    if one.best_at in (one.exponents[0], one.exponents[-1]):
        return "best at an edge"
    return ""


def unbounded(one: Values) -> str:
    """Why the learning rates at which a network trains cannot be counted."""
    if one.reaches_edge:
        return "up to an edge"
    return unbracketed(one)


def deep(
    table: Table, placements: Sequence[str], value: Callable[[Values], Array], *, kind: str = "standard"
) -> list[Judged]:
    """A case for each deep network that was made."""
    return [
        Judged(f"{placement} {depth}", value(one))
        for placement in placements
        for depth in table.depths
        if depth >= DEEP and (one := table.of(placement, depth, kind))
    ]


def against(
    table: Table,
    first: str,
    second: str,
    value: Callable[[Values], Array],
    doubt: Doubt = lambda one: "",
) -> list[Judged]:
    """The difference of two placements, seed by seed, for each deep network that was made of both."""
    found = []
    for depth in table.depths:
        one, other = table.of(first, depth, "standard"), table.of(second, depth, "standard")
        if depth >= DEEP and one and other:
            pair = (one, other)
            found.append(judged(f"depth {depth}", pair, lambda: less(*map(value, pair)), doubt))  # noqa: B023
    return found


def claim(
    name: str,
    paper: str,
    threshold: str,
    cases: Sequence[Judged],
    *,
    limit: float,
    below: bool,
    unit: str = "",
) -> Iterator[Claim]:
    """The claim, if there is something to decide it by."""
    if cases:
        yield settled(name, paper, threshold, cases, limit=limit, below=below, unit=unit)


def by_t_test(name: str, paper: str, threshold: str, cases: Sequence[Judged]) -> Iterator[Claim]:
    """The same of differences that are to be below zero, by the paired t-test: small effects need one.

    It holds if the whole interval of each case lies below zero, and fails if that of one lies above.
    """
    if not cases:
        return
    tests = [Paired(case.values) for case in cases]
    verdicts = [case.below_zero() for case in cases]
    overall = _overall(verdicts)
    deciding = [place for place, verdict in enumerate(verdicts) if verdict == overall]
    worst = max(deciding, key=lambda place: np.nan_to_num(tests[place].mean, nan=np.inf))
    others = [
        f"{case.where} {test} {verdict}"
        for case, test, verdict in zip(cases, tests, verdicts, strict=True)
        if verdict != "holds" and len(cases) > 1
    ]
    mean, p = tests[worst].mean, tests[worst].p
    numbers = f"{mean:+.3f}, p {p:.2g}" if math.isfinite(p) else str(tests[worst])
    here = f"{numbers} ({cases[worst].where}{_many(verdicts)})"
    yield Claim(name, paper, threshold, here, overall, "; ".join(others))


def counted(
    name: str, paper: str, threshold: str, cases: Sequence[Judged], *, limit: float
) -> Iterator[Claim]:
    """The same of one number of octaves for each case, at most the limit.

    It is a number of all seeds together, and has no spread.
    """
    if not cases:
        return
    verdicts: list[Verdict] = [
        "unclear" if case.doubt else "holds" if case.mean <= limit else "fails" for case in cases
    ]
    overall = _overall(verdicts)
    worst = max(
        (case for case, verdict in zip(cases, verdicts, strict=True) if verdict == overall),
        key=lambda case: np.nan_to_num(case.mean, nan=np.inf),
    )
    others = [
        f"{case.where} {case.mean:g} {verdict}"
        for case, verdict in zip(cases, verdicts, strict=True)
        if verdict != "holds" and len(cases) > 1
    ]
    here = f"{worst.mean:g} octave{'' if worst.mean == 1 else 's'} ({worst.where}{_many(verdicts)})"
    yield Claim(name, paper, threshold, here, overall, "; ".join(others))


def _overall(verdicts: Sequence[Verdict]) -> Verdict:
    return "fails" if "fails" in verdicts else "unclear" if "unclear" in verdicts else "holds"


def _many(verdicts: Sequence[Verdict]) -> str:
    return f", {verdicts.count('holds')} of {len(verdicts)} hold" if len(verdicts) > 1 else ""
