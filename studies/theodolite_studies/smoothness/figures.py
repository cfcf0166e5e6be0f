"""The way of gradient-normalized smoothness to a minimum, drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, SvgAxis, SvgFigure, SvgLine, SvgRow, ticks
from theodolite_studies.framework.records import Record
from theodolite_studies.smoothness.claims import TITLES

COLOURS = {"hessian": BLUE, "gauss_newton": GREEN, "fisher": ORANGE, "descent": INK}


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Gaps, γ and λ along the way, of the first seed."""
    first = min(one["seed"] for one in records)
    plain = [one for one in records if one["gamma"] == 1.0 and one["seed"] == first]
    problems = list(dict.fromkeys(one["problem"] for one in plain))
    by_problem = [[one for one in plain if one["problem"] == problem] for problem in problems]
    gaps = [[_line(one, one["gaps"]) for one in own] for own in by_problem]
    stepped = [[one for one in own if "gammas" in one] for own in by_problem]
    radii = [[_line(one, one["gammas"]) for one in own] for own in stepped]
    shifts = [[_line(one, _shifts(one)) for one in own] for own in stepped]
    across = SvgAxis(0, 3.4, ticks([0, 1, 2, 3], power=True))
    down = SvgAxis(-12, 0, ticks([-12, -8, -4, 0], power=True))
    yield (
        "way",
        SvgFigure(
            f"Loss above its minimum, γ and λ = ‖g‖/γ, seed {first}",
            [(TITLES[method], colour) for method, colour in COLOURS.items()],
            problems,
            [
                SvgRow("relative gap", across, down, gaps, "step + 1"),
                SvgRow("γ", across, SvgAxis(-5, 5, ticks([-4, -2, 0, 2, 4], power=True)), radii, "step + 1"),
                SvgRow("λ", across, down, shifts, "step + 1"),
            ],
        ).svg(),
    )


def _shifts(one: Record) -> list[float]:
    return [norm / gamma for norm, gamma in zip(one["norms"], one["gammas"], strict=False)]


def _line(one: Record, values: Sequence[float]) -> SvgLine:
    """Along the steps of a run, in logarithms; γ and λ have no value after the last."""
    points = [
        (math.log10(step + 1), math.log10(value) if value > 0 else math.nan)
        for step, value in zip(one["steps"], values, strict=False)
    ]
    return SvgLine(points, COLOURS[one["method"]])
