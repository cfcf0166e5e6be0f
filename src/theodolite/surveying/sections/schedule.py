"""Does the learning-rate schedule keep the ratios between parameter groups?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.present.text import counted
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Value
from theodolite.surveying.section import Section, reason
from theodolite.surveying.trials import follow_schedule, trials_of

TOLERANCE = 0.01
"""Relative, on a ratio: rounding in schedulers that update the last value stays far below."""
NEGLIGIBLE = 1e-4
"""If all learning rates are below this fraction of their start, ratios do not matter."""
RATIOS = Check(
    "TH205",
    "Ratios between learning rates",
    "A plan gives each tensor its own learning rate, and their ratios carry over from size to size. A "
    "schedule must multiply all of them by one factor. Schedulers that set an absolute value (the eta_min of "
    "a cosine, the max_lr of OneCycle) pull all groups towards the same learning rate and silently undo the "
    "plan.",
)


@dataclass(frozen=True)
class RatioChange:
    """The largest change of the ratio of two groups' learning rates."""

    factor: float
    """1 if all ratios stay; inf if one learning rate is zero and another is not."""
    step: int
    planned: tuple[float, float]
    """The learning rates of the two groups at the start, …"""
    found: tuple[float, float]
    """… and at that step."""


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH205, if the workload has a schedule."""
    if context.workload.schedule is None:
        return
    trials = trials_of(context)
    plan = trials.planned(trials.widths[-1])
    optimizer = plan.optimizer(plan.build(context.seed))
    change, steps = largest_change(context, optimizer)
    yield ratios_kept(change, steps, len(optimizer.param_groups))


def ratios_kept(change: RatioChange, steps: int, groups: int) -> Finding:
    """TH205: do all groups share one factor?"""
    numbers: dict[str, Value] = {"groups": groups, "steps": steps, "largest change of a ratio": change.factor}
    if change.factor <= 1 + TOLERANCE:
        sentence = f"Over {counted(steps, 'step')} the schedule keeps the ratios between all {groups} groups."
        return RATIOS.finding("ok", sentence, numbers=numbers)
    before, after = (" and ".join(f"{lr:.3g}" for lr in pair) for pair in (change.planned, change.found))
    changed = f"by a factor of {change.factor:.3g}" if math.isfinite(change.factor) else "without bound"
    return RATIOS.finding(
        "warn",
        f"By step {change.step} the schedule changes the ratio between two groups {changed}: their learning "
        f"rates, planned as {before}, are {after}.",
        title="A schedule that breaks the ratios between learning rates",
        remedy="Use plan.schedule(optimizer, steps=…), or any scheduler that multiplies: LambdaLR, a cosine "
        "without eta_min, OneCycleLR with one max_lr for each group.",
        numbers=numbers,
    )


def largest_change(context: SurveyContext, optimizer: Optimizer) -> tuple[RatioChange, int]:
    """The largest change of a ratio while the schedule is followed to its end, and the number of steps."""
    assert context.workload.schedule is not None
    planned = [float(group["lr"]) for group in optimizer.param_groups]
    changes: list[RatioChange] = []
    with warnings.catch_warnings():
        # Of the scheduler on the order of calls, and of the optimizer on what is checked here.
        warnings.simplefilter("ignore")
        try:
            for rates in follow_schedule(optimizer, context.workload.schedule):
                changes.append(_change(planned, rates, len(changes)))
        except Exception as error:
            what = (
                f"the schedule failed at step {len(changes)}:" if changes else "schedule(optimizer) failed:"
            )
            raise UseError(f"workload {context.workload.name!r}: {what} {reason(error)}") from error
    return max(changes, key=lambda change: change.factor), len(changes)


def _change(planned: Sequence[float], found: Sequence[float], step: int) -> RatioChange:
    """The two groups whose ratio has changed most."""
    factors = [now / start for now, start in zip(found, planned, strict=True)]
    low, high = factors.index(min(factors)), factors.index(max(factors))
    if factors[high] < NEGLIGIBLE:
        factor = 1.0
    else:
        factor = factors[high] / factors[low] if factors[low] > 0 else math.inf
    return RatioChange(factor, step, (planned[low], planned[high]), (found[low], found[high]))


section = Section("Schedule", 80, examine)
