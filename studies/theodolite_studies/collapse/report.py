"""What the study of collapse has to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from theodolite.present.text import Column
from theodolite_studies.collapse.networks import FEATURES, HEAD, PENALTY, USUAL
from theodolite_studies.collapse.tied import CHECKS, DECAY
from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Observation,
    Observe,
    at_least,
    at_most,
    count_at_most,
    each,
    per,
    table,
)
from theodolite_studies.framework.paired import POWER, smallest_effect
from theodolite_studies.framework.records import Record, distinct, select

LEVEL = 0.05
EFFECT = 1.5
"""Least ratio of two NC1 that counts."""
NEAR, FLAT = 0.1, 0.3
"""The noise of features near collapse; the one of the claim on the pseudo-inverse."""
WEAK = 2 * DECAY
"""Ties up to it are weak."""
SHARE = 0.8
"""Of blocks at which NC1 falls."""


def flow_name(noise: float, decay: float, offset: float) -> str:
    """The start and the decay of a flow, in words."""
    return f"noise {noise:g}{', λ_H > 0' if decay else ''}{', offset' if offset else ''}"


def falling(profile: Sequence[float]) -> float:
    """The share of steps over depth at which NC1 falls.

    >>> falling([3.0, 2.0, 2.5, 1.0, 0.5])
    0.75
    """
    return float(np.mean([after < before for before, after in pairwise(profile)]))


def _rising(part: str) -> Observe:
    """Checks at which NC1 rises, those of all seeds together."""

    def total(records: list[Record]) -> Array:
        return np.array([float(sum(one["rising"] for one in records))])

    return each(("noise", "decay", "offset"), total, flow_name, part=part)


def _rises_with_tie(rows: list[Record]) -> Array:
    """How often a weaker tie has a larger NC1, all seeds together."""
    count = 0
    for seed in distinct(rows, "seed"):
        own = sorted(select(rows, seed=seed), key=lambda row: -row["tie"])
        count += sum(after["nc1"] >= before["nc1"] for before, after in pairwise(own))
    return np.array([float(count)])


def _ends(value: str) -> Observe:
    return per("part", value, lambda part: "λ_H = 0", part="central", noise=FLAT, decay=0.0, offset=0.0)


def _by_tie(value: str, **only: Any) -> Observe:
    return per(("base", "noise", "tie"), value, "{}, noise {:g}, β = {:g}", part="minima", **only)


def _shares(when: str, *arms: str) -> Observe:
    def share(record: Record) -> float:
        return falling(record[f"profile {when}"])

    keys = ("network",) if len(arms) == 1 else ("network", "arm")
    label = "{}" if len(arms) == 1 else "{}, {}"
    return per(keys, share, label, part="network", arm=lambda arm: arm in arms)


def effects(over: str, under: str, records: Sequence[Record]) -> list[Observation]:
    """Logarithm to base 2 of one arm's NC1 before the head over another's, by seed, for each network."""
    found = []
    for network in distinct(select(records, part="network"), "network"):
        ends = {
            arm: {row["seed"]: row["profile end"][-1] for row in select(records, network=network, arm=arm)}
            for arm in (over, under)
        }
        seeds = sorted(ends[over].keys() & ends[under].keys())
        if seeds:
            ratios = [math.log2(ends[over][seed] / ends[under][seed]) for seed in seeds]
            found.append(Observation(network, np.array(ratios)))
    return found


def _trained(value: str) -> Observe:
    return per("network", f"{value} end", part="network", arm=USUAL)


def _training(value: str) -> Observe:
    """At the end over at the start."""

    def quotient(record: Record) -> float:
        return float(record[f"{value} end"] / record[f"{value} start"])

    return per("network", quotient, part="network", arm=USUAL)


_CHECKED = f"no relative rise > 10⁻⁶ at {CHECKS} checks"
_OCTAVES = f"log₂ of the quotient ≥ {math.log2(EFFECT):.2f} ({EFFECT:g} ×)"

CLAIMS = (
    Claim(
        "NC1 falls along the central path",
        "theorem",
        _CHECKED,
        count_at_most(0, "rise", _rising("central")),
    ),
    Claim(
        "if the head starts at random and follows its gradient, NC1 falls too",
        "not said",
        _CHECKED,
        count_at_most(0, "rise", _rising("joint")),
    ),
    Claim(
        f"central path from noise {FLAT:g} without λ_H: NC1 by the pseudo-inverse vanishes",
        "not said",
        "≤ 0.005 at the end",
        at_most(0.005, _ends("pinv"), level=LEVEL),
    ),
    Claim(
        "and NC1 as a quotient does not",
        "not said",
        "≥ 0.1 at the end",
        at_least(0.1, _ends("end"), level=LEVEL),
    ),
    Claim(
        "the weaker the tie β, the lower NC1 of the minimum",
        "collapse without a tie",
        "at every weaker tie, in each seed",
        count_at_most(0, "rise", each(("base", "noise"), _rises_with_tie, "{}, noise {:g}", part="minima")),
    ),
    Claim(
        "near collapse, the expansion to first order gives NC1 of the minimum",
        "to first order",
        f"error ≤ 5 % at noise {NEAR:g}",
        at_most(0.05, _by_tie("error", noise=NEAR), level=LEVEL),
    ),
    Claim(
        "ten times λ_H lowers NC1 more than ten times λ_W",
        "λ_H matters more",
        f"NC1 with 10 λ_W over NC1 with 10 λ_H ≥ {EFFECT:g}, every tie",
        at_least(EFFECT, _by_tie("ratio"), level=LEVEL),
    ),
    Claim(
        f"and where the tie is weak, β ≤ 2λ_H = {WEAK:g} (after trials)",
        "λ_H matters more",
        f"the same quotient ≥ {EFFECT:g}",
        at_least(EFFECT, _by_tie("ratio", tie=lambda tie: tie <= WEAK), level=LEVEL),
    ),
    Claim(
        "trained networks: NC1 falls from block to block",
        "not said",
        f"at ≥ {SHARE:.0%} of blocks",
        at_least(SHARE, _shares("end", USUAL), level=LEVEL),
    ),
    Claim(
        "and with ten times the decay of a part",
        "not said",
        f"at ≥ {SHARE:.0%} of blocks",
        at_least(SHARE, _shares("end", FEATURES, HEAD), level=LEVEL),
    ),
    Claim(
        "and on examples that were held out",
        "not said",
        f"at ≥ {SHARE:.0%} of blocks",
        at_least(SHARE, _shares("held out", USUAL), level=LEVEL),
    ),
    Claim(
        "networks: ten times the decay before the head lowers the last NC1 more than ten times the head's",
        "λ_H matters more",
        _OCTAVES,
        at_least(math.log2(EFFECT), partial(effects, HEAD, FEATURES), level=LEVEL),
    ),
    Claim(
        "networks: a penalty on what the head reads lowers the last NC1",
        "λ_H lowers it",
        _OCTAVES,
        at_least(math.log2(EFFECT), partial(effects, USUAL, PENALTY), level=LEVEL),
    ),
    Claim(
        "networks: the head agrees with the nearest class mean (NC4)",
        "not said",
        "for ≥ 99 % of training examples",
        at_least(0.99, _trained("nc4"), level=LEVEL),
    ),
    Claim(
        "networks: class means come nearer to a simplex in training (NC2)",
        "not said",
        "≤ half of that at the start",
        at_most(0.5, _training("nc2"), level=LEVEL),
    ),
    Claim(
        "networks: so does the head (NC3)",
        "not said",
        "≤ half of that at the start",
        at_most(0.5, _training("nc3"), level=LEVEL),
    ),
)


def notes(records: Sequence[Record]) -> str:
    """Tables of flows, minima and networks."""
    found = [_flows(records), _minima(records), _profiles(records), _ends_of_training(records)]
    found.append(_effects(records))
    return "\n\n".join(each for each in found if each)


def _mean(rows: Sequence[Record], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def _groups(rows: Sequence[Record], *keys: str) -> list[tuple[tuple[Any, ...], list[Record]]]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.items())


def _numbers(form: str, *names: str) -> list[Column]:
    return [Column(name, form.format) for name in names]


def _flows(records: Sequence[Record]) -> str:
    rows = []
    for part in ("central", "joint"):
        for (noise, decay, offset), own in _groups(select(records, part=part), "noise", "decay", "offset"):
            starts = float(np.mean([row["quotients"][0] for row in own]))
            ends = [_mean(own, key) for key in ("end", "pinv", "nc2 start", "nc2")]
            extremes = (max(row["largest"] for row in own), max(row["peak"] for row in own))
            rows.append((part, flow_name(noise, decay, offset), starts, *ends, *extremes))
    if not rows:
        return ""
    columns: list[str | Column] = [
        "flow",
        "from",
        *_numbers("{:.3g}", "NC1 start", "end", "pinv end", "NC2 start", "end"),
    ]
    columns += [Column("change", "{:+.0e}".format), Column("peak", "{:.3f}".format)]
    title = (
        "flows: means over seeds; change: the largest relative change of NC1 between two checks, of all\n"
        "seeds; peak: the largest NC1 over that at the start, of all seeds"
    )
    return f"{title}\n{table(columns, rows)}"


def _minima(records: Sequence[Record]) -> str:
    names = ("given", "nc1", "pinv", "feature effect", "head effect", "ratio")
    rows = []
    for (base, noise, tie), own in _groups(select(records, part="minima"), "base", "noise", "tie"):
        rows.append((base, noise, tie, *(_mean(own, name) for name in (*names, "error"))))
    if not rows:
        return ""
    shown = ("given", "NC1", "pinv", "10 λ_H", "10 λ_W", "quotient")
    columns: list[str | Column] = ["base", *_numbers("{:g}", "noise", "β"), *_numbers("{:.2g}", *shown)]
    columns += [Column("error", "{:.1%}".format)]
    title = (
        "minima: NC1 of the given features and of the minimum; by what ten times λ_H and ten times λ_W\n"
        "divide it, and the quotient of both; relative error of the expansion to first order"
    )
    return f"{title}\n{table(columns, rows)}"


def _profiles(records: Sequence[Record]) -> str:
    rows: list[tuple[Any, ...]] = []
    for (network,), of_network in _groups(select(records, part="network"), "network"):
        cases = [("at the start", "profile start", select(of_network, arm=USUAL))]
        cases += [(arm, "profile end", own) for (arm,), own in _groups(of_network, "arm")]
        cases += [("usual, held out", "profile held out", select(of_network, arm=USUAL))]
        cases += [("usual, pinv", "pinv end", select(of_network, arm=USUAL))]
        for name, key, own in cases:
            if own:
                rows.append((network, name, *np.exp(np.log([row[key] for row in own]).mean(0))))
    if not rows:
        return ""
    places = max(map(len, rows)) - 2
    filled = [(*row[:2], *(f"{one:.3g}" for one in row[2:]), *[""] * (places + 2 - len(row))) for row in rows]
    columns: list[str | Column] = [
        "network",
        "",
        "before",
        *(f"block {place}" for place in range(places - 1)),
    ]
    title = "networks: NC1 before the first and after each block (geometric means over seeds)"
    return f"{title}\n{table(columns, filled)}"


def _ends_of_training(records: Sequence[Record]) -> str:
    rows = []
    for (network, arm), own in _groups(select(records, part="network"), "network", "arm"):
        means = [_mean(own, f"{name} end") for name in ("loss", "accuracy")]
        means += [_mean(own, "accuracy held out")]
        means += [_mean(own, f"{name} {when}") for name in ("nc2", "nc3") for when in ("start", "end")]
        share = float(np.mean([falling(row["profile end"]) for row in own]))
        rows.append((network, arm, *means, _mean(own, "nc4 end"), share))
    if not rows:
        return ""
    columns: list[str | Column] = [
        "network",
        "arm",
        Column("loss", "{:.2g}".format),
        *_numbers("{:.1%}", "right", "held out"),
    ]
    columns += [*_numbers("{:.2f}", "NC2 start", "end", "NC3 start", "end")]
    columns += _numbers("{:.1%}", "NC4", "falls at")
    title = "networks at the end of training, on training examples; falls at: the share of blocks"
    return f"{title}\n{table(columns, rows)}"


def _effects(records: Sequence[Record]) -> str:
    rows = []
    for what, over, under in (
        ("head ×10 over features ×10", HEAD, FEATURES),
        ("usual over features ×10", USUAL, FEATURES),
        ("usual over head ×10", USUAL, HEAD),
        ("usual over penalty", USUAL, PENALTY),
    ):
        for seen in effects(over, under, records):
            rows.append((what, seen.where, 2**seen.mean, seen.mean, seen.error, smallest_effect(seen.values)))
    if not rows:
        return ""
    columns: list[str | Column] = ["NC1 before the head", "network", Column("quotient", "{:.2f}".format)]
    columns += _numbers("{:.2f}", "log₂", "±", "visible")
    title = (
        "networks: quotients of the last NC1, geometric means over seeds; visible: the smallest difference\n"
        f"of log₂ from its threshold that is found with a power of {POWER:g}"
    )
    return f"{title}\n{table(columns, rows)}"
