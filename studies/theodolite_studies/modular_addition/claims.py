"""The claims about modular addition, with thresholds that were written down before the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Decide,
    Observation,
    Observe,
    at_least,
    at_most,
    per,
)
from theodolite_studies.framework.records import Record, distinct, select

LEVEL = 0.05
ADAMW = ("p 23, ReLU", "p 23, x²", "p 59, ReLU", "p 59, x²")
PAPERS = ("p 23, ReLU", "p 23, x²")
"""Networks of the paper's own setting."""
DESCENT = ("p 23, SGD", "p 23, SGD, c 0.02", "p 59, SGD")
EQUAL = ("p 23, SGD, equal",)
WITH_RELU, WITH_SQUARES = ("p 23, ReLU", "p 59, ReLU"), ("p 23, x²", "p 59, x²")
EVEN = ("|x|", "x²", "x⁴", "log(1 + e²ˣ)", "eˣ")
"""Activations with an even part."""
ODD = ("x", "x³")
SIMPLE = ("start", "amplitude", "misalignment")
"""Rules other than the flow's."""
WIDTHS = ("p 59, width 128", "p 59, width 256", "p 59, width 512")
"""Width 64 was seen not to generalise in a trial."""


def least(limit: float, observe: Observe, unit: str = "") -> Decide:
    """`at_least` at the study's level."""
    return at_least(limit, observe, level=LEVEL, unit=unit)


def most(limit: float, observe: Observe, unit: str = "") -> Decide:
    """`at_most` at the study's level."""
    return at_most(limit, observe, level=LEVEL, unit=unit)


def trained(value: str, networks: Sequence[str] = ADAMW, when: str = "end") -> Observe:
    """What is read of networks that were trained on all pairs."""
    return per("network", value, kind="mechanism", when=when, network=lambda name: name in networks)


def _off_half(record: Record) -> float:
    return abs(_number(record["ghosts"]) - 0.5)


def _ghosts() -> Observe:
    return per("network", _off_half, kind="mechanism", when="end", network=lambda name: name in PAPERS)


def predicted(value: Callable[[Record], float], networks: Sequence[str]) -> Observe:
    """What a record of the lottery says."""
    return per("network", value, kind="lottery", network=lambda name: name in networks)


def advantage(record: Record) -> float:
    """The share of neurons that the flow predicts, less that of the best simple rule."""
    shares = record["all"]
    return float(shares["time"] - max(shares[rule] for rule in SIMPLE))


def other_activations(networks: Sequence[str], names: Sequence[str]) -> Observe:
    """The accuracy of each network with each activation."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        found = []
        for network in networks:
            own = select(records, kind="swapped", network=network)
            for name in names if own else ():
                values = np.array([one["accuracy"][name] for one in own], dtype=float)
                found.append(Observation(f"{network}, {name} at test time", values))
        return found

    return observe


def at_moment(value: str, moment: str, part: str, *, decay: bool, networks: Sequence[str] = ()) -> Observe:
    """What is read at a moment of grokking, of networks trained with or without weight decay."""
    return per(
        "network",
        value,
        part=part,
        kind="moment",
        moment=moment,
        decay=lambda value: (value > 0) == decay,
        network=lambda name: not networks or name in networks,
    )


def between(value: str, first: str, last: str, *, ratio: bool) -> Observe:
    """From one moment to another with weight decay: a ratio or a difference, of the seeds that have both."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        found = []
        for network in (*WIDTHS, "p 23"):
            own = select(records, kind="moment", network=network, decay=lambda decay: decay > 0)
            values, seeds = [], distinct(own, "seed")
            for seed in seeds:
                ends = {one["moment"]: _number(one[value]) for one in select(own, seed=seed)}
                if {first, last} <= ends.keys():
                    before, after = ends[first], ends[last]
                    values.append(after / before if ratio else after - before)
            if values:
                some = f", {len(values)} of {len(seeds)} seeds" if len(values) < len(seeds) else ""
                found.append(Observation(network + some, np.array(values)))
        return found

    return observe


def steps_to(records: Sequence[Record], network: str, moment: str = "generalised") -> dict[int, float]:
    """With weight decay, by seed; infinite if the moment did not come."""
    own = select(records, kind="moment", network=network, decay=lambda decay: decay > 0)
    reached = {one["seed"]: float(one["step"]) for one in select(own, moment=moment)}
    return {seed: reached.get(seed, math.inf) for seed in distinct(own, "seed")}


def doublings(records: Sequence[Record]) -> list[Observation]:
    """The steps to generalise of a network over those of one half as wide, by seed."""
    found = []
    for narrow, wide in pairwise(WIDTHS):
        before, after = steps_to(records, narrow), steps_to(records, wide)
        if seeds := sorted(before.keys() & after.keys()):
            found.append(
                Observation(wide, _ratios([after[seed] for seed in seeds], [before[seed] for seed in seeds]))
            )
    return found


def _ratios(above: Sequence[float], below: Sequence[float]) -> Array:
    with np.errstate(invalid="ignore"):
        return np.array(above) / np.array(below)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


_MECHANISM = (
    Claim(
        "nearly all neurons have one frequency",
        "every neuron",
        "concentration > 0.5 in ≥ 0.9",
        least(0.9, trained("single")),
    ),
    Claim(
        "output phases are twice the input phases",
        "ψ = 2φ",
        "mean cos D ≥ 0.98",
        least(0.98, trained("alignment")),
    ),
    Claim(
        "both layers of a neuron have the same frequency",
        "the same",
        "in ≥ 0.99",
        least(0.99, trained("same")),
    ),
    Claim("every frequency has neurons", "all", "none without", most(0.0, trained("unused"))),
    Claim(
        "and frequencies are balanced at least as well as independent draws",
        "roughly the same number",
        "variance/mean of their numbers ≤ 1.5",
        most(1.5, trained("dispersion")),
    ),
    *(
        Claim(
            f"phases of a group are more even than random ones, r = {order}, {words}",
            "Σ exp(irφ) ≈ 0",
            f"|mean exp(irφ)| ≤ {limit:g} of random",
            most(limit, trained(f"symmetry {order}", PAPERS, when)),
        )
        for when, words in (("quarter", "paper's 5000 steps"), ("end", "20,000 steps"))
        for order, limit in ((2, 0.75), (4, 0.5))
    ),
    Claim(
        "logits at 2x and 2y have half the height of the answer's",
        "p/4 and p/2",
        "off 1/2 by ≤ 0.1",
        most(0.1, _ghosts()),
    ),
)
_LOTTERY = (
    Claim(
        "SGD: the flow predicts the frequency of a neuron",
        "decided at the start",
        "of ≥ 0.85 of all",
        least(0.85, predicted(lambda one: one["all"]["time"], DESCENT)),
    ),
    Claim(
        "and of those that have one frequency in the end",
        "the same",
        "≥ 0.95",
        least(0.95, predicted(lambda one: one["won"]["time"], DESCENT)),
    ),
    Claim(
        "SGD: so does the least misalignment",
        "k* = argmin |D|",
        "of ≥ 0.5 of all",
        least(0.5, predicted(lambda one: one["all"]["misalignment"], DESCENT)),
    ),
    Claim(
        "the flow is right much more often than the least misalignment",
        "not said",
        "≥ 3 times",
        least(3.0, predicted(lambda one: one["all"]["time"] / one["all"]["misalignment"], DESCENT), " ×"),
    ),
    Claim(
        "SGD, equal amplitudes: the least misalignment predicts it",
        "k* = argmin |D|",
        "of ≥ 0.85 of all",
        least(0.85, predicted(lambda one: one["all"]["misalignment"], EQUAL)),
    ),
    Claim(
        "AdamW: the flow is right more often than each simple rule",
        "not said",
        "by ≥ 0.05 of all",
        least(0.05, predicted(advantage, ADAMW)),
    ),
)
_ACTIVATIONS = (
    Claim(
        "trained with ReLU, right with any even part",
        "100 % with each of five",
        "≥ 0.99",
        least(0.99, other_activations(WITH_RELU, EVEN)),
    ),
    Claim("and wrong with odd functions", "4 %", "≤ 0.1", most(0.1, other_activations(WITH_RELU, ODD))),
    Claim(
        "trained with x², right with |x| and x⁴",
        "not said",
        "≥ 0.99",
        least(0.99, other_activations(WITH_SQUARES, ("|x|", "x⁴"))),
    ),
    Claim(
        "and with ReLU and GELU",
        "not said",
        "≥ 0.95",
        least(0.95, other_activations(WITH_SQUARES, ("relu", "gelu"))),
    ),
)
_GROKKING = (
    Claim(
        "p 59: memorising does not generalise",
        "memorisation first",
        "test ≤ 0.1 when train ≥ 0.99",
        most(0.1, at_moment("test", "memorised", "grokking", decay=True, networks=WIDTHS)),
    ),
    Claim(
        "p 59, decay: it generalises later",
        "generalises",
        "test ≥ 0.95 at the end",
        least(0.95, at_moment("test", "end", "grokking", decay=True, networks=WIDTHS)),
    ),
    Claim(
        "p 59, no decay: it does not by then",
        "decay does it",
        "test ≤ 0.3 at the end",
        most(0.3, at_moment("test", "end", "grokking", decay=False, networks=WIDTHS)),
    ),
    Claim(
        "stage 2: concentration rises from memorising to generalising",
        "sharply",
        "by ≥ 0.1",
        least(0.1, between("concentration", "memorised", "generalised", ratio=False)),
    ),
    Claim(
        "stage 2: the norm still grows",
        "grows",
        "after/before ≥ 1",
        least(1.0, between("norm", "memorised", "generalised", ratio=True)),
    ),
    Claim(
        "stage 3: then the norm shrinks",
        "shrinks",
        "after/before ≤ 1",
        most(1.0, between("norm", "generalised", "end", ratio=True)),
    ),
    Claim(
        "stage 3: and concentration still rises",
        "increases",
        "by ≥ 0",
        least(0.0, between("concentration", "generalised", "end", ratio=False)),
    ),
    Claim("twice the width generalises in fewer steps", "not said", "ratio ≤ 1", most(1.0, doublings)),
    Claim(
        "p 23, ordered pairs: new pairs are wrong when all others are right",
        "completely wrong",
        "≤ 0.1 right when train ≥ 0.99",
        most(0.1, at_moment("new", "memorised", "ordered", decay=True)),
    ),
    Claim(
        "p 23, ordered pairs, decay: in the end new pairs are right",
        "predicted correctly",
        "≥ 0.95",
        least(0.95, at_moment("new", "end", "ordered", decay=True)),
    ),
    Claim(
        "p 23, ordered pairs, no decay: they are not",
        "decay does it",
        "≤ 0.3",
        most(0.3, at_moment("new", "end", "ordered", decay=False)),
    ),
)
CLAIMS = (*_MECHANISM, *_LOTTERY, *_ACTIVATIONS, *_GROKKING)
