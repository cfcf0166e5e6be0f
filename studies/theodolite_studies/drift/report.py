"""What the study of drift has to show, and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, PINK, SvgAxis, SvgFigure, SvgLine, SvgRow, ticks
from theodolite.present.text import Column
from theodolite_studies.framework.claims import (
    Claim,
    Observation,
    Observe,
    at_least,
    at_most,
    per,
    table,
)
from theodolite_studies.framework.figures import line
from theodolite_studies.framework.records import Record, distinct, select

FLOWS = {"flow": ORANGE, "modified": GREEN, "principal": BLUE}


def _moments(records: Sequence[Record]) -> list[list[Record]]:
    """By seed, the single steps of the second half of training."""
    rows = select(records, part="network", way="moment")
    return [select(rows, seed=seed)[1:] for seed in sorted(distinct(rows, "seed"))]


def _medians(value: Callable[[Record], float]) -> Observe:
    """The median over the moments of each seed."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        found = [float(np.median([value(row) for row in rows])) for rows in _moments(records)]
        return [Observation("network", np.array(found))] if found else []

    return observe


def _turn(row: Record) -> float:
    """By how much the gradient along the top eigenvector turns otherwise than by 1 − lr·λ."""
    return abs(row["growth"] - (1 - 2 * row["edge"]))


def _top(value: str, least: float = 0.0) -> Observe:
    return per("top", value, "lr·λ {:g}", part="quadratic", top=lambda top: top >= least)


def _sharpening(records: Sequence[Record]) -> list[Observation]:
    edges = [row["edge"] for row in select(records, part="network", way="descent")]
    largest, first = (np.array(values) for values in ([max(e) for e in edges], [1.5 - e[0] for e in edges]))
    return [Observation("largest", largest), Observation("1.5 less the first", first)] if edges else []


def _hovering(row: Record) -> float:
    """How far from the edge the second half is, in the mean."""
    return abs(float(np.mean(row["edge"][len(row["edge"]) // 2 :])) - 1)


def _network(way: str, value: Callable[[Record], float]) -> Observe:
    return per("part", value, part="network", way=way)


def _adjusted(records: Sequence[Record]) -> list[Observation]:
    """log10 of the loss of each rule of DAL over that of the best fixed learning rate."""
    rows = select(records, part="rates")
    best = {
        seed: min(row["loss"] for row in select(rows, seed=seed, rate=_fixed) if not row["diverged"])
        for seed in distinct(rows, "seed")
    }

    def value(row: Record) -> float:
        return math.inf if row["diverged"] else math.log10(row["loss"] / best[row["seed"]])

    return list(per("rate", value, rate=lambda rate: not _fixed(rate))(rows))


def _fixed(rate: object) -> bool:
    return not isinstance(rate, str)


CLAIMS = (
    Claim(
        "on a quadratic the principal flow is gradient descent",
        "exact",
        "off ≤ 1e-5 of the way",
        at_most(1e-5, _top("principal")),
    ),
    Claim(
        "the gradient flow is not, near the edge and beyond",
        "not captured",
        "off ≥ 0.1 of the way where lr·λ ≥ 1.5",
        at_least(0.1, _top("flow", 1.5)),
    ),
    Claim(
        "sharpness rises from below to the edge",
        "progressive sharpening",
        "largest lr·λ_max/2 ≥ 1, and ≤ 0.5 at first",
        at_least(1.0, _sharpening),
    ),
    Claim(
        "and stays there",
        "hovers about 2/lr",
        "second half: mean within 0.1 of 1",
        at_most(0.1, _network("descent", _hovering)),
    ),
    Claim(
        "the gradient flow from the same start does not stop there",
        "goes on to sharper places",
        "its largest lr·λ_max/2 ≥ 1.2",
        at_least(1.2, _network("flow", lambda row: max(row["edge"]))),
    ),
    Claim(
        "there a step leaves the gradient flow",
        "yes",
        "off ≥ 0.1 of its length (median)",
        at_least(0.1, _medians(lambda row: row["relative"])),
    ),
    Claim(
        "five eigenpairs and the principal flow say how",
        "follows",
        "≥ 0.5 of the drift explained (median)",
        at_least(0.5, _medians(lambda row: row["explained"])),
    ),
    Claim(
        "better than the modified flow",
        "better",
        "leaves less (median)",
        at_most(1.0, _medians(lambda row: (1 - row["explained"]) / (1 - row["by modified"])), unit=" ×"),
    ),
    Claim(
        "the gradient turns along the top eigenvector as it says",
        "g·u times 1 − lr·λ",
        "off by ≤ 0.2 (median)",
        at_most(0.2, _medians(_turn)),
    ),
    Claim(
        "DAL does not diverge",
        "stable",
        "none of the seeds",
        at_most(0.0, per("rate", "diverged", part="rates", rate=lambda rate: not _fixed(rate))),
    ),
    Claim(
        "DAL is as good as a learning rate that was tuned",
        "without a sweep",
        "loss ≤ that of the best fixed rate (log10)",
        at_most(0.0, _adjusted),
    ),
)


def notes(records: Sequence[Record]) -> str:
    """How far from each flow on quadratics, and the moments of the network in two kinds."""
    found = [
        _far(select(records, part="quadratic")),
        _kinds([row for own in _moments(records) for row in own]),
    ]
    return "\n\n".join(each for each in found if each)


def _far(rows: Sequence[Record]) -> str:
    if not rows:
        return ""
    tops = sorted(distinct(rows, "top"))
    means = [[np.mean([row[name] for row in select(rows, top=top)]) for name in FLOWS] for top in tops]
    title = "off the flow after ten steps on a quadratic, as a share of the way (mean)"
    columns = [Column("lr·λ_max"), *(Column(name, "{:.2g}".format) for name in FLOWS)]
    return f"{title}\n{table(columns, [(top, *own) for top, own in zip(tops, means, strict=True)])}"


def _kinds(moments: Sequence[Record]) -> str:
    """Steps that swing along the top eigenvector, and steps that do not: told apart after looking."""
    if not moments:
        return ""
    columns = [Column("drift"), Column("steps")]
    columns += [Column(name, "{:.2g}".format) for name in ("explained", "by modified", "turn off by")]
    values = (lambda row: row["explained"], lambda row: row["by modified"], _turn)
    rows = []
    for title, own in (
        ("≥ 0.1 of a step", select(moments, relative=lambda far: far >= 0.1)),
        ("less", select(moments, relative=lambda far: far < 0.1)),
    ):
        middle = [np.median([value(row) for row in own]) if own else math.nan for value in values]
        rows.append((title, len(own), *middle))
    title = "single steps of the second half by how far they leave the gradient flow (medians)"
    return f"{title}\n{table(columns, rows)}"


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """The edge along training, and learning rates against losses."""
    network, rates = (select(records, part=part) for part in ("network", "rates"))
    if network:
        yield "edge", _edge(network)
    if rates:
        yield "rates", _rates(rates)


def _edge(rows: Sequence[Record]) -> str:
    seeds = sorted(distinct(rows, "seed"))
    across, up = SvgAxis(0, 1, {0: "0", 1: "end"}), SvgAxis(0, 3.5, ticks([0, 1, 2, 3]), strong=1)
    panels = [
        [
            line(np.arange(len(row["edge"])) / (len(row["edge"]) - 1), row["edge"], colour)
            for way, colour in (("flow", ORANGE), ("descent", BLUE))
            for row in select(rows, way=way, seed=seed)
        ]
        for seed in seeds
    ]
    return SvgFigure(
        "How near to the edge of stability: lr·λ_max/2 along training",
        [("gradient descent", BLUE), ("steps a 20th as long", ORANGE)],
        [f"seed {seed}" for seed in seeds],
        [SvgRow("lr·λ_max/2", across, up, panels, "training")],
    ).svg()


def _rates(rows: Sequence[Record]) -> str:
    seeds, panels = sorted(distinct(rows, "seed")), []
    for seed in seeds:
        own = select(rows, seed=seed, diverged=False)
        fixed = [(math.log2(row["rate"]), math.log10(row["loss"])) for row in select(own, rate=_fixed)]
        lines = [SvgLine(fixed, INK)]
        for row in select(own, rate=lambda rate: not _fixed(rate)):
            height, colour = math.log10(row["loss"]), PINK if row["rate"] == "DAL 1" else GREEN
            lines.append(SvgLine([(-6, height), (0, height)], colour, dashed=True))
        panels.append(lines)
    across, up = (
        SvgAxis(-6, 0, {-6: "2⁻⁶", -3: "2⁻³", 0: "1"}),
        SvgAxis(-4, 0, ticks([-4.0, -2.0, 0.0], power=True)),
    )
    return SvgFigure(
        "The loss after 400 steps; what is missing has diverged",
        [("fixed learning rate", INK), ("DAL, p = 1", PINK), ("DAL, p = 0.5", GREEN)],
        [f"seed {seed}" for seed in seeds],
        [SvgRow("loss", across, up, panels, "learning rate")],
    ).svg()
