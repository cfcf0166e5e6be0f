"""Is a schedule that was refined from a first run's gradient norms a better one?

For each problem and seed, every schedule is run over a range of peak learning rates. The refined schedule is
made from a first run, with linear decay at the learning rate that was best for it and with noise of its own;
then it is run over the same range. Each schedule is judged at the peak that is best for it in the mean over
the seeds, and compared seed by seed.

References:
    Defazio et al., When, why and how much? Adaptive learning rate scheduling by refinement, 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from theodolite.optimizers.schedule import LRFactor, Refined, refine
from theodolite.present.svg import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgLine,
    SvgRow,
    ticks,
)
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Study
from theodolite_studies.framework.verdict import Case, Claim, settled
from theodolite_studies.refinement.problems import PROBLEMS, Problem, train

FIXED = ("constant", "cosine", "linear", "wsd")
COLOURS = {"constant": VIOLET, "cosine": ORANGE, "linear": BLUE, "wsd": GREEN, "refined": PINK}
SEEDS = 8
MARKS = 50
"""Points of a course that are kept."""


def cells(small: bool) -> list[Cell]:
    """Problems times seeds."""
    problems = ("quadratic", "logistic") if small else tuple(PROBLEMS)
    return [
        {"problem": problem, "seed": seed} for problem in problems for seed in range(3 if small else SEEDS)
    ]


def run(cell: Cell) -> Iterator[Record]:
    """A record for each schedule: what came of every peak learning rate."""
    problem = PROBLEMS[cell["problem"]](cell["seed"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from compared(problem, cell["seed"])
    finally:
        torch.set_num_threads(threads)


def compared(problem: Problem, seed: int) -> Iterator[Record]:
    """All schedules on one problem."""
    steps, rates = problem.steps, torch.tensor(problem.rates, dtype=torch.float64)

    def judged(courses: list[list[float]], lrs: torch.Tensor, noise: int) -> tuple[Any, Any]:
        factors = torch.tensor(courses, dtype=torch.float64).repeat_interleave(len(lrs), 0)
        ends, norms = train(problem, factors, lrs.repeat(len(courses)), noise)
        return ends.view(len(courses), -1).tolist(), norms

    fixed = [[LRFactor(kind, steps)(step) for step in range(steps)] for kind in FIXED]
    found, _ = judged(fixed, rates, seed)
    for kind, ends in zip(FIXED, found, strict=True):
        yield {"schedule": kind, "ends": _short(ends)}
    linear = FIXED.index("linear")
    best = int(np.argmin(found[linear]))
    _, norms = judged([fixed[linear]], rates[best : best + 1], seed + 100)  # a first run has other noise
    refined = refine(norms[0].tolist(), norm=problem.norm)  # type: ignore[arg-type]
    (ends,), _ = judged([list(refined.factors)], rates, seed)
    same = refine([float(norms[0, 0])] * steps)
    yield {
        "schedule": "refined",
        "ends": _short(ends),
        "factors": _marked(refined),
        "norms": _short(norms[0, :: max(1, steps // MARKS)].tolist()),
        "off linear": max(abs(same(step) - LRFactor("linear", steps)(step)) for step in range(steps)),
    }


def claims(records: Sequence[Record]) -> list[Claim]:
    """Thresholds were written down before anything was run."""
    problems = list(dict.fromkeys(record["problem"] for record in records))
    refined = {problem: _of(records, problem, "refined") for problem in problems}
    return [
        settled(
            "linear decay matches or beats cosine, WSD and constant, each at its best peak",
            "matches or outperforms",
            "end ≤ 1.02 × theirs",
            [
                Case(
                    f"{problem}, {other}", tuned(records, problem, "linear") / tuned(records, problem, other)
                )
                for problem in problems
                for other in ("cosine", "wsd", "constant")
            ],
            limit=1.02,
            below=True,
            unit=" ×",
        ),
        settled(
            "the refined schedule is better than linear decay",
            "further improvements",
            "end < linear's",
            [
                Case(problem, tuned(records, problem, "refined") / tuned(records, problem, "linear"))
                for problem in problems
            ],
            limit=1.0,
            below=True,
            unit=" ×",
        ),
        settled(
            "refined schedules have a warm-up",
            "yes",
            "first factor ≤ 0.5",
            [Case(problem, _values(refined[problem], 0)) for problem in problems],
            limit=0.5,
            below=True,
        ),
        settled(
            "refined schedules fall rapidly near the end",
            "yes",
            "≥ 0.3 of the peak at 3/4 of the run (linear: 0.25)",
            [Case(problem, _values(refined[problem], 3 * MARKS // 4)) for problem in problems],
            limit=0.3,
            below=False,
        ),
        settled(
            "constant norms give linear decay",
            "exactly",
            "largest difference ≤ 1e-12",
            [
                Case(problem, np.array([record["off linear"] for record in refined[problem]]))
                for problem in problems
            ],
            limit=1e-12,
            below=True,
        ),
    ]


def tuned(records: Sequence[Record], problem: str, schedule: str) -> NDArray[np.float64]:
    """The ends, one for each seed, at the peak whose mean logarithm is least."""
    ends = np.array([record["ends"] for record in _of(records, problem, schedule)], dtype=np.float64)
    return ends[:, np.log(ends).mean(0).argmin()]


def figures(records: Sequence[Record]) -> Iterable[tuple[str, str]]:
    """The courses, and the ends against the peak learning rate."""
    problems = list(dict.fromkeys(record["problem"] for record in records))
    across = SvgAxis(0, 1, {0: "0", 0.5: "half", 1: "end"})
    up = SvgAxis(0, 1, ticks([0, 0.5, 1]))
    straight = SvgLine([(0, 1), (1, 0)], INK, dashed=True)
    panels = [
        [straight, *(_course(record) for record in _of(records, problem, "refined"))] for problem in problems
    ]
    title = "Refined schedules, a line for each seed"
    legend = [("refined", PINK), ("linear decay", INK)]
    yield (
        "courses",
        SvgFigure(title, legend, problems, [SvgRow("factor", across, up, panels, "the run")]).svg(),
    )
    yield "ends", _ends(records, problems)


def notes(records: Sequence[Record]) -> str:
    """By problem and schedule: the geometric mean at the best peak, over linear decay's."""
    problems = list(dict.fromkeys(record["problem"] for record in records))
    lines = ["end over that of linear decay, both at their best peak (geometric mean; that peak)"]
    lines.append("  ".join([f"{'problem':<10}", *(f"{kind:>15}" for kind in COLOURS)]))
    for problem in problems:
        line = [f"{problem:<10}"]
        for kind in COLOURS:
            ratio = np.exp(np.log(tuned(records, problem, kind) / tuned(records, problem, "linear")).mean())
            line.append(f"{ratio:.3f} ({_peak(records, problem, kind):.2g})".rjust(15))
        lines.append("  ".join(line))
    return "\n".join(lines)


def _peak(records: Sequence[Record], problem: str, schedule: str) -> float:
    ends = np.array([record["ends"] for record in _of(records, problem, schedule)], dtype=np.float64)
    return PROBLEMS[problem](0).rates[int(np.log(ends).mean(0).argmin())]


def _ends(records: Sequence[Record], problems: Sequence[str]) -> str:
    panels = []
    for problem in problems:
        lines = []
        least = np.exp(np.log(tuned(records, problem, "linear")).mean())
        rates = np.linspace(0, 1, len(PROBLEMS[problem](0).rates))
        for kind, colour in COLOURS.items():
            ends = np.array([record["ends"] for record in _of(records, problem, kind)], dtype=np.float64)
            middle = np.exp(np.log(ends).mean(0)) / least
            lines.append(SvgLine(list(zip(rates.tolist(), middle.tolist(), strict=True)), colour))
        panels.append(lines)
    return SvgFigure(
        "What the runs end with, over the best of linear decay",
        list(COLOURS.items()),
        problems,
        [
            SvgRow(
                "end",
                SvgAxis(0, 1, {0: "least", 1: "largest"}),
                SvgAxis(0.8, 2, ticks([1, 1.5, 2]), strong=1),
                panels,
                "peak learning rate, powers of √2",
            )
        ],
    ).svg()


def _course(record: Record) -> SvgLine:
    num = len(record["factors"])
    return SvgLine([(place / num, value) for place, value in enumerate(record["factors"])], PINK)


def _values(records: Sequence[Record], place: int) -> NDArray[np.float64]:
    return np.array([record["factors"][place] for record in records], dtype=np.float64)


def _of(records: Sequence[Record], problem: str, schedule: str) -> list[Record]:
    chosen = [each for each in records if each["problem"] == problem and each["schedule"] == schedule]
    return sorted(chosen, key=lambda each: each["seed"])


def _marked(refined: Refined) -> list[float]:
    """The factor at MARKS places, the first at the beginning."""
    return _short([refined(place * refined.steps // MARKS) for place in range(MARKS)])


def _short(values: list[float]) -> list[float]:
    """Four digits; a run that diverged is a large number, as JSON has no infinity."""
    return [float(f"{min(value, 1e30):.4g}") for value in values]


STUDY = Study("refinement", cells, run, claims, figures, notes)
