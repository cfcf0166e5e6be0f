"""Is a schedule that was refined from a first run's gradient norms a better one?

For each problem and seed, every schedule is run over a range of peak learning rates. The refined schedule is
made from a first run, with linear decay at the learning rate that was best for it and with noise of its own;
then it is run over the same range. Each schedule is judged at the peak that is best for it in the mean over
the seeds, and compared seed by seed.

References:
    Defazio et al., When, why and how much? Adaptive learning rate scheduling by refinement, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from theodolite.optimizers.schedule import LRFactor, Refined, refine
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.refinement.problems import PROBLEMS, NoisyProblem, train
from theodolite_studies.refinement.report import CLAIMS, MARKS, figures, notes

FIXED = ("constant", "cosine", "linear", "wsd")
SEEDS = 8


def cells(setting: Setting) -> list[Cell]:
    """Problems times seeds."""
    problems = ("quadratic", "logistic") if setting.small else tuple(PROBLEMS)
    return [
        {"problem": problem, "seed": seed}
        for problem in problems
        for seed in range(3 if setting.small else SEEDS)
    ]


def run(cell: Cell, *_: object) -> Iterator[Record]:
    """A record for each schedule: what came of every peak learning rate."""
    problem = PROBLEMS[cell["problem"]](cell["seed"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from compared(problem, cell["seed"])
    finally:
        torch.set_num_threads(threads)


def compared(problem: NoisyProblem, seed: int) -> Iterator[Record]:
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


def _marked(refined: Refined) -> list[float]:
    """The factor at MARKS places, the first at the beginning."""
    return _short([refined(place * refined.steps // MARKS) for place in range(MARKS)])


def _short(values: list[float]) -> list[float]:
    """Four digits; a run that diverged is a large number, as JSON has no infinity."""
    return [float(f"{min(value, 1e30):.4g}") for value in values]


STUDY = Study("refinement", cells, run, CLAIMS, figures, notes)
