"""What the parts on games have to show, and how they are drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, SvgAxis, SvgFigure, SvgRow, ticks
from theodolite.present.text import Column
from theodolite_studies.drift.dirac import FINE, LONG, SHORT, SIZES, TIME, WAYS
from theodolite_studies.drift.ring import ARMS, MOMENTS, TUNING
from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Observation,
    Observe,
    at_least,
    at_most,
    per,
    table,
)
from theodolite_studies.framework.figures import band, line, log10
from theodolite_studies.framework.paired import Paired
from theodolite_studies.framework.records import Record, distinct, select

LEVEL = 0.05
CLOSE = 0.05
STABLE = 0.5
"""A run with a distance up to this, a third of the ring's radius, is stable."""
LATE = 3
"""The distance of a run is the mean over its last third of measurements."""
COLOURS = dict(zip(ARMS, (ORANGE, BLUE, GREEN), strict=True))


def explained(row: Record) -> float:
    """The share of the drift that the modified flow explains."""
    return float(1 - row["unexplained"] / row["distance"])


def _departure(row: Record) -> float:
    return abs(row["radius"] - 1)


def _dirac(value: str, game: str) -> Observe:
    """At every step size, over the fixed time."""
    values = {"radius": lambda row: row["radius"], "departure": _departure, "explained": explained}
    return per("h", values[value], "h {:g}", part="dirac", game=game, time=TIME)


def _long(game: str) -> Observe:
    return per("game", _departure, f"{{}}, {LONG} steps", part="dirac", game=game, steps=LONG)


def _alternating(records: Sequence[Record]) -> list[Observation]:
    return [*_dirac("departure", "alternating")(records), *_long("alternating")(records)]


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The order of an error: the slope of its logarithm over that of the step size.

    >>> round(slope([0.1, 0.2, 0.4], [3e-4, 12e-4, 48e-4]), 6)
    2.0
    """
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _orders(records: Sequence[Record]) -> list[Observation]:
    """How far the order of what the modified flow leaves of the DiracGAN's drift is from 2, by start."""
    found = []
    rows = select(records, part="dirac", time=SHORT)
    for game in WAYS:
        own = select(rows, game=game)
        values = [abs(_slope_of(select(own, seed=seed), FINE) - 2) for seed in distinct(own, "seed")]
        if values:
            found.append(Observation(game, np.array(values)))
    return found


def _slope_of(rows: Sequence[Record], sizes: Sequence[float]) -> float:
    own = [row for row in rows if row["h"] in sizes]
    return slope([row["h"] for row in own], [row["unexplained"] for row in own])


def _smallest(records: Sequence[Record]) -> list[Observation]:
    """The share explained of the GAN's drift at the second smallest step."""
    rows = select(records, part="rounds")
    sizes = sorted(distinct(rows, "h"))[1:2]
    label = "{}, step {}"
    return list(per(("game", "moment"), explained, label, part="rounds", h=lambda h: h in sizes)(records))


def _round_orders(records: Sequence[Record]) -> list[Observation]:
    """How far the order of what the modified flow leaves of some rounds is from 3, by seed."""
    found = []
    rows = select(records, part="rounds")
    sizes = sorted(distinct(rows, "h"))[:2]
    for game in distinct(rows, "game"):
        for moment in MOMENTS:
            own = select(rows, game=game, moment=moment)
            values = [abs(_slope_of(select(own, seed=seed), sizes) - 3) for seed in distinct(own, "seed")]
            if values:
                found.append(Observation(f"{game}, step {moment}", np.array(values)))
    return found


def late(row: Record) -> Array:
    """The distance of each seed's samples at the end of a run of the ring; infinite if it diverged."""
    last = [own[-max(1, len(own) // LATE) :] for own in row["distances"]]
    return np.array([math.inf if None in own else float(np.mean(own)) for own in last])


def tuned(records: Sequence[Record], arm: str) -> tuple[float, Array]:
    """The learning rate that is best on the seeds for tuning, and the distances of the other seeds at it."""
    rows = select(records, part="ring", arm=arm)
    best = min(rows, key=lambda row: float(late(row)[:TUNING].mean()))
    return best["lr"], late(best)[TUNING:]


def largest(records: Sequence[Record], arm: str) -> Array:
    """The largest learning rate at which each seed is stable; half of the smallest if it never is."""
    rows = select(records, part="ring", arm=arm)
    rates = np.array([row["lr"] for row in rows])
    is_stable = np.array([late(row)[TUNING:] <= STABLE for row in rows])
    return np.where(is_stable, rates[:, None], rates.min() / 2).max(0)


def _ratio(arm: str, other: str) -> Observe:
    """The distances of one arm over those of another, each at its own tuned rate."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        if not _has_arms(records):
            return []
        (_, first), (_, second) = (tuned(records, one) for one in (arm, other))
        return [Observation(arm, first / second)]

    return observe


def _octaves(arm: str, other: str) -> Observe:
    """By how many factors of two the largest stable rate of one arm is above that of another."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        if not _has_arms(records):
            return []
        return [Observation(arm, np.log2(largest(records, arm) / largest(records, other)))]

    return observe


def _has_arms(records: Sequence[Record]) -> bool:
    return all(select(records, part="ring", arm=arm) for arm in ARMS)


CLAIMS = (
    Claim(
        "DiracGAN: simultaneous steps leave the circle",
        "spiral outwards",
        f"radius ≥ 1.05 of the start's after the time {TIME:g}",
        at_least(1.05, _dirac("radius", "simultaneous"), level=LEVEL),
    ),
    Claim(
        "DiracGAN: the modified flow explains the drift of simultaneous steps",
        "follows",
        "≥ 0.95 of the drift",
        at_least(0.95, _dirac("explained", "simultaneous"), level=LEVEL),
    ),
    Claim(
        "DiracGAN: alternating steps of equal rates stay on the circle",
        "stay near",
        f"radius within {CLOSE} of the start's",
        at_most(CLOSE, _alternating, level=LEVEL),
    ),
    Claim(
        "DiracGAN: the modified flow explains the drift of alternating steps",
        "follows",
        "≥ 0.95 of the drift",
        at_least(0.95, _dirac("explained", "alternating"), level=LEVEL),
    ),
    Claim(
        "DiracGAN: what the modified flow leaves is of the second order",
        "h² over a fixed time",
        f"order within 0.1 of 2, h ≤ {max(FINE)}",
        at_most(0.1, _orders, level=LEVEL),
    ),
    Claim(
        "DiracGAN: with interaction terms cancelled, steps stay on the circle",
        "stable",
        f"radius within {CLOSE} of the start's",
        at_most(CLOSE, _long("interaction cancelled"), level=LEVEL),
    ),
    Claim(
        "DiracGAN: consensus with γ = h/2 only balances the drift",
        "–",
        f"radius within {CLOSE} of the start's",
        at_most(CLOSE, _long("consensus, γ = h/2"), level=LEVEL),
    ),
    Claim(
        "DiracGAN: consensus with γ = h goes to the solution",
        "–",
        f"radius ≤ 0.5 of the start's after {LONG} steps",
        at_most(0.5, per("game", "radius", part="dirac", game="consensus, γ = h"), level=LEVEL),
    ),
    Claim(
        "ring: the modified flow explains the drift of small steps",
        "follows",
        "≥ 0.95 of the drift of 5 rounds, h = 0.0125",
        at_least(0.95, _smallest, level=LEVEL),
    ),
    Claim(
        "ring: what it leaves is of the third order per round",
        "h³ per round",
        "order within 0.25 of 3",
        at_most(0.25, _round_orders, level=LEVEL),
    ),
    Claim(
        "ring: cancelled steps are stable at larger rates than simultaneous ones",
        "more stable",
        "largest stable rate: ≥ 1 octave above",
        at_least(1.0, _octaves("cancelled", "simultaneous"), unit=" octaves", level=LEVEL),
    ),
    Claim(
        "ring: alternating steps are stable at rates as large as simultaneous ones",
        "more stable",
        "largest stable rate: not below",
        at_least(0.0, _octaves("alternating", "simultaneous"), unit=" octaves", level=LEVEL),
    ),
    Claim(
        "ring: tuned, cancelled steps have better samples than simultaneous ones",
        "better",
        "distance ≤ that of simultaneous",
        at_most(1.0, _ratio("cancelled", "simultaneous"), unit=" ×", level=LEVEL),
    ),
    Claim(
        "ring: tuned, cancelled steps have better samples than alternating ones",
        "better",
        "distance ≤ that of alternating",
        at_most(1.0, _ratio("cancelled", "alternating"), unit=" ×", level=LEVEL),
    ),
)


def notes(records: Sequence[Record]) -> str:
    """Ends of long runs, what the modified flow explains at each step size, and the arms of the ring."""
    found = [
        _ends(select(records, part="dirac", steps=LONG)),
        _shares(select(records, part="rounds")),
        _arms(records) if _has_arms(records) else "",
    ]
    return "\n\n".join(each for each in found if each)


def _ends(rows: Sequence[Record]) -> str:
    if not rows:
        return ""
    columns = [Column(name, "{:.3f}".format) for name in ("mean", "least", "largest")]
    values = {game: [row["radius"] for row in select(rows, game=game)] for game in distinct(rows, "game")}
    title = f"DiracGAN: radius over the start's after {LONG} steps of h = 0.2, over the starts"
    body = [(game, np.mean(own), min(own), max(own)) for game, own in values.items()]
    return f"{title}\n{table([Column('steps'), *columns], body)}"


def _shares(rows: Sequence[Record]) -> str:
    if not rows:
        return ""
    columns = [Column(name) for name in ("steps", "after", "h")]
    names = ("drift/length", "modified", "self terms alone", "interaction alone")
    columns += [Column(name, "{:.2g}".format) for name in names]
    body = []
    for game in distinct(rows, "game"):
        for moment in distinct(rows, "moment"):
            for h in sorted(distinct(rows, "h"), reverse=True):
                own = select(rows, game=game, moment=moment, h=h)
                means = [np.mean([row["distance"] / row["length"] for row in own])]
                for left in ("unexplained", "self only", "interaction only"):
                    means.append(np.mean([1 - row[left] / row["distance"] for row in own]))
                body.append((game, moment, h, *means))
    title = "ring: the drift of 5 rounds, and the share of it that each flow explains (means)"
    return f"{title}\n{table(columns, body)}"


def _arms(records: Sequence[Record]) -> str:
    body = []
    for arm in ARMS:
        lr, values = tuned(records, arm)
        body.append((arm, lr, float(values.mean()), float(np.median(largest(records, arm)))))
    columns = [Column("steps"), *(Column(name, "{:.3g}".format) for name in ("tuned lr", "distance"))]
    columns += [Column("largest stable lr (median)", "{:.3g}".format)]
    floor = select(records, part="ring")[0]["floor"]
    title = f"ring: distance of samples at the tuned rate (of data from data: {floor:.3f})"
    compared = []
    for other in ("simultaneous", "alternating"):
        (_, first), (_, second) = (tuned(records, one) for one in ("cancelled", other))
        compared.append(f"cancelled less {other}: {Paired(first - second)}")
    return "\n".join([title, table(columns, body), *compared])


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Distances from both flows over the step size, and distances of samples over the learning rate."""
    if rows := select(records, part="dirac", time=TIME):
        yield "dirac", _flows(rows)
    if _has_arms(records):
        yield "ring", _rates(records)


def _flows(rows: Sequence[Record]) -> str:
    panels = []
    for game in WAYS:
        lines = []
        for name, colour in (("distance", ORANGE), ("unexplained", GREEN)):
            values = [
                [row[name] for row in sorted(select(rows, game=game, seed=seed), key=lambda row: row["h"])]
                for seed in distinct(rows, "seed")
            ]
            lines.append(band(np.log2(SIZES), log10(np.ravel(values)).reshape(-1, len(SIZES)), colour))
        panels.append(lines)
    low, high = math.log2(min(SIZES)), math.log2(max(SIZES))
    across = SvgAxis(low, high, {math.log2(h): f"{h:g}" for h in SIZES})
    up = SvgAxis(-4, 1, ticks([-4.0, -2.0, 0.0], power=True))
    return SvgFigure(
        f"DiracGAN: distance of steps from each flow after the time {TIME:g}",
        [("from the flow", ORANGE), ("from the modified flow", GREEN)],
        list(WAYS),
        [SvgRow("distance", across, up, panels, "step size h")],
    ).svg()


def _rates(records: Sequence[Record]) -> str:
    rows = select(records, part="ring")
    rates = sorted(distinct(rows, "lr"))
    panels = []
    for arm in ARMS:
        own = sorted(select(rows, arm=arm), key=lambda row: row["lr"])
        values = np.array([late(row)[TUNING:] for row in own])
        # What has diverged is drawn at the upper edge.
        values = np.log10(np.where(np.isfinite(values), values, 10.0))
        lines = [line(np.log2([row["lr"] for row in own]), each, COLOURS[arm]) for each in values.T]
        floor = math.log10(own[0]["floor"])
        ends = [math.log2(rates[0]), math.log2(rates[-1])]
        panels.append([*lines, line(ends, [floor, floor], INK, dashed=True)])
    across = SvgAxis(
        math.log2(rates[0]), math.log2(rates[-1]), {math.log2(rate): f"{rate:g}" for rate in rates[::4]}
    )
    up = SvgAxis(-1.5, 1, ticks([-1.0, 0.0, 1.0], power=True))
    return SvgFigure(
        "Ring: distance of samples from data, a line for each seed",
        [*COLOURS.items(), ("of data from data", INK)],
        list(ARMS),
        [SvgRow("distance", across, up, panels, "learning rate")],
    ).svg()
