"""The figures of the scale-vector study: paired differences, and the gradient flow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from theodolite.present.svg import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PINK,
    SvgAxis,
    SvgFigure,
    SvgLine,
    SvgRow,
    head,
    legend,
    ticks,
)
from theodolite_studies.framework.records import Record
from theodolite_studies.scale_vectors.claims import Result, compared
from theodolite_studies.scale_vectors.study import EXACT, Setting

COLOURS = {"holds": GREEN, "fails": PINK, "unclear": INK}


def figures(records: Sequence[Record], setting: Setting) -> Iterator[tuple[str, str]]:
    """Name and SVG of each that there are records for."""
    found = [each for each in compared(records, setting) if not each.doubt]
    if found:
        yield "differences", differences(found)
    exact = [record for record in records if record["part"] == EXACT]
    if exact:
        yield "flow", flow(exact)


def differences(found: Sequence[Result]) -> str:
    """A line for each comparison: its seeds as dots, and the interval of their mean."""
    left, wide, line, top = 220, 380, 22, 62
    values = [float(value) for each in found for value in each.difference.differences if math.isfinite(value)]
    most = 1.1 * max(map(abs, values), default=0.01)
    height = top + line * len(found) + 34

    def across(value: float) -> float:
        return left + wide * (min(max(value, -most), most) + most) / (2 * most)

    pieces = [
        head(left + wide + 20, height, "Held-out loss, difference in nats: each seed, mean, 95 % interval"),
        legend([("as claimed", GREEN), ("the other way", PINK), ("unclear", INK)]),
        f'<path d="M{across(0):.1f} {top - 10}V{height - 24}" stroke="{INK}"/>',
    ]
    for place, each in enumerate(found):
        one, y, colour = each.difference, top + line * place, COLOURS[each.verdict]
        low, high = one.interval
        dots = "".join(
            f"M{across(float(value)):.1f} {y}h0" for value in one.differences if not math.isnan(value)
        )
        pieces.append(
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(each.comparison.claim)}</text>'
        )
        if math.isfinite(low):
            pieces.append(
                f'<path d="M{across(low):.1f} {y}H{across(high):.1f}" stroke="{colour}" stroke-width="7" '
                'stroke-opacity="0.4"/>'
            )
            mean = across(one.mean)
            pieces.append(f'<path d="M{mean:.1f} {y - 7}v14" stroke="{colour}" stroke-width="2"/>')
        pieces.append(f'<path d="{dots}" stroke="{colour}" stroke-width="4" stroke-linecap="round"/>')
    decade = 10.0 ** math.floor(math.log10(most))
    step = max(digit * decade for digit in (1, 2, 5) if digit * decade <= most)
    for value in (-step, 0.0, step):
        x = across(value)
        pieces.append(f'<path d="M{x:.1f} {top - 10}V{height - 24}" stroke="{FAINT}"/>')
        pieces.append(
            f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{f"{value:+g}" if value else 0}</text>'
        )
    return "\n".join([*pieces, "</svg>", ""])


def flow(records: Sequence[Record]) -> str:
    """Drift of the conserved quantity against the step, and the gain under noise against time."""
    drifts, noises = [], []
    for seed in sorted({record["seed"] for record in records}):
        mine = [record for record in records if record["seed"] == seed]
        points = [
            (math.log2(record["step"]), math.log10(record["drift"]))
            for record in sorted(mine, key=lambda record: record.get("step", 0.0))
            if record["kind"] == "conservation"
        ]
        drifts.append(SvgLine(points, BLUE))
        for record in mine:
            if record["kind"] == "noise":
                spots = [
                    (math.log2(time), math.log10(value))
                    for time, value in zip(record["times"], record["values"], strict=True)
                ]
                noises.append(SvgLine(spots, GREEN if record["on_gain"] else ORANGE))
    return SvgFigure(
        "Gradient flow of y = W(γ∘n), float64, a line for each seed",
        [
            ("drift of γ² − ‖w‖²", BLUE),
            ("E‖γ‖² under noise, no decay of γ", ORANGE),
            ("with decay", GREEN),
        ],
        [""],
        [
            SvgRow(
                "relative drift",
                SvgAxis(-11, -4, ticks([-10, -8, -6, -4])),
                SvgAxis(-4, 0, ticks([-4, -3, -2, -1, 0], power=True)),
                [drifts],
                "log2 of the step",
            ),
            SvgRow(
                "E‖γ‖²",
                SvgAxis(-3, 6, ticks([-3, 0, 3, 6])),
                SvgAxis(0, 3, ticks([0, 1, 2, 3], power=True)),
                [noises],
                "log2 of the time",
            ),
        ],
    ).svg()
