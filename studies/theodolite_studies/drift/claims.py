"""What the study of drift has to show, and how it is drawn. Thresholds came before any run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, PINK, SvgAxis, SvgFigure, SvgLine, SvgRow, ticks
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case, Claim, settled

FLOWS = {"flow": ORANGE, "modified": GREEN, "principal": BLUE}


def claims(records: Sequence[Record]) -> list[Claim]:
    """Of the parts that the records hold."""
    found: list[Claim] = []
    if _part(records, "quadratic"):
        found += _of_quadratics(_part(records, "quadratic"))
    if _part(records, "network"):
        found += _of_network(_part(records, "network"))
    if _part(records, "rates"):
        found += _of_rates(_part(records, "rates"))
    return found


def figures(records: Sequence[Record]) -> Iterable[tuple[str, str]]:
    """The edge along training, and learning rates against losses."""
    if _part(records, "network"):
        yield "edge", _edge(_part(records, "network"))
    if _part(records, "rates"):
        yield "rates", _rates(_part(records, "rates"))


def notes(records: Sequence[Record]) -> str:
    """How far from each flow on quadratics, and the moments of the network in two kinds."""
    found = [_far(_part(records, "quadratic")), _kinds(_part(records, "network"))]
    return "\n\n".join(each for each in found if each)


def _far(rows: Sequence[Record]) -> str:
    if not rows:
        return ""
    lines = ["off the flow after ten steps on a quadratic, as a share of the way (mean)"]
    lines.append("  ".join([f"{'lr·λ_max':<9}", *(f"{name:>10}" for name in FLOWS)]))
    for top in sorted({row["top"] for row in rows}):
        own = [row for row in rows if row["top"] == top]
        lines.append(
            "  ".join([f"{top:<9g}", *(f"{np.mean([row[name] for row in own]):>10.2g}" for name in FLOWS)])
        )
    return "\n".join(lines)


def _kinds(rows: Sequence[Record]) -> str:
    """Steps that swing along the top eigenvector, and steps that do not: told apart after looking."""
    moments = [row for seed in _seeds(rows) for row in _moments(rows, seed)]
    if not moments:
        return ""
    names = ("steps", "explained", "by modified", "turn off by")
    lines = ["single steps of the second half by how far they leave the gradient flow (medians)"]
    lines.append("  ".join([f"{'drift':<15}", *(f"{name:>11}" for name in names)]))
    for title, own in (
        ("≥ 0.1 of a step", [row for row in moments if row["relative"] >= 0.1]),
        ("less", [row for row in moments if row["relative"] < 0.1]),
    ):
        turns = [abs(row["growth"] - (1 - 2 * row["edge"])) for row in own]
        middle = [
            *(np.median([row[name] for row in own]) if own else math.nan for name in names[1:3]),
            np.median(turns) if own else math.nan,
        ]
        lines.append("  ".join([f"{title:<15}", f"{len(own):>11}", *(f"{value:>11.2g}" for value in middle)]))
    return "\n".join(lines)


def _of_quadratics(rows: Sequence[Record]) -> list[Claim]:
    tops = sorted({row["top"] for row in rows})

    def cases(name: str, chosen: Iterable[float]) -> list[Case]:
        return [
            Case(f"lr·λ {top:g}", np.array([row[name] for row in rows if row["top"] == top]))
            for top in chosen
        ]

    return [
        settled(
            "on a quadratic the principal flow is gradient descent",
            "exact",
            "off ≤ 1e-5 of the way",
            cases("principal", tops),
            limit=1e-5,
            below=True,
        ),
        settled(
            "the gradient flow is not, near the edge and beyond",
            "not captured",
            "off ≥ 0.1 of the way where lr·λ ≥ 1.5",
            cases("flow", [top for top in tops if top >= 1.5]),
            limit=0.1,
            below=False,
        ),
    ]


def _of_network(rows: Sequence[Record]) -> list[Claim]:
    descent, flow = (_ways(rows, way) for way in ("descent", "flow"))
    half = [np.array(row["edge"][len(row["edge"]) // 2 :]) for row in descent]
    edged = [_moments(rows, seed) for seed in _seeds(rows)]
    return [
        settled(
            "sharpness rises from below to the edge",
            "progressive sharpening",
            "largest lr·λ_max/2 ≥ 1, and ≤ 0.5 at first",
            [
                Case("largest", np.array([max(row["edge"]) for row in descent])),
                Case("1.5 less the first", np.array([1.5 - row["edge"][0] for row in descent])),
            ],
            limit=1.0,
            below=False,
        ),
        settled(
            "and stays there",
            "hovers about 2/lr",
            "second half: mean within 0.1 of 1",
            [Case("network", np.array([abs(edge.mean() - 1) for edge in half]))],
            limit=0.1,
            below=True,
        ),
        settled(
            "the gradient flow from the same start does not stop there",
            "goes on to sharper places",
            "its largest lr·λ_max/2 ≥ 1.2",
            [Case("network", np.array([max(row["edge"]) for row in flow]))],
            limit=1.2,
            below=False,
        ),
        settled(
            "there a step leaves the gradient flow",
            "yes",
            "off ≥ 0.1 of its length (median)",
            [Case("network", _medians(edged, lambda row: row["relative"]))],
            limit=0.1,
            below=False,
        ),
        settled(
            "five eigenpairs and the principal flow say how",
            "follows",
            "≥ 0.5 of the drift explained (median)",
            [Case("network", _medians(edged, lambda row: row["explained"]))],
            limit=0.5,
            below=False,
        ),
        settled(
            "better than the modified flow",
            "better",
            "leaves less (median)",
            [Case("network", _medians(edged, lambda row: (1 - row["explained"]) / (1 - row["by modified"])))],
            limit=1.0,
            below=True,
            unit=" ×",
        ),
        settled(
            "the gradient turns along the top eigenvector as it says",
            "g·u times 1 − lr·λ",
            "off by ≤ 0.2 (median)",
            [Case("network", _medians(edged, lambda row: abs(row["growth"] - (1 - 2 * row["edge"]))))],
            limit=0.2,
            below=True,
        ),
    ]


def _of_rates(rows: Sequence[Record]) -> list[Claim]:
    adjusted = [rate for rate in dict.fromkeys(row["rate"] for row in rows) if isinstance(rate, str)]
    best = {
        seed: min(row["loss"] for row in rows if row["seed"] == seed and _fixed(row) and not row["diverged"])
        for seed in _seeds(rows)
    }
    return [
        settled(
            "DAL does not diverge",
            "stable",
            "none of the seeds",
            [
                Case(rate, np.array([float(row["diverged"]) for row in rows if row["rate"] == rate]))
                for rate in adjusted
            ],
            limit=0.0,
            below=True,
        ),
        settled(
            "DAL is as good as a learning rate that was tuned",
            "without a sweep",
            "loss ≤ that of the best fixed rate (log10)",
            [
                Case(
                    rate,
                    np.array(
                        [
                            math.inf if row["diverged"] else math.log10(row["loss"] / best[row["seed"]])
                            for row in rows
                            if row["rate"] == rate
                        ]
                    ),
                )
                for rate in adjusted
            ],
            limit=0.0,
            below=True,
        ),
    ]


def _edge(rows: Sequence[Record]) -> str:
    across, up = SvgAxis(0, 1, {0: "0", 1: "end"}), SvgAxis(0, 3.5, ticks([0, 1, 2, 3]), strong=1)
    panels = [
        [
            SvgLine(
                [(place / (len(row["edge"]) - 1), value) for place, value in enumerate(row["edge"])], colour
            )
            for way, colour in (("flow", ORANGE), ("descent", BLUE))
            for row in _ways(rows, way)
            if row["seed"] == seed
        ]
        for seed in _seeds(rows)
    ]
    return SvgFigure(
        "How near to the edge of stability: lr·λ_max/2 along training",
        [("gradient descent", BLUE), ("steps a 20th as long", ORANGE)],
        [f"seed {seed}" for seed in _seeds(rows)],
        [SvgRow("lr·λ_max/2", across, up, panels, "training")],
    ).svg()


def _rates(rows: Sequence[Record]) -> str:
    panels = []
    for seed in _seeds(rows):
        own = [row for row in rows if row["seed"] == seed and not row["diverged"]]
        fixed = [(math.log2(row["rate"]), math.log10(row["loss"])) for row in own if _fixed(row)]
        lines = [SvgLine(fixed, INK)]
        for row in own:
            if not _fixed(row):
                height = math.log10(row["loss"])
                lines.append(
                    SvgLine([(-6, height), (0, height)], PINK if row["rate"] == "DAL 1" else GREEN, True)
                )
        panels.append(lines)
    return SvgFigure(
        "The loss after 400 steps; what is missing has diverged",
        [("fixed learning rate", INK), ("DAL, p = 1", PINK), ("DAL, p = 0.5", GREEN)],
        [f"seed {seed}" for seed in _seeds(rows)],
        [
            SvgRow(
                "loss",
                SvgAxis(-6, 0, {-6: "2⁻⁶", -3: "2⁻³", 0: "1"}),
                SvgAxis(-4, 0, ticks([-4.0, -2.0, 0.0], power=True)),
                panels,
                "learning rate",
            )
        ],
    ).svg()


def _part(records: Sequence[Record], part: str) -> list[Record]:
    return sorted((row for row in records if row["part"] == part), key=lambda row: row["seed"])


def _ways(rows: Sequence[Record], way: str) -> list[Record]:
    return [row for row in rows if row["way"] == way]


def _moments(rows: Sequence[Record], seed: int) -> list[Record]:
    """Those of the second half of training."""
    own = [row for row in _ways(rows, "moment") if row["seed"] == seed]
    return own[1:]


def _medians(moments: Sequence[Sequence[Record]], value: Any) -> NDArray[np.float64]:
    return np.array([float(np.median([value(row) for row in rows])) for rows in moments])


def _seeds(rows: Sequence[Record]) -> list[int]:
    return sorted({row["seed"] for row in rows})


def _fixed(row: Record) -> bool:
    return not isinstance(row["rate"], str)
