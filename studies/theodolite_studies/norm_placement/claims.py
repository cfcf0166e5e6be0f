"""What is claimed of norm placements, decided by the records of the study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from theodolite_studies.framework.paired import less
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Claim
from theodolite_studies.norm_placement.cases import (
    DEEP,
    Judged,
    against,
    by_t_test,
    claim,
    counted,
    deep,
    judged,
    unbounded,
    unbracketed,
)
from theodolite_studies.norm_placement.values import KINDS, Array, Table, Values


def claims(records: Sequence[Record]) -> list[Claim]:
    """All that there are records for. The thresholds were written down before anything was run.

    Changed after the runs: what rests on a best learning rate that is not bracketed, or on a range that goes
    on beyond what was tried, is unclear.
    """
    table = Table(records)
    return [*_variance(table), *_gradients(table), *_stability(table), *_planned(table)]


def _variance(table: Table) -> Iterator[Claim]:
    yield from claim(
        "at the start the variance of pre and peri grows linearly over the blocks",
        "linearly",
        "second half/first half ≤ 1.5",
        deep(table, ("pre", "peri"), lambda one: one.bend("first")),
        limit=1.5,
        below=True,
    )
    yield from claim(
        "training makes pre's variance grow",
        "massive activations",
        "last block, after/before ≥ 2",
        deep(table, ("pre",), lambda one: one.variance("last") / one.variance("first")),
        limit=2,
        below=False,
    )
    yield from claim(
        "and more than peri's",
        "peri is balanced",
        "by ≥ 1 octave",
        against(table, "pre", "peri", lambda one: np.log2(one.variance("last") / one.variance("first"))),
        limit=1,
        below=False,
        unit=" octaves",
    )
    yield from claim(
        "after training pre's grows faster than linearly over the blocks",
        "exponentially",
        "second half/first half ≥ 2",
        deep(table, ("pre",), lambda one: one.bend("last")),
        limit=2,
        below=False,
    )
    yield from claim(
        "and peri's does not",
        "linearly",
        "second half/first half ≤ 2",
        deep(table, ("peri",), lambda one: one.bend("last")),
        limit=2,
        below=True,
    )
    yield from claim(
        "pre's largest activations stand out more than peri's",
        "massive activations",
        "max/median by ≥ 1 octave",
        against(table, "pre", "peri", lambda one: np.log2(one.peak("last"))),
        limit=1,
        below=False,
        unit=" octaves",
    )


def _gradients(table: Table) -> Iterator[Claim]:
    yield from claim(
        "at the start post's gradients vanish",
        "vanish",
        "first/last block ≤ 0.1",
        deep(table, ("post",), lambda one: one.slope("first")),
        limit=0.1,
        below=True,
    )
    yield from claim(
        "after training they have vanished",
        "vanish",
        "first/last block ≤ 0.1",
        deep(table, ("post",), lambda one: one.slope("last")),
        limit=0.1,
        below=True,
    )
    yield from claim(
        "pre's and peri's do not",
        "flow",
        "first/last block ≥ 0.1",
        deep(table, ("pre", "peri"), lambda one: one.slope("first")),
        limit=0.1,
        below=False,
    )
    yield from claim(
        "after training peri's are of one size",
        "balanced",
        "first/last within 3 octaves",
        deep(table, ("peri",), lambda one: np.abs(np.log2(one.slope("last")))),
        limit=3,
        below=True,
        unit=" octaves",
    )
    yield from by_t_test(
        "peri's gradient norm jumps less from step to step than pre's",
        "steadier",
        "peri − pre < 0",
        against(table, "peri", "pre", lambda one: one.unrest),
    )


def _stability(table: Table) -> Iterator[Claim]:
    yield from claim(
        "post trains at fewer learning rates than pre",
        "unstable",
        "octaves within 0.1 of the best: ≤ −1",
        against(table, "post", "pre", lambda one: one.reach, unbounded),
        limit=-1,
        below=True,
        unit=" octaves",
    )
    yield from claim(
        "peri at no fewer than pre",
        "more stable",
        "≥ 0",
        against(table, "peri", "pre", lambda one: one.reach, unbounded),
        limit=0,
        below=False,
        unit=" octaves",
    )
    yield from by_t_test(
        "at four times its best learning rate peri loses less than pre",
        "more stable",
        "peri − pre < 0",
        against(table, "peri", "pre", lambda one: one.lost(2), unbracketed),
    )
    yield from by_t_test(
        "each at its best, peri ends better than pre",
        "better",
        "peri − pre < 0",
        against(table, "peri", "pre", lambda one: one.best, unbracketed),
    )
    yield from by_t_test(
        "and pre better than post",
        "better",
        "pre − post < 0",
        against(table, "pre", "post", lambda one: one.best, unbracketed),
    )


def _planned(table: Table) -> Iterator[Claim]:
    """What the plan is to do about it: nothing of this is the paper's."""
    deepest, base = table.depths[-1], table.depths[0]
    if deepest == base:
        return

    def pairs(kind: str, placements: Sequence[str]) -> list[tuple[str, Values, Values]]:
        """The deepest network and the shallowest, where there are both."""
        found = [(p, table.of(p, deepest, kind), table.of(p, base, kind)) for p in placements]
        return [(f"{p} {base} to {deepest}", one, other) for p, one, other in found if one and other]

    def deeper(kind: str) -> list[Judged]:
        return [
            judged(where, (one, other), partial(_growth, one, other))
            for where, one, other in pairs(kind, ("pre", "peri"))
        ]

    yield from claim(
        "with the plan the trained stream is as large in a deep network as in a shallow one",
        "–",
        "variance, deepest/base ≤ 2",
        deeper("plan"),
        limit=2,
        below=True,
    )
    yield from claim(
        "and without it is not",
        "–",
        "variance, deepest/base ≥ 2",
        deeper("standard"),
        limit=2,
        below=False,
    )
    yield from claim(
        "with the plan post's gradients do not vanish",
        "–",
        "first/last block ≥ 0.1",
        deep(table, ("post",), lambda one: one.slope("first"), kind="plan"),
        limit=0.1,
        below=False,
    )

    def planned(value: Callable[[Values, Values], Array]) -> list[Judged]:
        return [
            judged(where, (one, other), partial(value, one, other), unbracketed)
            for where, one, other in pairs("plan", table.placements)
        ]

    yield from counted(
        "with the plan the best learning rate stays, wherever the norms are",
        "–",
        "moves ≤ 1 octave",
        planned(_move),
        limit=1,
    )
    yield from by_t_test(
        "and with it deeper is better",
        "–",
        "loss, deepest − base < 0",
        planned(_gain),
    )
    spreads = []
    for depth in table.depths:
        standard, plan = (
            [one for p in table.placements if (one := table.of(p, depth, kind))] for kind in KINDS
        )
        if depth >= DEEP and len(plan) == len(standard) == len(table.placements) > 1:
            value = partial(_closing, plan, standard)
            spreads.append(judged(f"depth {depth}", [*plan, *standard], value, unbracketed))
    yield from by_t_test(
        "with the plan the placements end closer together",
        "–",
        "worst − best: plan − standard < 0",
        spreads,
    )


def _growth(one: Values, other: Values) -> Array:
    return one.variance("last") / other.variance("last")


def _move(one: Values, other: Values) -> Array:
    return np.array([float(abs(one.best_at - other.best_at))])


def _gain(one: Values, other: Values) -> Array:
    return less(one.at(other.best_at), other.best)


def _closing(plan: Sequence[Values], standard: Sequence[Values]) -> Array:
    """How much farther apart the placements end with the plan than without."""
    losses = [np.stack([one.best for one in found]) for found in (plan, standard)]
    spreads = [less(each.max(0), each.min(0)) for each in losses]
    return less(spreads[0], spreads[1])
