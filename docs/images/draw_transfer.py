"""Draw transfer.svg, the figure of the README, from the records of the transfer study."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

from theodolite_studies import transfer
from theodolite_studies.framework.records import read_records, select

WIDTHS = {128: "#3a8ee6", 256: "#8a6ee0", 512: "#d3549b", 1024: "#e07b39"}
TITLES = {
    "standard": "the same learning rate at every width",
    "plan": "under the plan",
}
WIDE, HIGH, LEFT, TOP, GAP = 330, 210, 56, 64, 40
INK, FAINT = "#808080", "#80808055"
LOSSES, RATES = (1.45, 1.95), (-11, -5)


def main() -> None:
    """Mean held-out loss over seeds against the base learning rate, a line for each width at depth 4."""
    _, records = read_records(Path(transfer.__file__).with_name("records.jsonl"))
    losses: dict[tuple[str, int, float], list[float]] = {}
    for row in select(records, workload="gpt-enwik8", optimizer="adamw", depth=4, status="finished"):
        key = row["parameterization"], row["width"], math.log2(row["lr"])
        losses.setdefault(key, []).append(row["held_out"])
    width, height = LEFT + 2 * WIDE + GAP + 12, TOP + HIGH + 44
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}" role="img">',
        "<title>Loss against the learning rate at four widths: without a plan the best learning rate moves, "
        "under the plan it stays</title>",
        f'<text x="{LEFT}" y="16">width</text>',
        *(
            f'<text x="{LEFT + 44 + 40 * place}" y="16" fill="{colour}" font-weight="bold">{one}</text>'
            for place, (one, colour) in enumerate(WIDTHS.items())
        ),
    ]
    for index, (name, title) in enumerate(TITLES.items()):
        pieces += panel(LEFT + index * (WIDE + GAP), name, title, losses)
    (Path(__file__).parent / "transfer.svg").write_text("\n".join([*pieces, "</svg>", ""]), encoding="utf-8")


def panel(left: float, name: str, title: str, losses: dict[tuple[str, int, float], list[float]]) -> list[str]:
    """One pair of axes."""

    def at(rate: float, loss: float) -> tuple[float, float]:
        across = (rate - RATES[0]) / (RATES[1] - RATES[0])
        up = (min(loss, LOSSES[1]) - LOSSES[0]) / (LOSSES[1] - LOSSES[0])
        return left + WIDE * across, TOP + HIGH * (1 - up)

    pieces = [
        f'<text x="{left}" y="{TOP - 14}" font-size="14">{title}</text>',
        f'<rect x="{left}" y="{TOP}" width="{WIDE}" height="{HIGH}" fill="none" stroke="{FAINT}"/>',
        f'<text x="{left + WIDE / 2}" y="{TOP + HIGH + 36}" text-anchor="middle">base learning rate</text>',
    ]
    for exponent in range(RATES[0], RATES[1] + 1):
        x, _ = at(exponent, LOSSES[0])
        power = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        pieces.append(f'<text x="{x:.1f}" y="{TOP + HIGH + 17}" text-anchor="middle">2{power}</text>')
    for tenth in range(15, 20):
        _, y = at(RATES[0], tenth / 10)
        pieces.append(f'<path d="M{left} {y:.1f}h{WIDE}" stroke="{FAINT}"/>')
        pieces.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10}</text>')
    for width, colour in WIDTHS.items():
        means = {key[2]: fmean(found) for key, found in losses.items() if key[:2] == (name, width)}
        line = " ".join("{:.1f},{:.1f}".format(*at(rate, loss)) for rate, loss in sorted(means.items()))
        x, y = at(*min(means.items(), key=lambda item: item[1]))
        pieces.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        pieces.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
    return pieces


if __name__ == "__main__":
    main()
