"""Is the planned learning rate one that the start bears: by the radius, by the curvature, by trying?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from theodolite.anatomy import UnclassifiedError
from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.lr_finder.finder import STRIDE, find_lr
from theodolite.lr_finder.legs import EXTRA
from theodolite.lr_finder.lr_range import LrRange
from theodolite.lr_finder.page import figure as range_figure
from theodolite.surveying.batches import few
from theodolite.surveying.budget import Budget, TooLong
from theodolite.surveying.curvature_setup import Spot, find_spot
from theodolite.surveying.edges import Rates, planned_rates
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.rates import step_work
from theodolite.surveying.section import Section
from theodolite.surveying.sections.plan import untried
from theodolite.surveying.sections.steps.first_step import FirstStep, step_figure, take_first_step
from theodolite.surveying.site import Site
from theodolite.surveying.trials import LR, OPTIMIZER, Untried
from theodolite.surveying.wording import times
from theodolite.workloads import Workload

TITLES = {
    "TH701": "The first step and its radius",
    "TH702": "The first step and its parabola",
    "TH703": "The learning rate and those that can be used",
}
WHY = {
    "TH701": "The Taylor series of a cross-entropy along a step converges within the ghost radius ρ_a, where "
    "the first complex zero of a softmax's denominator may lie. Farther out, slope and curvature here "
    "say nothing of the loss at the end of a step. That alone harms nothing: the radius is a reading and "
    "not a promise, and what counts is whether the loss rises.",
    "TH702": "With slope g·u and curvature uᵀHu along a step u the loss is, to second order, a parabola that "
    "is back where it began after −2 g·u/uᵀHu. A step beyond that overshoots, and where the loss does rise "
    "the first steps throw the start away. Curvature depends on the size of the network.",
    "TH703": "Below the interval training takes many times the steps it needs, above it the loss rises and "
    "may not come back. Whoever plans a learning rate should know on which side of the best one it lies: at "
    "twice the best rate little is lost, at eight times everything may be.",
}
QUICK_STEPS, QUICK_SEEDS, QUICK_WORK = 12, 1, 3e11
DEEP_STEPS, DEEP_SEEDS, DEEP_WORK = 20, 3, 1.2e13
FEWEST_STEPS = 4
"""At each learning rate, to which they are cut down where steps are dear."""
TARGETS = 256
"""In a batch, about, unless there is time."""
REACH = 4.0**4
"""How many times lower and higher than the trials' the rates are that are tried."""
LEGS = round(2 * math.log(REACH, STRIDE)) + 1 + EXTRA
"""Short trainings that this takes about."""


def examine(site: Site) -> Iterator[Finding]:
    """TH701, TH702 and TH703."""
    rates = planned_rates(site)
    yield from _first_step(site, rates)
    yield from _tried(site, rates)


def within_radius(spot: Spot, taken: FirstStep) -> Finding:
    """TH701: the first step at the planned rate, in units of its ghost radius."""
    if taken.radius is None:
        return Finding(
            "TH701",
            "note",
            "No ghost radius",
            "The loss is not the cross-entropy of a softmax, so that it has no ghost radius. What the "
            "curvature and the loss itself say is TH702.",
            why=WHY["TH701"],
        )
    r = taken.radius.r
    level = _level(taken, beyond=r > 1)
    said = (
        f"At {spot.where} the first step of AdamW at {taken.rate:.2g} is {times(r)} times as long as its "
        f"radius ρ_a ({taken.length:.3g} to {taken.radius.value:.3g}). {_really(taken)}"
    )
    numbers = _numbers(spot, taken) | {
        "radius ρ_a": taken.radius.value,
        "median of the rows": taken.radius.median,
        "r": r,
        "rate with r = 1": taken.ghost,
    }
    return Finding(
        "TH701",
        level,
        TITLES["TH701"] if level == "ok" else "A first step beyond its radius",
        said,
        why=WHY["TH701"],
        remedy=_remedy(level, taken.above),
        evidence=Evidence(numbers, figures=(step_figure(taken),)),
    )


def within_parabola(spot: Spot, taken: FirstStep) -> Finding:
    """TH702: the planned rate against the one at which the parabola along the step is back at the start."""
    level = _level(taken, beyond=taken.rate > taken.quadratic)
    back = f"at {taken.quadratic:.2g}" if math.isfinite(taken.quadratic) else "at no learning rate"
    said = (
        f"At {spot.where} the parabola along AdamW's first step is back at the loss of the start {back}; "
        f"planned is {taken.rate:.2g}. {_really(taken)}"
    )
    numbers = _numbers(spot, taken) | {
        "slope g·u": taken.slope,
        "curvature uᵀHu": taken.bend,
        "rate at which the parabola is back": taken.quadratic,
        "rate at which the loss is back": taken.above,
    }
    if taken.sharpness is not None:
        numbers |= {"λ_max": taken.sharpness, "2/λ_max, for gradient descent": 2 / taken.sharpness}
        said += f" Gradient descent bears {2 / taken.sharpness:.2g} (2/λ_max)."
    return Finding(
        "TH702",
        level,
        TITLES["TH702"] if level == "ok" else "A first step that overshoots",
        said,
        why=WHY["TH702"],
        remedy=_remedy(level, min(taken.quadratic, taken.above)),
        evidence=Evidence(numbers, figures=(step_figure(taken),) if taken.radius is None else ()),
    )


def within_range(found: LrRange, rates: Rates, usual: int) -> Finding:
    """TH703: the planned peak rate against the interval that trainings of `usual` steps, or fewer, find."""
    rate = rates.highest
    if found.low is None or found.high is None or found.best is None:
        return Finding(
            "TH703",
            "note",
            TITLES["TH703"],
            f"Short trainings find no interval: {found.status}.",
            why=WHY["TH703"],
            remedy="Find out with theodolite lr: more steps, and your own batches.",
            evidence=Evidence(figures=(range_figure(found, rate),)),
        )
    level, title, remedy = _judged_by(found.low, found.high, found.best, rates)
    said = (
        f"{found.name}: with {found.optimizer}, {found.steps} steps go forward at learning rates from "
        f"{found.low:.2g} to {found.high:.2g}, best at {found.best:.2g}. Planned is {_planned(rates)}, "
        f"{_beside(rate, found.best)}."
    )
    if found.steps < usual:
        said += f" These are {found.steps} steps and not {usual}, as more would take too long."
    numbers: dict[str, Value] = {
        "planned": rate,
        "low": found.low,
        "high": found.high,
        "best": found.best,
        "steps": found.steps,
        "seeds": len(found.curves),
        "status": found.status,
    }
    return Finding(
        "TH703",
        level,
        title,
        said,
        why=WHY["TH703"],
        remedy=remedy,
        evidence=Evidence(numbers, figures=(range_figure(found, rate),)),
    )


def _first_step(site: Site, rates: Rates) -> Iterator[Finding]:
    code = "TH701"
    try:
        spot = find_spot(site)
        taken = take_first_step(spot, rates.highest, rates.first)
        yield within_radius(spot, taken)
        code = "TH702"
        yield within_parabola(spot, taken)
    except UnclassifiedError:
        raise
    except Untried as error:
        yield untried(error)
    except (UseError, RuntimeError) as error:  # of autograd, and of memory
        yield unmeasured(code, error)


def _tried(site: Site, rates: Rates) -> Iterator[Finding]:
    """TH703, at the base of the trials, where its own plan is the plain optimizer."""
    work = DEEP_WORK if site.deep else QUICK_WORK
    budget = Budget(work, deep=site.deep)
    usual, seeds = (DEEP_STEPS, DEEP_SEEDS) if site.deep else (QUICK_STEPS, QUICK_SEEDS)
    try:
        trials = site.trials
        workload = trials.workload if site.deep else _lighter(trials.workload)
        each = step_work(trials, workload, trials.base)
        steps = min(usual, int(work / (seeds * LEGS * each)))
        if steps < FEWEST_STEPS:
            raise TooLong(f"{FEWEST_STEPS} steps of {trials.base} at each learning rate are too much work")
        found = find_lr(
            workload,
            trials.planned(trials.base),
            seeds=[site.seed + k for k in range(seeds)],
            low=LR / REACH,
            high=LR * REACH,
            steps=steps,
            progress=lambda title, done: budget.spend(steps * each),
        )
    except UnclassifiedError:
        raise
    except Untried as error:
        yield untried(error)
    except (UseError, RuntimeError) as error:
        yield unmeasured("TH703", error)
    else:
        yield within_range(found, rates, usual)


def _lighter(workload: Workload) -> Workload:
    """The workload with few targets in a batch, also in those that judge."""
    held_out = workload.held_out
    return dataclasses.replace(
        workload,
        batch=lambda seed, step: few(workload.draw(seed, step), TARGETS),
        held_out=None if held_out is None else lambda seed, step: few(held_out(seed, step), TARGETS),
    )


def unmeasured(code: str, error: Exception) -> Finding:
    """What could not be measured."""
    text = " ".join(str(error).split()) if isinstance(error, UseError) else in_one_line(error)
    return Finding(
        code,
        "note",
        TITLES[code],
        f"This could not be measured: {text.rstrip('.')}.",
        why=WHY[code],
        remedy="Survey the network at a smaller size, or with --deep, which may take longer."
        if isinstance(error, TooLong)
        else "Mend what the message names, or leave the section out: skip=['steps'].",
    )


def _level(taken: FirstStep, *, beyond: bool) -> Level:
    """What counts is whether the loss rises there: at the first rate a warning, at the highest a note."""
    if not beyond:
        return "ok"
    return "warn" if taken.raises(taken.first) else "note" if taken.raises(taken.rate) else "ok"


def _really(taken: FirstStep) -> str:
    after = taken.loss_at(taken.rate)
    verb = "raises" if taken.raises(taken.rate) else "lowers"
    end = f"{after:.3g}" if math.isfinite(after) else "something that is not finite"
    said = f"It {verb} the loss from {taken.start:.3g} to {end}"
    if math.isfinite(taken.above):
        said += f"; from {taken.above:.2g} on one step raises it"
    if taken.first < taken.rate:
        said += f". The schedule begins at {taken.first:.2g}"
        said += ", which raises it too" if taken.raises(taken.first) else ", which does not raise it"
    return f"{said}."


def _remedy(level: Level, safe: float) -> str:
    if level == "ok":
        return ""
    if level == "note":
        return "Keep the warm-up: without it the first step would raise the loss."
    return (
        f"Begin with a learning rate below {safe:.1g}, or warm up from there: plan.schedule(optimizer, "
        "steps=…, warmup=…). th.controllers.SafeStep bounds each step by its radius."
    )


def _judged_by(low: float, high: float, best: float, rates: Rates) -> tuple[Level, str, str]:
    if rates.highest > high:
        remedy = f"Plan with about {best:.1g}, and confirm it with theodolite sweep."
        if rates.first < high:
            remedy = f"A warm-up may carry it. If the loss jumps, plan with about {best:.1g}."
            return "note", "A learning rate that only a warm-up may carry", remedy
        return "warn", "A learning rate that raises the loss", remedy
    if rates.highest < low:
        remedy = f"Try {best:.1g}; theodolite sweep tells what a long training wants."
        return "note", "A learning rate that hardly moves", remedy
    return "ok", TITLES["TH703"], ""


def _planned(rates: Rates) -> str:
    if rates.highest > rates.first:
        return f"{rates.highest:.2g}, risen from {rates.first:.2g}"
    return f"{rates.highest:.2g}"


def _beside(rate: float, best: float) -> str:
    if 0.8 < rate / best < 1.25:
        return "which is close to it"
    return f"{times(rate / best)} times that" if rate > best else f"{times(best / rate)} times lower"


def _numbers(spot: Spot, taken: FirstStep) -> dict[str, Value]:
    return {
        "size": str(spot.size),
        "targets in the batch": spot.amount,
        "optimizer": OPTIMIZER,
        "learning rate": taken.rate,
        "length of the step": taken.length,
        "loss at the start": taken.start,
        "loss after it": taken.loss_at(taken.rate),
    }


section = Section("Steps", 77, examine, measures=True)
