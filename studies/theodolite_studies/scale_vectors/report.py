"""What stands below the claims of the scale-vector study, and its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from theodolite.present.svg import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PINK,
    SvgAxis,
    SvgFigure,
    SvgRow,
    head,
    legend,
    ticks,
)
from theodolite_studies.framework.claims import table
from theodolite_studies.framework.figures import line, log10
from theodolite_studies.framework.paired import standing
from theodolite_studies.framework.records import Record, distinct, select
from theodolite_studies.scale_vectors.arms import Arm
from theodolite_studies.scale_vectors.claims import ArmRuns, Compared, best_cell, errors, left_out, one_cell

COLOURS = {"holds": GREEN, "fails": PINK, "unclear": INK}


def notes(data: ArmRuns) -> str:
    """Which tests stand together, what the change of the rule did, and the means of every arm."""
    parts = [_together(data.compared), *_changed(data.compared)] if data.compared else []
    return "\n\n".join([*parts, *_means(data)])


def _together(tests: Sequence[Compared]) -> str:
    stands = standing([one.difference.p for one in tests])
    names = [one.comparison.claim for one, kept in zip(tests, stands, strict=True) if kept]
    return (
        f"{len(tests)} paired tests. By Holm's rule, which lets all of them together err once in twenty "
        f"times, {len(names) or 'none'} of them stand{': ' + '; '.join(names) if names else ''}."
    )


def _changed(tests: Sequence[Compared]) -> Iterator[str]:
    """How often either rule errs, and what the first one said where it said something else."""
    now, before = ([f"{100 * share:.0f}" for share in errors(rule)] for rule in (one_cell, left_out))
    text = (
        "Each arm is judged in the one cell that is best by the mean over all its seeds. Where there is "
        "nothing to find\n(simulated, 8 seeds, 6 cells), this gives a verdict in {} % of cases if one cell "
        "is best in both arms, in {} % if\nall cells tie in both, in {} % if all tie in one of the two. The "
        "rule was changed after the runs: the first,\nfor each seed the cell that is best for the other "
        "seeds, gives one in {}, {} and {} %."
    )
    yield text.format(*now, *before)
    moved = [one for one in tests if not one.doubt and str(one.before) != str(one.difference)]
    if moved:
        rows = [
            (one.comparison.claim, str(one.before), one.before.verdict(below=one.comparison.below))
            for one in moved
        ]
        yield f"Other numbers by the first rule:\n{table(('claim', 'difference', 'verdict'), rows)}"


def _means(data: ArmRuns) -> Iterator[str]:
    """A line for each arm that has runs."""
    rows, open_ones = [], 0
    for arm in data.arms.values():
        cells = data.losses[arm.name]
        best = arm.cells()[best_cell(data.grid(arm))]
        shown = "  ".join(
            f"{math.log2(lr):g}/{decay:g} {np.mean(list(losses.values())):.4f}"
            f"{'*' if (lr, decay) == best else ' '}"
            for (lr, decay), losses in sorted(cells.items())
        )
        edge = _edge(arm, best)
        open_ones += bool(edge)
        rows.append((arm.name, str(max(map(len, cells.values()))), f"{shown}  {edge}".rstrip()))
    if rows:
        yield (
            "Held-out loss, mean over the seeds, by log2 lr and weight decay; * is the best of an arm.\n"
            f"{table(('arm', 'seeds', 'losses'), rows)}\n"
            f"{open_ones} of {len(rows)} bests are at an edge of what was tried, as said beside them: a "
            "better cell may lie beyond."
        )


def _edge(arm: Arm, best: tuple[float, float]) -> str:
    """At which edges of its grid the best cell of an arm is."""
    said = []
    values = {"lr": tuple(2.0**exponent for exponent in arm.exponents), "decay": arm.decays}
    for (name, tried), value in zip(values.items(), best, strict=True):
        if len(tried) == 1:
            said.append(f"only {name}")
        elif value in (min(tried), max(tried)):
            said.append(f"{'lowest' if value == min(tried) else 'highest'} {name}")
    return f"({', '.join(said)})" if said else ""


def figures(data: ArmRuns) -> Iterator[tuple[str, str]]:
    """Name and SVG of each that there are records for."""
    if found := [one for one in data.compared if not one.doubt]:
        yield "differences", differences(found)
    if data.exact:
        yield "flow", flow(data.exact)


def differences(found: Sequence[Compared]) -> str:
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
    for seed in sorted(distinct(records, "seed")):
        mine = sorted(select(records, seed=seed, kind="conservation"), key=lambda record: record["step"])
        steps, values = ([record[name] for record in mine] for name in ("step", "drift"))
        drifts.append(line(np.log2(steps), log10(values), BLUE))
        for record in select(records, seed=seed, kind="noise"):
            colour = GREEN if record["on_gain"] else ORANGE
            noises.append(line(np.log2(record["times"]), log10(record["values"]), colour))
    step, drift = SvgAxis(-11, -4, ticks([-10, -8, -6, -4])), ticks([-4, -3, -2, -1, 0], power=True)
    time, gain = SvgAxis(-3, 6, ticks([-3, 0, 3, 6])), ticks([0, 1, 2, 3], power=True)
    return SvgFigure(
        "Gradient flow of y = W(γ∘n), float64, a line for each seed",
        [
            ("drift of γ² − ‖w‖²", BLUE),
            ("E‖γ‖² under noise, no decay of γ", ORANGE),
            ("with decay", GREEN),
        ],
        [""],
        [
            SvgRow("relative drift", step, SvgAxis(-4, 0, drift), [drifts], "log2 of the step"),
            SvgRow("E‖γ‖²", time, SvgAxis(0, 3, gain), [noises], "log2 of the time"),
        ],
    ).svg()
