"""The claims about refined schedules, a table and the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, PINK, VIOLET, SvgAxis, SvgFigure, SvgRow, ticks
from theodolite.present.text import Column
from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Observation,
    Observe,
    at_least,
    at_most,
    each,
    table,
)
from theodolite_studies.framework.figures import line
from theodolite_studies.framework.records import Record, distinct, select
from theodolite_studies.refinement.problems import PROBLEMS

COLOURS = {"constant": VIOLET, "cosine": ORANGE, "linear": BLUE, "wsd": GREEN, "refined": PINK}
MARKS = 50
"""Points of a schedule that are kept."""


def _ends(records: Sequence[Record], problem: str, schedule: str) -> Array:
    """(seeds, peak learning rates)."""
    own = sorted(select(records, problem=problem, schedule=schedule), key=lambda one: one["seed"])
    return np.array([one["ends"] for one in own], dtype=np.float64)


def _best(ends: Array) -> int:
    """The peak whose mean logarithm is least."""
    return int(np.log(ends).mean(0).argmin())


def tuned(records: Sequence[Record], problem: str, schedule: str) -> Array:
    """The ends at the best peak, one for each seed."""
    ends = _ends(records, problem, schedule)
    return ends[:, _best(ends)]


def _beside_others(records: Sequence[Record]) -> list[Observation]:
    return [
        Observation(f"{problem}, {other}", tuned(records, problem, "linear") / tuned(records, problem, other))
        for problem in distinct(records, "problem")
        for other in ("cosine", "wsd", "constant")
    ]


def _over_linear(own: Sequence[Record]) -> Array:
    problem = own[0]["problem"]
    return tuned(own, problem, "refined") / tuned(own, problem, "linear")


def _factor(place: int) -> Observe:
    """Of the refined schedule at one of its marks."""
    return each("problem", lambda own: np.array([one["factors"][place] for one in own]), schedule="refined")


CLAIMS = (
    Claim(
        "linear decay matches or beats cosine, WSD and constant, each at its best peak",
        "matches or outperforms",
        "end ≤ 1.02 × theirs",
        at_most(1.02, _beside_others, unit=" ×"),
    ),
    Claim(
        "the refined schedule is better than linear decay",
        "further improvements",
        "end < linear's",
        at_most(1.0, each("problem", _over_linear), unit=" ×"),
    ),
    Claim("refined schedules have a warm-up", "yes", "first factor ≤ 0.5", at_most(0.5, _factor(0))),
    Claim(
        "refined schedules fall rapidly near the end",
        "yes",
        "≥ 0.3 of the peak at 3/4 of the run (linear: 0.25)",
        at_least(0.3, _factor(3 * MARKS // 4)),
    ),
    Claim(
        "constant norms give linear decay",
        "exactly",
        "largest difference ≤ 1e-12",
        at_most(
            1e-12,
            each("problem", lambda own: np.array([one["off linear"] for one in own]), schedule="refined"),
        ),
    ),
)


def notes(records: Sequence[Record]) -> str:
    """By problem and schedule: the geometric mean at the best peak, over linear decay's."""
    rows = []
    for problem in distinct(records, "problem"):
        words = [problem]
        for kind in COLOURS:
            ratio = np.exp(np.log(tuned(records, problem, kind) / tuned(records, problem, "linear")).mean())
            peak = PROBLEMS[problem](0).rates[_best(_ends(records, problem, kind))]
            words.append(f"{ratio:.3f} ({peak:.2g})")
        rows.append(words)
    columns = [Column("problem"), *(Column(kind, side="right") for kind in COLOURS)]
    title = "end over that of linear decay, both at their best peak (geometric mean; that peak)"
    return f"{title}\n{table(columns, rows)}"


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """The schedules, and the ends against the peak learning rate."""
    problems = distinct(records, "problem")
    schedules, ends = [], []
    for problem in problems:
        refined = select(records, problem=problem, schedule="refined")
        drawn = [line(np.arange(MARKS) / MARKS, one["factors"], PINK) for one in refined]
        schedules.append([line((0, 1), (1, 0), INK, dashed=True), *drawn])
        least = np.exp(np.log(tuned(records, problem, "linear")).mean())
        across = np.linspace(0, 1, len(PROBLEMS[problem](0).rates))
        means = {kind: np.exp(np.log(_ends(records, problem, kind)).mean(0)) for kind in COLOURS}
        ends.append([line(across, means[kind] / least, colour) for kind, colour in COLOURS.items()])
    run = SvgAxis(0, 1, {0: "0", 0.5: "half", 1: "end"})
    yield (
        "courses",
        SvgFigure(
            "Refined schedules, a line for each seed",
            [("refined", PINK), ("linear decay", INK)],
            problems,
            [SvgRow("factor", run, SvgAxis(0, 1, ticks([0, 0.5, 1])), schedules, "the run")],
        ).svg(),
    )
    rates, up = SvgAxis(0, 1, {0: "least", 1: "largest"}), SvgAxis(0.8, 2, ticks([1, 1.5, 2]), strong=1)
    yield (
        "ends",
        SvgFigure(
            "What the runs end with, over the best of linear decay",
            list(COLOURS.items()),
            problems,
            [SvgRow("end", rates, up, ends, "peak learning rate, powers of √2")],
        ).svg(),
    )
