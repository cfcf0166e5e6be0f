"""What is claimed of norm placements, and why a network may not decide it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Observation,
    Observe,
    at_least,
    at_most,
    count_at_most,
    lower,
)
from theodolite_studies.framework.paired import less
from theodolite_studies.norm_placement.runs import KINDS, NetworkRuns, RunTable

DEEP = 12
"""Blocks from which a network counts as deep."""
Doubt = Callable[[NetworkRuns], str]
"""Why a network cannot decide a claim; empty if it can."""


def sure(one: NetworkRuns) -> str:
    """No doubt."""
    return ""


def unbracketed(one: NetworkRuns) -> str:
    """Why the best learning rate of a network is not known."""
    if one.is_stuck:
        return "learns at no rate tried"
    return "best at an edge" if one.best_at in (one.exponents[0], one.exponents[-1]) else ""


def unbounded(one: NetworkRuns) -> str:
    """Why the learning rates at which a network trains cannot be counted."""
    return "up to an edge" if one.reaches_edge else unbracketed(one)


def judged(
    where: str, networks: Sequence[NetworkRuns], value: Callable[[], Array], doubt: Doubt = sure
) -> Observation:
    """The value of some networks, which must have the same seeds and learning rates.

    Learning rates below all of another network's do not matter: some placements are tried lower than others.
    """
    lowest = max(one.exponents[0] for one in networks)
    grids = {(one.seeds, *(each for each in one.exponents if each >= lowest)) for one in networks}
    if len(grids) > 1 or not all(one.is_whole for one in networks):
        why = "not the same seeds and learning rates"
        return Observation(where, np.array([math.nan]), why)
    doubts: dict[str, dict[str, None]] = {}
    for one in networks:
        if said := doubt(one):
            doubts.setdefault(said, {})[one.placement] = None
    why = "; ".join(f"{', '.join(names)} {said}" for said, names in doubts.items())
    return Observation(where, value(), why)


def _deep(
    placements: Sequence[str], value: Callable[[NetworkRuns], Array], kind: str = "standard"
) -> Observe:
    """An observation of each deep network that was made."""
    return lambda table: [
        Observation(f"{placement} {depth}", value(one))
        for placement in placements
        for depth in table.depths
        if depth >= DEEP and (one := table.of(placement, depth, kind))
    ]


def _against(first: str, second: str, value: Callable[[NetworkRuns], Array], doubt: Doubt = sure) -> Observe:
    """The difference of two placements, seed by seed, for each deep network that was made of both."""

    def observe(table: RunTable) -> list[Observation]:
        pairs = [
            (depth, [table.of(name, depth, "standard") for name in (first, second)])
            for depth in table.depths
            if depth >= DEEP
        ]
        return [
            judged(f"depth {depth}", (one, other), partial(_less, value, one, other), doubt)
            for depth, (one, other) in pairs
            if one and other
        ]

    return observe


def _less(value: Callable[[NetworkRuns], Array], one: NetworkRuns, other: NetworkRuns) -> Array:
    return less(value(one), value(other))


def _deeper(
    kind: str,
    value: Callable[[NetworkRuns, NetworkRuns], Array],
    placements: Sequence[str] = (),
    doubt: Doubt = sure,
) -> Observe:
    """A value of the deepest network and the shallowest, where there are both; all placements by default."""

    def observe(table: RunTable) -> list[Observation]:
        deepest, base = table.depths[-1], table.depths[0]
        if deepest == base:
            return []
        pairs = [
            (name, table.of(name, deepest, kind), table.of(name, base, kind))
            for name in placements or table.placements
        ]
        return [
            judged(f"{name} {base} to {deepest}", (one, other), partial(value, one, other), doubt)
            for name, one, other in pairs
            if one and other
        ]

    return observe


def _growth(one: NetworkRuns, other: NetworkRuns) -> Array:
    return one.variance("last") / other.variance("last")


def _move(one: NetworkRuns, other: NetworkRuns) -> Array:
    return np.array([float(abs(one.best_at - other.best_at))])


def _gain(one: NetworkRuns, other: NetworkRuns) -> Array:
    return less(one.at(other.best_at), other.best)


def _spreads(table: RunTable) -> list[Observation]:
    """How much farther apart the placements end with the plan than without."""
    found = []
    for depth in table.depths if len(table.depths) > 1 else ():
        standard, plan = (
            [one for name in table.placements if (one := table.of(name, depth, kind))] for kind in KINDS
        )
        if depth >= DEEP and len(plan) == len(standard) == len(table.placements) > 1:
            value = partial(_closing, plan, standard)
            found.append(judged(f"depth {depth}", [*plan, *standard], value, unbracketed))
    return found


def _closing(plan: Sequence[NetworkRuns], standard: Sequence[NetworkRuns]) -> Array:
    losses = [np.stack([one.best for one in found]) for found in (plan, standard)]
    return less(*(less(each.max(0), each.min(0)) for each in losses))


def _grown(one: NetworkRuns) -> Array:
    return one.variance("last") / one.variance("first")


def _planned_post(table: RunTable) -> Sequence[Observation]:
    """The plan changes nothing where there is one depth alone."""
    found = _deep(("post",), lambda one: one.slope("first"), "plan")
    return found(table) if len(table.depths) > 1 else ()


CLAIMS = (
    Claim(
        "at the start the variance of pre and peri grows linearly over the blocks",
        "linearly",
        "second half/first half ≤ 1.5",
        at_most(1.5, _deep(("pre", "peri"), lambda one: one.bend("first"))),
    ),
    Claim(
        "training makes pre's variance grow",
        "massive activations",
        "last block, after/before ≥ 2",
        at_least(2, _deep(("pre",), _grown)),
    ),
    Claim(
        "and more than peri's",
        "peri is balanced",
        "by ≥ 1 octave",
        at_least(1, _against("pre", "peri", lambda one: np.log2(_grown(one))), unit=" octaves"),
    ),
    Claim(
        "after training pre's grows faster than linearly over the blocks",
        "exponentially",
        "second half/first half ≥ 2",
        at_least(2, _deep(("pre",), lambda one: one.bend("last"))),
    ),
    Claim(
        "and peri's does not",
        "linearly",
        "second half/first half ≤ 2",
        at_most(2, _deep(("peri",), lambda one: one.bend("last"))),
    ),
    Claim(
        "pre's largest activations stand out more than peri's",
        "massive activations",
        "max/median by ≥ 1 octave",
        at_least(1, _against("pre", "peri", lambda one: np.log2(one.peak("last"))), unit=" octaves"),
    ),
    Claim(
        "at the start post's gradients vanish",
        "vanish",
        "first/last block ≤ 0.1",
        at_most(0.1, _deep(("post",), lambda one: one.slope("first"))),
    ),
    Claim(
        "after training they have vanished",
        "vanish",
        "first/last block ≤ 0.1",
        at_most(0.1, _deep(("post",), lambda one: one.slope("last"))),
    ),
    Claim(
        "pre's and peri's do not",
        "flow",
        "first/last block ≥ 0.1",
        at_least(0.1, _deep(("pre", "peri"), lambda one: one.slope("first"))),
    ),
    Claim(
        "after training peri's are of one size",
        "balanced",
        "first/last within 3 octaves",
        at_most(3, _deep(("peri",), lambda one: np.abs(np.log2(one.slope("last")))), unit=" octaves"),
    ),
    Claim(
        "peri's gradient norm jumps less from step to step than pre's",
        "steadier",
        "peri − pre < 0",
        lower(_against("peri", "pre", lambda one: one.unrest)),
    ),
    Claim(
        "post trains at fewer learning rates than pre",
        "unstable",
        "octaves within 0.1 of the best: ≤ −1",
        at_most(-1, _against("post", "pre", lambda one: one.reach, unbounded), unit=" octaves"),
    ),
    Claim(
        "peri at no fewer than pre",
        "more stable",
        "≥ 0",
        at_least(0, _against("peri", "pre", lambda one: one.reach, unbounded), unit=" octaves"),
    ),
    Claim(
        "at four times its best learning rate peri loses less than pre",
        "more stable",
        "peri − pre < 0",
        lower(_against("peri", "pre", lambda one: one.lost(2), unbracketed)),
    ),
    Claim(
        "each at its best, peri ends better than pre",
        "better",
        "peri − pre < 0",
        lower(_against("peri", "pre", lambda one: one.best, unbracketed)),
    ),
    Claim(
        "and pre better than post",
        "better",
        "pre − post < 0",
        lower(_against("pre", "post", lambda one: one.best, unbracketed)),
    ),
    # What the plan is to do about it: nothing of this is the paper's.
    Claim(
        "with the plan the trained stream is as large in a deep network as in a shallow one",
        "–",
        "variance, deepest/base ≤ 2",
        at_most(2, _deeper("plan", _growth, ("pre", "peri"))),
    ),
    Claim(
        "and without it is not",
        "–",
        "variance, deepest/base ≥ 2",
        at_least(2, _deeper("standard", _growth, ("pre", "peri"))),
    ),
    Claim(
        "with the plan post's gradients do not vanish",
        "–",
        "first/last block ≥ 0.1",
        at_least(0.1, _planned_post),
    ),
    Claim(
        "with the plan the best learning rate stays, wherever the norms are",
        "–",
        "moves ≤ 1 octave",
        count_at_most(1, "octave", _deeper("plan", _move, doubt=unbracketed)),
    ),
    Claim(
        "and with it deeper is better",
        "–",
        "loss, deepest − base < 0",
        lower(_deeper("plan", _gain, doubt=unbracketed)),
    ),
    Claim(
        "with the plan the placements end closer together",
        "–",
        "worst − best: plan − standard < 0",
        lower(_spreads),
    ),
)
"""Changed after the runs: what rests on a best learning rate that is not bracketed, or on a range that goes
on beyond what was tried, is unclear."""
