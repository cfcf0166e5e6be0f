"""What is claimed of norm placements, decided by the records of the study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from theodolite.studies.norm_placement_values import KINDS, Array, Table, Values
from theodolite.studies.paired import Paired
from theodolite.studies.records import Record
from theodolite.studies.verdict import Case, Claim, Verdict, settled

DEEP = 12
"""Blocks from which a network counts as deep."""


def claims(records: Sequence[Record]) -> list[Claim]:
    """All that there are records for. The thresholds were written down before anything was run."""
    table = Table(records)
    return [*_variance(table), *_gradients(table), *_stability(table), *_planned(table)]


def _variance(table: Table) -> Iterator[Claim]:
    yield from _claim(
        "at the start the variance of pre and peri grows linearly over the blocks",
        "linearly",
        "second half/first half ≤ 1.5",
        _deep(table, ("pre", "peri"), lambda one: one.bend("first")),
        limit=1.5,
        below=True,
    )
    yield from _claim(
        "training makes pre's variance grow",
        "massive activations",
        "last block, after/before ≥ 2",
        _deep(table, ("pre",), lambda one: one.variance("last") / one.variance("first")),
        limit=2,
        below=False,
    )
    yield from _claim(
        "and more than peri's",
        "peri is balanced",
        "by ≥ 1 octave",
        _against(table, "pre", "peri", lambda one: np.log2(one.variance("last") / one.variance("first"))),
        limit=1,
        below=False,
        unit=" octaves",
    )
    yield from _claim(
        "after training pre's grows faster than linearly over the blocks",
        "exponentially",
        "second half/first half ≥ 2",
        _deep(table, ("pre",), lambda one: one.bend("last")),
        limit=2,
        below=False,
    )
    yield from _claim(
        "and peri's does not",
        "linearly",
        "second half/first half ≤ 2",
        _deep(table, ("peri",), lambda one: one.bend("last")),
        limit=2,
        below=True,
    )
    yield from _claim(
        "pre's largest activations stand out more than peri's",
        "massive activations",
        "max/median by ≥ 1 octave",
        _against(table, "pre", "peri", lambda one: np.log2(one.peak("last"))),
        limit=1,
        below=False,
        unit=" octaves",
    )


def _gradients(table: Table) -> Iterator[Claim]:
    yield from _claim(
        "at the start post's gradients vanish",
        "vanish",
        "first/last block ≤ 0.1",
        _deep(table, ("post",), lambda one: one.slope("first")),
        limit=0.1,
        below=True,
    )
    yield from _claim(
        "after training they have vanished",
        "vanish",
        "first/last block ≤ 0.1",
        _deep(table, ("post",), lambda one: one.slope("last")),
        limit=0.1,
        below=True,
    )
    yield from _claim(
        "pre's and peri's do not",
        "flow",
        "first/last block ≥ 0.1",
        _deep(table, ("pre", "peri"), lambda one: one.slope("first")),
        limit=0.1,
        below=False,
    )
    yield from _claim(
        "after training peri's are of one size",
        "balanced",
        "first/last within 3 octaves",
        _deep(table, ("peri",), lambda one: np.abs(np.log2(one.slope("last")))),
        limit=3,
        below=True,
        unit=" octaves",
    )
    yield from _tested(
        "peri's gradient norm jumps less from step to step than pre's",
        "steadier",
        "peri − pre < 0",
        _against(table, "peri", "pre", lambda one: one.unrest),
    )


def _stability(table: Table) -> Iterator[Claim]:
    yield from _claim(
        "post trains at fewer learning rates than pre",
        "unstable",
        "octaves within 0.1 of the best: ≤ −1",
        _against(table, "post", "pre", lambda one: one.reach),
        limit=-1,
        below=True,
        unit=" octaves",
    )
    yield from _claim(
        "peri at no fewer than pre",
        "more stable",
        "≥ 0",
        _against(table, "peri", "pre", lambda one: one.reach),
        limit=0,
        below=False,
        unit=" octaves",
    )
    yield from _tested(
        "at four times its best learning rate peri loses less than pre",
        "more stable",
        "peri − pre < 0",
        _against(table, "peri", "pre", lambda one: one.lost(2)),
    )
    yield from _tested(
        "each at its best, peri ends better than pre",
        "better",
        "peri − pre < 0",
        _against(table, "peri", "pre", lambda one: one.best),
    )
    yield from _tested(
        "and pre better than post",
        "better",
        "pre − post < 0",
        _against(table, "pre", "post", lambda one: one.best),
    )


def _planned(table: Table) -> Iterator[Claim]:
    """What the plan is to do about it: nothing of this is the paper's."""
    deepest, base = table.depths[-1], table.depths[0]
    if deepest == base:
        return

    def deeper(kind: str, placements: Sequence[str]) -> list[Case]:
        found = []
        for placement in placements:
            deep, shallow = table.of(placement, deepest, kind), table.of(placement, base, kind)
            if deep and shallow:
                ratio = deep.variance("last") / shallow.variance("last")
                found.append(Case(f"{placement} {base} to {deepest}", ratio))
        return found

    yield from _claim(
        "with the plan the trained stream is as large in a deep network as in a shallow one",
        "–",
        "variance, deepest/base ≤ 2",
        deeper("plan", ("pre", "peri")),
        limit=2,
        below=True,
    )
    yield from _claim(
        "and without it is not",
        "–",
        "variance, deepest/base ≥ 2",
        deeper("standard", ("pre", "peri")),
        limit=2,
        below=False,
    )
    yield from _claim(
        "with the plan post's gradients do not vanish",
        "–",
        "first/last block ≥ 0.1",
        _deep(table, ("post",), lambda one: one.slope("first"), kind="plan"),
        limit=0.1,
        below=False,
    )
    moved, grown = [], []
    for placement in table.placements:
        deep, shallow = table.of(placement, deepest, "plan"), table.of(placement, base, "plan")
        if deep and shallow:
            where = f"{placement} {base} to {deepest}"
            moved.append(Case(where, np.array([abs(deep.best_at - shallow.best_at)] * len(deep.best), float)))
            grown.append(Case(where, deep.at(shallow.best_at) - shallow.best))
    yield from _claim(
        "with the plan the best learning rate stays, wherever the norms are",
        "–",
        "moves ≤ 1 octave",
        moved,
        limit=1,
        below=True,
        unit=" octaves",
    )
    yield from _tested(
        "and with it deeper is better",
        "–",
        "loss, deepest − base < 0",
        grown,
    )
    spreads = []
    for depth in table.depths:
        standard, plan = ([table.of(p, depth, kind) for p in table.placements] for kind in KINDS)
        if depth >= DEEP and all(plan) and all(standard) and len(table.placements) > 1:
            spreads.append(Case(f"depth {depth}", _spread(plan) - _spread(standard)))
    yield from _tested(
        "with the plan the placements end closer together",
        "–",
        "worst − best: plan − standard < 0",
        spreads,
    )


def _spread(found: Sequence[Values | None]) -> Array:
    losses = np.stack([one.best for one in found if one is not None])
    return np.asarray(losses.max(0) - losses.min(0))


def _deep(
    table: Table, placements: Sequence[str], value: Callable[[Values], Array], *, kind: str = "standard"
) -> list[Case]:
    """A case for each deep network that was made."""
    return [
        Case(f"{placement} {depth}", value(one))
        for placement in placements
        for depth in table.depths
        if depth >= DEEP and (one := table.of(placement, depth, kind))
    ]


def _against(table: Table, first: str, second: str, value: Callable[[Values], Array]) -> list[Case]:
    """The difference of two placements, seed by seed, for each deep network that was made of both."""
    return [
        Case(f"depth {depth}", value(one) - value(other))
        for depth in table.depths
        if depth >= DEEP
        and (one := table.of(first, depth, "standard"))
        and (other := table.of(second, depth, "standard"))
    ]


def _claim(
    claim: str,
    paper: str,
    threshold: str,
    cases: list[Case],
    *,
    limit: float,
    below: bool,
    unit: str = "",
) -> Iterator[Claim]:
    """The claim, if there is something to decide it by."""
    if cases:
        yield settled(claim, paper, threshold, cases, limit=limit, below=below, unit=unit)


def _tested(claim: str, paper: str, threshold: str, cases: list[Case]) -> Iterator[Claim]:
    """The same of differences that are to be below zero, by the paired t-test: small effects need one.

    It holds if the whole interval of each case lies below zero, and fails if that of one lies above.
    """
    if not cases:
        return
    tests = [Paired(case.values) for case in cases]
    verdicts = [test.verdict(below=True) for test in tests]
    overall: Verdict = "fails" if "fails" in verdicts else "unclear" if "unclear" in verdicts else "holds"
    deciding = [place for place, verdict in enumerate(verdicts) if verdict == overall]
    worst = max(deciding, key=lambda place: np.nan_to_num(tests[place].mean, nan=np.inf))
    others = [
        f"{case.where} {test} {verdict}"
        for case, test, verdict in zip(cases, tests, verdicts, strict=True)
        if verdict != "holds" and len(cases) > 1
    ]
    many = f", {verdicts.count('holds')} of {len(cases)} hold" if len(cases) > 1 else ""
    here = f"{tests[worst].mean:+.3f}, p {tests[worst].p:.2g} ({cases[worst].where}{many})"
    yield Claim(claim, paper, threshold, here, overall, "; ".join(others))
