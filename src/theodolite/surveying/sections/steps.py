"""Is the planned learning rate safe at the start: by the radius, by the curvature, and by trying?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.lr_finder.finder import EXTRA, STRIDE, find_lr
from theodolite.lr_finder.lr_range import LrRange
from theodolite.present.figure import QUIET, Figure, Panel, frame, guide, line
from theodolite.probes.curvature.axes import Axes
from theodolite.probes.curvature.landscape import losses
from theodolite.probes.curvature.sharpness import sharpness
from theodolite.probes.steps.direction import norm
from theodolite.probes.steps.radius import Radius, radius
from theodolite.probes.steps.update import optimizer_step
from theodolite.surveying.budget import Budget, TooLong, amount, with_few
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.curvature_setup import CurvatureSetup, find_setup
from theodolite.surveying.finding import Check, Finding, Level, Value, times
from theodolite.surveying.section import Section, attempt, measuring
from theodolite.surveying.trials import LR, OPTIMIZER, PlannedRates, planned_rates, trials_of

RADIUS = Check(
    "TH701",
    "The first step and its radius",
    "Along a step, the Taylor series of a cross-entropy converges within the ghost radius ρ_a, the "
    "distance to the first possible complex zero of a softmax's denominator. Beyond it, slope and "
    "curvature at the start say nothing about the loss after the step. That alone does no harm: what "
    "counts is whether the loss rises.",
)
PARABOLA = Check(
    "TH702",
    "The first step and its parabola",
    "With slope g·u and curvature uᵀHu along a step u, the loss is to second order a parabola that returns "
    "to its initial value after −2 g·u/uᵀHu. A longer step overshoots. If the loss does rise, the first "
    "steps discard the initialisation. Curvature depends on the size of the network.",
)
RANGE = Check(
    "TH703",
    "The learning rate within the usable range",
    "Below the range, training takes many times the steps it needs; above it, the loss rises and may not "
    "recover. Know on which side of the best rate yours is: at twice the best rate little is lost, at eight "
    "times everything may be.",
)
ERRORS = UseError, RuntimeError
"""RuntimeError of autograd, and of memory."""
PER_OCTAVE, OCTAVES = 2, 6
"""Learning rates at which the loss is measured, below and above the planned one."""
NOISE = 1e-5
"""Relative: a smaller rise of the loss does not count."""
QUICK_STEPS, QUICK_SEEDS, QUICK_WORK = 12, 1, 3e11
DEEP_STEPS, DEEP_SEEDS, DEEP_WORK = 20, 3, 1.2e13
FEWEST_STEPS = 4
"""Fewest steps at each learning rate, if steps are expensive."""
TARGETS = 256
"""In a batch, about, unless the survey is deep."""
REACH = 4.0**4
"""How many times lower and higher than the trials' the tried rates are."""
LEGS = round(2 * math.log(REACH, STRIDE)) + 1 + EXTRA
"""Short trainings that this takes, about."""


@dataclass(frozen=True)
class FirstStep:
    """The loss along the first step of AdamW. Without decay the step is proportional to the learning rate."""

    rate: float
    """The planned peak learning rate, …"""
    first: float
    """… and that of the first step."""
    length: float
    """Of the step at the planned rate."""
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """After one step at each rate."""
    start: float
    slope: float
    """`g·u`, where u is the step for a learning rate of 1, …"""
    bend: float
    """… and `uᵀHu`."""
    radius: Radius | None
    """Along the step; None if the loss is not a cross-entropy."""
    sharpness: float | None
    """λ_max; None unless the survey is deep."""

    @property
    def ghost(self) -> float:
        """The learning rate whose step is as long as the radius."""
        return math.inf if self.radius is None or self.radius.r == 0 else self.rate / self.radius.r

    @property
    def quadratic(self) -> float:
        """The learning rate at which the parabola returns to the initial loss, `−2 g·u / uᵀHu`."""
        return max(0.0, -2 * self.slope) / self.bend if self.bend > 0 else math.inf

    @cached_property
    def above(self) -> float:
        """The lowest learning rate at which the loss is above its start, interpolated; inf if none is."""
        before, less = 0.0, self.start
        for rate, loss in zip(self.rates, self.losses, strict=True):
            if self._is_above(loss):
                if not math.isfinite(loss) or less >= self.start:
                    return rate
                return before + (rate - before) * (self.start - less) / (loss - less)
            before, less = rate, loss
        return math.inf

    def loss_at(self, rate: float) -> float:
        """After one step at a rate that was tried, or at 0."""
        return self.start if rate == 0 else self.losses[self.rates.index(rate)]

    def raises(self, rate: float) -> bool:
        """Is the loss after one step at this rate above its start, or not finite?"""
        return self._is_above(self.loss_at(rate))

    def _is_above(self, loss: float) -> bool:
        return not loss <= self.start + NOISE * abs(self.start)


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH701, TH702 and TH703."""
    rates = planned_rates(context)
    yield from attempt(_first_step(context, rates))
    yield from _tried(context, rates)


def within_radius(setup: CurvatureSetup, taken: FirstStep) -> Finding:
    """TH701: the first step at the planned rate, in units of its ghost radius."""
    if taken.radius is None:
        return RADIUS.finding(
            "note",
            "The loss is not the cross-entropy of a softmax, so it has no ghost radius. See TH702 for the "
            "curvature and the loss itself.",
            title="No ghost radius",
        )
    r = taken.radius.r
    level = _level(taken, beyond=r > 1)
    return RADIUS.finding(
        level,
        f"{setup.where} the first step of AdamW at {taken.rate:.2g} is {times(r)} times as long as its "
        f"radius ρ_a ({taken.length:.3g} to {taken.radius.value:.3g}). {_outcome(taken)}",
        title="" if level == "ok" else "A first step beyond its radius",
        remedy=_remedy(level, taken.above),
        numbers=_numbers(setup, taken)
        | {
            "radius ρ_a": taken.radius.value,
            "median of the rows": taken.radius.median,
            "r": r,
            "rate with r = 1": taken.ghost,
        },
        figures=[step_figure(taken)],
    )


def within_parabola(setup: CurvatureSetup, taken: FirstStep) -> Finding:
    """TH702: the planned rate against the one at which the parabola along the step returns to the start."""
    level = _level(taken, beyond=taken.rate > taken.quadratic)
    back = "returns to the initial loss"
    back = f"{back} at {taken.quadratic:.2g}" if math.isfinite(taken.quadratic) else f"never {back}"
    said = (
        f"{setup.where} the parabola along AdamW's first step {back}; {whose_rate(setup.context)} is "
        f"{taken.rate:.2g}. {_outcome(taken)}"
    )
    numbers = _numbers(setup, taken) | {
        "slope g·u": taken.slope,
        "curvature uᵀHu": taken.bend,
        "rate at which the parabola is back": taken.quadratic,
        "rate at which the loss is back": taken.above,
    }
    if taken.sharpness is not None:
        numbers |= {"λ_max": taken.sharpness, "2/λ_max, for gradient descent": 2 / taken.sharpness}
        said += f" Gradient descent is stable up to {2 / taken.sharpness:.2g} (2/λ_max)."
    return PARABOLA.finding(
        level,
        said,
        title="" if level == "ok" else "A first step that overshoots",
        remedy=_remedy(level, min(taken.quadratic, taken.above)),
        numbers=numbers,
        figures=[step_figure(taken)] if taken.radius is None else (),
    )


def whose_rate(context: SurveyContext) -> str:
    """What the rate that is judged is: no plan of the user's, and none need be possible."""
    return "the survey's rate" if context.workload.schedule is None else "the schedule's highest rate"


def within_range(
    found: LrRange, rates: PlannedRates, usual: int, whose: str = "the survey's rate"
) -> Finding:
    """TH703: the peak rate against the range that trainings of `usual` steps, or fewer, find."""
    rate = rates.highest
    figures = [found.figure(rate)]
    if found.low is None or found.high is None or found.best is None:
        return RANGE.finding(
            "note",
            f"Short trainings find no usable range: {found.status}.",
            remedy="Find out with theodolite lr: more steps, and your own batches.",
            figures=figures,
        )
    level: Level = "ok"
    title = remedy = ""
    if rate < found.low:
        level, title = "note", "A learning rate that hardly lowers the loss"
        remedy = f"Try {found.best:.1g}. theodolite sweep finds the rate for a long training."
    elif rate > found.high and rates.first < found.high:
        level, title = "note", "A learning rate that needs a warm-up"
        remedy = f"A warm-up may be enough. If the loss jumps, plan with about {found.best:.1g}."
    elif rate > found.high:
        level, title = "warn", "A learning rate that raises the loss"
        remedy = f"Plan with about {found.best:.1g}, and confirm it with theodolite sweep."
    planned = f"{rate:.2g}" + (f", rising from {rates.first:.2g}" if rate > rates.first else "")
    beside = f"{times(rate / found.best)} times that"
    if 0.8 < rate / found.best < 1.25:
        beside = "close to it"
    elif rate < found.best:
        beside = f"{times(found.best / rate)} times lower"
    said = (
        f"{found.name}: with {found.optimizer}, the loss is lower after {found.steps} steps than before "
        f"them at learning rates from {found.low:.2g} to {found.high:.2g}, most at {found.best:.2g}. "
        f"{whose[0].upper()}{whose[1:]} is {planned}, {beside}."
    )
    if found.steps < usual:
        said += f" These are {found.steps} steps instead of {usual}, which would take too long."
    numbers: dict[str, Value] = {
        "planned": rate,
        "low": found.low,
        "high": found.high,
        "best": found.best,
        "steps": found.steps,
        "seeds": len(found.curves),
        "status": found.status,
    }
    return RANGE.finding(level, said, title=title, remedy=remedy, numbers=numbers, figures=figures)


def take_first_step(setup: CurvatureSetup, rate: float, first: float) -> FirstStep:
    """Measure along AdamW's first step, at the start of training."""
    setup.spend(2)
    if not 0 < rate < math.inf or not 0 <= first < math.inf:
        raise UseError(f"the planned learning rates are {first:g} at first and {rate:g} at most")
    step = _step(setup, rate)
    exponents = range(-PER_OCTAVE * OCTAVES, PER_OCTAVE * OCTAVES + 1)
    rates = sorted({*(rate * 2.0 ** (exponent / PER_OCTAVE) for exponent in exponents), first} - {0.0})
    line = Axes("checkpoints", ({name: tensor / rate for name, tensor in step.items()},), ("step",))
    values = losses(setup.objective, line, torch.tensor([0.0, *rates], dtype=torch.float64)[:, None])
    unit = torch.cat([step[name].flatten() for name in setup.hessian.names]) / rate
    slope, bend = float(setup.hessian.gradient @ unit), float(unit @ (setup.hessian @ unit))
    if not (math.isfinite(slope) and math.isfinite(bend)):
        raise UseError(f"slope and curvature along the first step are {slope:g} and {bend:g}: not finite")
    found = None
    if setup.is_cross_entropy:
        found = radius(setup.model, setup.workload.loss, setup.batch, step, parameters=setup.parameters)
    return FirstStep(
        rate=rate,
        first=first,
        length=norm(step),
        rates=tuple(rates),
        losses=tuple(values[1:].tolist()),
        start=float(values[0]),
        slope=slope,
        bend=bend,
        radius=found,
        sharpness=sharpness(setup.hessian).value if setup.context.deep else None,
    )


def step_figure(taken: FirstStep) -> Figure:
    """The loss after one step against the learning rate, with the predictions."""
    both = zip(taken.rates, taken.losses, strict=True)
    finite = {rate: loss for rate, loss in both if math.isfinite(loss)}
    marks = {"this rate": taken.rate, "ρ_a": taken.ghost, "parabola": taken.quadratic, "rises": taken.above}
    marks = {name: rate for name, rate in marks.items() if taken.rates[0] <= rate <= taken.rates[-1]}
    layout = frame(height=260, x="learning rate", y="loss")
    ends = [math.log10(taken.rates[0]), math.log10(taken.rates[-1])]
    layout["xaxis"] |= {"type": "log", "range": ends, "exponentformat": "power", "dtick": 1}
    # Losses far above the start would flatten the rest.
    least = min(taken.start, *finite.values())
    span = max(taken.start - least, 0.05 * abs(taken.start))
    layout["yaxis"] |= {"nticks": 6, "range": [least - 0.15 * span, taken.start + 1.5 * span]}
    layout["shapes"] = [guide(y=taken.start), *(guide(x=rate) for rate in marks.values())]
    font = {"size": 12, "color": QUIET}
    layout["annotations"] = [
        {"x": math.log10(rate), "yref": "paper", "y": 0.98 - 0.1 * place, "text": name}
        | {"showarrow": False, "xanchor": "left", "font": font}
        for place, (name, rate) in enumerate(marks.items())
    ]
    data = line(list(finite), list(finite.values()), hover="lr %{x:.2e}: %{y:.4g}", markers=4)
    said = ", ".join(f"{name} {rate:.2g}" for name, rate in marks.items())
    return Figure(
        caption="Loss after the first step of AdamW against its learning rate, on one batch. Dotted: the "
        "peak rate that is judged; the rate whose step is as long as the ghost radius (ρ_a); the rate at "
        "which the parabola of slope and curvature returns to the start; the rate at which the loss rises "
        "above it.",
        alt=f"The loss starts at {taken.start:.3g} and falls to {least:.3g} at best; {said}",
        panels=(Panel("Loss after the first step", (data,), layout),),
    )


def _first_step(context: SurveyContext, rates: PlannedRates) -> Iterator[Finding]:
    with measuring(RADIUS, ERRORS):
        setup = find_setup(context)
        taken = take_first_step(setup, rates.highest, rates.first)
        yield within_radius(setup, taken)
    with measuring(PARABOLA, ERRORS):
        yield within_parabola(setup, taken)


def _tried(context: SurveyContext, rates: PlannedRates) -> Iterator[Finding]:
    """TH703, at the base of the trials, where the plan is the plain optimizer."""
    work = DEEP_WORK if context.deep else QUICK_WORK
    budget = Budget(work, deep=context.deep)
    usual, seeds = (DEEP_STEPS, DEEP_SEEDS) if context.deep else (QUICK_STEPS, QUICK_SEEDS)
    with measuring(RANGE, ERRORS):
        trials = trials_of(context)
        workload = trials.workload if context.deep else with_few(trials.workload, TARGETS)
        each = trials.step_work(trials.base, workload)
        steps = min(usual, int(work / (seeds * LEGS * each)))
        if steps < FEWEST_STEPS:
            raise TooLong(f"{FEWEST_STEPS} steps of {trials.base} at each learning rate are too much work")
        found = find_lr(
            workload,
            optimizer=trials.planned(trials.base),
            seeds=[context.seed + k for k in range(seeds)],
            low=LR / REACH,
            high=LR * REACH,
            steps=steps,
            progress=lambda title, done: budget.spend(steps * each),
        )
    yield within_range(found, rates, usual, whose_rate(context))


def _step(setup: CurvatureSetup, rate: float) -> dict[str, Tensor]:
    """AdamW's first update at this rate, without decay."""
    tensors = dict(canonical_parameters(setup.model))
    trained = [tensors[name] for name in setup.parameters]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    with untouched_randomness(setup.context.seed), torch.enable_grad():
        setup.workload.evaluate(setup.model, setup.batch).backward()
    try:
        return optimizer_step(optimizer, setup.model)
    finally:
        setup.model.zero_grad(set_to_none=True)


def _level(taken: FirstStep, *, beyond: bool) -> Level:
    """If the loss rises: at the first rate a warning, at the highest a note."""
    if not beyond:
        return "ok"
    return "warn" if taken.raises(taken.first) else "note" if taken.raises(taken.rate) else "ok"


def _outcome(taken: FirstStep) -> str:
    after = taken.loss_at(taken.rate)
    verb = "raises" if taken.raises(taken.rate) else "lowers"
    end = f"{after:.3g}" if math.isfinite(after) else "a value that is not finite"
    said = f"It {verb} the loss from {taken.start:.3g} to {end}"
    if math.isfinite(taken.above):
        said += f"; one step raises it from {taken.above:.2g}"
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


def _numbers(setup: CurvatureSetup, taken: FirstStep) -> dict[str, Value]:
    return {
        "size": str(setup.size),
        "targets in the batch": amount(setup.batch, setup.context.whole_batch),
        "optimizer": OPTIMIZER,
        "learning rate": taken.rate,
        "length of the step": taken.length,
        "loss at the start": taken.start,
        "loss after it": taken.loss_at(taken.rate),
    }


section = Section("Steps", 77, examine, measures=True)
