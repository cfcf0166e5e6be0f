"""Does the learning-rate schedule keep the ratios between parameter groups?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.surveying.finding import Evidence, Finding, Value
from theodolite.surveying.section import Section
from theodolite.surveying.sections.plan import untried
from theodolite.surveying.site import Site
from theodolite.surveying.trials import Untried
from theodolite.surveying.wording import counted

MOST_STEPS = 20_000
"""Of a schedule that says when it ends; of another a twentieth."""
TOLERANCE = 0.01
"""On a ratio, relative: rounding in schedulers that go on from the last value stays far below."""
NEGLIGIBLE = 1e-4
"""Where all learning rates are below this fraction of their start nothing is learnt, whatever the ratios."""
TITLE = "Ratios between learning rates"
WHY = (
    "A plan gives each tensor its own learning rate, and it is their ratios that carry from size to size. A "
    "schedule must multiply all of them by one factor. Schedulers that set an absolute value (the eta_min of "
    "a cosine, the max_lr of OneCycle) pull all groups towards the same learning rate and undo the plan "
    "without a word."
)


@dataclass(frozen=True)
class Bend:
    """The largest change of the ratio of two groups' learning rates."""

    factor: float
    """1 where all ratios stay; inf where one group stands still and another does not."""
    step: int
    planned: tuple[float, float]
    """The learning rates of the two groups at the start, …"""
    found: tuple[float, float]
    """… and at that step."""


def examine(site: Site) -> Iterator[Finding]:
    """TH205, where the workload has a schedule."""
    if site.workload.schedule is None:
        return
    try:
        trials = site.trials
    except Untried as error:
        yield untried(error)
        return
    plan = trials.planned(trials.widths[-1])
    optimizer = plan.optimizer(plan.build(site.seed))
    bend, steps = walk(site, optimizer, site.workload.schedule)
    yield ratios_kept(bend, steps, len(optimizer.param_groups))


def ratios_kept(bend: Bend, steps: int, groups: int) -> Finding:
    """TH205: is one factor common to all groups?"""
    numbers: dict[str, Value] = {"groups": groups, "steps": steps, "largest change of a ratio": bend.factor}
    if bend.factor <= 1 + TOLERANCE:
        sentence = f"Over {counted(steps, 'step')} the schedule keeps the ratios between all {groups} groups."
        return Finding("TH205", "ok", TITLE, sentence, why=WHY, evidence=Evidence(numbers))
    before, after = (" and ".join(f"{lr:.3g}" for lr in pair) for pair in (bend.planned, bend.found))
    changed = f"by a factor of {bend.factor:.3g}" if math.isfinite(bend.factor) else "without bound"
    return Finding(
        "TH205",
        "warn",
        "A schedule that breaks the ratios between learning rates",
        f"The schedule changes the ratio between two groups {changed} by step {bend.step}: learning rates "
        f"planned as {before} are {after} then.",
        why=WHY,
        remedy="Use plan.schedule(optimizer, steps=…), or any scheduler that multiplies: LambdaLR, a cosine "
        "without eta_min, OneCycleLR with one max_lr for each group.",
        evidence=Evidence(numbers),
    )


def walk(site: Site, optimizer: Optimizer, attach: Callable[[Optimizer], LRScheduler]) -> tuple[Bend, int]:
    """Step the schedule to its end, as far as it tells it: the worst ratio, and the number of steps."""
    planned = [float(group["lr"]) for group in optimizer.param_groups]
    with warnings.catch_warnings():
        # The scheduler's about the order of calls, and the optimizer's about the very thing sought here.
        warnings.simplefilter("ignore")
        try:
            schedule = attach(optimizer)
        except Exception as error:
            raise UseError(
                f"workload {site.workload.name!r}: schedule(optimizer) failed: {in_one_line(error)}"
            ) from error
        if not hasattr(schedule, "step"):
            raise UseError(
                f"workload {site.workload.name!r}: schedule(optimizer) returned a {type(schedule).__name__}, "
                "not a scheduler of torch.optim.lr_scheduler"
            )
        worst = _bend(planned, _rates(optimizer), 0)
        end = getattr(schedule, "T_max", None) or getattr(schedule, "total_steps", None)
        last = min(int(end) + 1, MOST_STEPS) if end else MOST_STEPS // 20
        for step in range(1, last):
            try:
                optimizer.step()  # without gradients it moves nothing
                _advance(schedule)
            except Exception as error:
                if isinstance(schedule, OneCycleLR):  # its way to say that it has ended
                    return worst, step
                raise UseError(
                    f"workload {site.workload.name!r}: the schedule failed at step {step}: "
                    f"{in_one_line(error)}"
                ) from error
            worst = max(worst, _bend(planned, _rates(optimizer), step), key=lambda bend: bend.factor)
    return worst, last


def _advance(schedule: LRScheduler) -> None:
    if isinstance(schedule, ReduceLROnPlateau):
        schedule.step(0.0)  # a loss that stays
    else:
        schedule.step()


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _bend(planned: Sequence[float], found: Sequence[float], step: int) -> Bend:
    """The two groups whose ratio has changed most."""
    factors = [now / start for now, start in zip(found, planned, strict=True)]
    low, high = factors.index(min(factors)), factors.index(max(factors))
    if factors[high] < NEGLIGIBLE:
        factor = 1.0
    else:
        factor = factors[high] / factors[low] if factors[low] > 0 else math.inf
    return Bend(factor, step, (planned[low], planned[high]), (found[low], found[high]))


section = Section("Schedule", 80, examine)
