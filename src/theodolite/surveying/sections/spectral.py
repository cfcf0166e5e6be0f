"""Which tensors break the spectral condition at another size, and does a plan fix it?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from theodolite.planning import Plan
from theodolite.present.text import counted, listed, signed
from theodolite.probes.scaling.norm_history import Training, observe
from theodolite.probes.scaling.small_gradients import NEAR_EPS
from theodolite.probes.scaling.spectral import (
    ATOL,
    Condition,
    Spectral,
    SpectralRow,
    compare,
    rows_limited_by_eps,
)
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Level, Value, times
from theodolite.surveying.section import Section, measuring
from theodolite.surveying.trials import TRAINED, Trials, trials_of

STEPS = 3
SEEDS = 3
"""No tensor is said to be wrong on one seed: where one finds a fault, the others are measured too."""
NOISE, VECTOR_NOISE = 1.5, 2.0
"""Smaller factors, of weights and of biases and gains, are no evidence of an exponent: a vector has few
entries, and after the first step each of them changes differently."""
SMALLER_EPS = (
    "Gradients behind what starts at zero begin as small as that and grow: judge these tensors by more "
    "steps, th.probes.spectral(…, steps=12). If they stay small, TH522 tells where the gradient is lost; a "
    "smaller eps, th.plan(…, eps=1e-12), lets the tensors move all the same."
)
FEW = 8
"""A vector of fewer entries is judged only beyond a factor of `STEPS`: a step may undo the one before."""


@dataclass(frozen=True)
class SpectralPair:
    """The network grown along one axis without a plan and with one, both against the base size."""

    axis: str
    standard: Spectral
    planned: Spectral


@dataclass(frozen=True)
class Question:
    """What a finding asks of every tensor, in words."""

    check: Check
    condition: Condition
    titles: Mapping[Level, str]
    subject: str
    remedy: str


STEP_SIZES = Question(
    Check(
        "TH202",
        "Updates that keep their size",
        "A network learns at the same speed at every size if each tensor, and each of its updates, keeps its "
        "size as an operator: ‖W‖_R = √(n_in/n_out)·‖W‖₂, the most by which it can change the root mean "
        "square of its input. For a tensor that ends one of L branches it is 1/L of that. With one learning "
        "rate for all tensors, some updates grow with width or depth and others do not. The largest limit "
        "the learning rate, so the best learning rate depends on the size.",
    ),
    "step",
    {"note": "Updates that change with the network's size", "warn": "Updates that a plan does not fix"},
    "an update of",
    "Train larger networks under th.plan(…): plan.build() and plan.optimizer(model) give each tensor its own "
    "initialisation and learning rate.",
)
START_SIZES = Question(
    Check(
        "TH203",
        "Initial sizes against width",
        "The initialisation is half of the condition. A readout should start smaller than 1/√n with width n, "
        "so that what it learns exceeds its initial noise. A hidden matrix whose std does not follow its "
        "fan-in starts too large or too small as the width grows. A learning rate tuned at one width then "
        "does not fit at the next.",
    ),
    "start",
    {
        "note": "Initial sizes that do not follow the width",
        "warn": "Initial sizes that a plan does not fix",
    },
    "the initial value of",
    "Start larger networks with plan.build() or plan.initialize(model), which keep the network's own "
    "initialisation at base size and scale it from there.",
)


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH202 and TH203."""
    trials = trials_of(context)
    with measuring(STEP_SIZES.check):
        pairs = measure(trials, trials.seed)
        planned = [pair.planned for pair in pairs]
        if all(one.finite for one in planned) and any(_broken(one, "step") for one in planned):
            more = [measure(trials, trials.seed + number) for number in range(1, SEEDS)]
            pairs = [_pooled(same) for same in zip(pairs, *more, strict=True)]
    yield trials.noted(judge(STEP_SIZES, pairs))
    # With depth, every initialisation that does not depend on it breaks the condition: see TH104.
    yield trials.noted(judge(START_SIZES, pairs[:1]))


def measure(trials: Trials, seed: int) -> list[SpectralPair]:
    """Train the base, and the widest and deepest network, each without a plan and with one."""

    def train(plan: Plan) -> Training:
        return observe(trials.workload, plan, trials.anatomy(plan.size), steps=STEPS, seed=seed)

    base = train(trials.standard(trials.base))
    return [
        SpectralPair(
            axis,
            standard=compare(train(trials.standard(size)), base),
            planned=compare(train(trials.planned(size)), base),
        )
        for axis, sizes in (("width", trials.widths), ("depth", trials.depths))
        for size in sizes[-1:]
    ]


def _pooled(pairs: Sequence[SpectralPair]) -> SpectralPair:
    """The same pair of several seeds; tensors of one kind are folded into their geometric mean."""

    def joined(found: Sequence[Spectral]) -> Spectral:
        return dataclasses.replace(
            found[0],
            rows=tuple(row for one in found for row in one.rows),
            losses=tuple(loss for one in found for loss in one.losses),
            base_losses=tuple(loss for one in found for loss in one.base_losses),
        )

    standard, planned = ([getattr(pair, how) for pair in pairs] for how in ("standard", "planned"))
    return SpectralPair(pairs[0].axis, joined(standard), joined(planned))


def judge(question: Question, pairs: Sequence[SpectralPair]) -> Finding:
    """Which tensors break the condition without a plan, and whether a plan fixes it."""
    said = list(filter(None, (_without_plan(question, pair) for pair in pairs)))
    level: Level = "note" if said else "ok"
    remedy = question.remedy if said else ""
    left = [line.name for pair in pairs for line in _broken(pair.planned, question.condition)]
    lost = [pair.planned.size for pair in pairs if not pair.planned.finite]
    steepest = max((_steepest(pair.planned, question.condition) for pair in pairs), key=abs)
    measured = [one for pair in pairs for one in (pair.standard, pair.planned)]
    limited = _limited_by_eps(measured) if question.condition == "step" else ""
    if lost:
        level = "warn"
        said.append(f"Under a plan, training diverges at {lost[0]}.")
        remedy = "Check that the network trains at all at this learning rate."
    elif left:
        level = "warn"
        names = listed(list(dict.fromkeys(left)))
        said.append(f"A plan does not fix {names} (steepest exponent {signed(steepest)}).")
        remedy = f"Find out what is special about {names}; survey again with --deep to rule out noise."
    else:
        where = "Under a plan" if said else "Without a plan and with one"
        which = "all other tensors" if limited else "all tensors"
        said.append(
            f"{where}, {which} satisfy the spectral condition (steepest exponent {signed(steepest)})."
        )
    idle = dict.fromkeys(line.name for one in measured for line in one.folded if line.only_rounding)
    if question.condition == "step" and idle:
        said.append(
            f"Not judged: {listed(list(idle))}. The gradient is zero up to rounding, because nothing there "
            "reaches the loss."
        )
    title = question.titles.get(level, "")
    if limited:
        said.append(limited)
        remedy = " ".join(filter(None, (remedy, SMALLER_EPS)))
        if level == "ok":
            level, title = "note", "Updates that eps limits"
    return question.check.finding(
        level,
        " ".join(said),
        title=title,
        remedy=remedy,
        numbers=TRAINED | {"steps": STEPS, "compared with": str(measured[0].base)},
        rows=_rows(pairs, question.condition),
    )


def _limited_by_eps(measured: Sequence[Spectral]) -> str:
    """Which tensors have gradients far below eps, and where; empty if none has.

    Of those that differ only in their block, how many is told of the deepest network.
    """
    found = [(line, one) for one in measured for line in rows_limited_by_eps(one)]
    if not found:
        return ""
    sizes = {one.size for line, one in found if line.over_eps[0] < NEAR_EPS}
    sizes |= {one.base for line, one in found if line.over_eps[1] < NEAR_EPS}
    names: dict[str, str] = {}
    for line, _ in sorted(found, key=lambda pair: pair[1].size.depth):
        names[line.pattern] = line.name
    where = listed([str(size) for size in sorted(sizes)])
    least = min(min(line.over_eps) for line, _ in found)
    return (
        f"Not judged: {listed(list(names.values()))}, whose steps AdamW's eps limits at {where}. "
        f"Gradients there are as small as {least:.2g} times eps, so that eps decides how far a step goes."
    )


def _without_plan(question: Question, pair: SpectralPair) -> str:
    """The worst tensor; empty if all is well."""
    measured, axis = pair.standard, pair.axis
    if not measured.finite:
        return f"Without a plan, training diverges at {measured.size}."
    broken = _broken(measured, question.condition)
    if not broken:
        return ""
    worst = broken[0]
    off = worst.off(question.condition)
    changed = f"{times(max(off, 1 / off))} times too {'large' if off > 1 else 'small'}"
    return (
        f"Without a plan, {counted(len(broken), 'kind')} of tensor out of {len(measured.folded)} "
        f"{'breaks' if len(broken) == 1 else 'break'} the spectral condition as the {axis} grows: from "
        f"{measured.base} to {measured.size}, {question.subject} {worst.name} becomes {changed} "
        f"({axis} to the power {signed(measured.exponent(off))})."
    )


def _broken(measured: Spectral, condition: Condition) -> tuple[SpectralRow, ...]:
    return tuple(
        line
        for line in measured.broken(condition, ATOL)
        if abs(math.log(line.off(condition))) > math.log(_noise(line))
    )


def _noise(line: SpectralRow) -> float:
    """Factors up to this one may be chance."""
    if line.role not in ("bias", "gain"):
        return NOISE
    return VECTOR_NOISE if line.entries >= FEW else STEPS


def _steepest(measured: Spectral, condition: Condition) -> float:
    powers = (measured.exponent(line.off(condition)) for line in measured.folded)
    return max((power for power in powers if not math.isnan(power)), key=abs, default=0.0)


def _rows(pairs: Sequence[SpectralPair], condition: Condition) -> list[dict[str, Value]]:
    """By which factor each kind of tensor is off at the larger sizes."""
    rows: dict[str, dict[str, Value]] = {}
    for pair in pairs:
        for how, found in (("", pair.standard), (", plan", pair.planned)):
            for line in found.folded:
                off = line.off(condition)
                row = rows.setdefault(line.name, {"tensor": line.name, "role": line.role})
                row[f"{found.size}{how}"] = None if math.isnan(off) else float(f"{off:.3g}")
    return list(rows.values())


section = Section("Spectral condition", 70, examine, measures=True)
