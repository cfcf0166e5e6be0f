"""Which tensors break the spectral condition at another size, and does a plan mend it?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from theodolite.core.errors import UseError
from theodolite.planning import Plan
from theodolite.present.figure import signed
from theodolite.probes.scaling.spectral import (
    ATOL,
    Condition,
    Spectral,
    SpectralRow,
    Training,
    compare,
    observe,
)
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.section import Section
from theodolite.surveying.sections.plan import on_trials, unmeasured, untried
from theodolite.surveying.site import Site
from theodolite.surveying.trials import LR, OPTIMIZER, Trials, Untried
from theodolite.surveying.wording import counted, listed, times

STEPS = 3
NOISE, VECTOR_NOISE = 1.5, 2.0
"""Factors below these, of weights and of biases and gains, are no evidence of an exponent: a vector has few
entries, and after the first step each of them goes its own way."""


@dataclass(frozen=True)
class Growth:
    """One direction: the network grown without a plan and with one, both against the base size."""

    axis: str
    standard: Spectral
    planned: Spectral


@dataclass(frozen=True)
class Question:
    """What a finding asks of every tensor, in words."""

    code: str
    condition: Condition
    titles: Mapping[Level, str]
    subject: str
    why: str
    remedy: str


STEP_SIZES = Question(
    "TH202",
    "step",
    {
        "ok": "Steps that keep their size",
        "note": "Steps that change with the network's size",
        "warn": "Steps that a plan does not mend",
    },
    "a step of",
    "A network learns at the same speed at every size if each tensor, and each of its steps, keeps its size "
    "as an operator: ‖W‖_R = √(n_in/n_out)·‖W‖₂, the most by which it can change the root mean square of "
    "what it reads; what ends one of L branches, 1/L of it. With one learning rate for all, the steps of "
    "some tensors grow with width or depth and those of others do not. The largest set the pace, and the "
    "best learning rate moves with the size.",
    "Train larger networks under th.plan(…): plan.build() and plan.optimizer(model) give each tensor its own "
    "initialisation and learning rate.",
)
START_SIZES = Question(
    "TH203",
    "start",
    {
        "ok": "Initial sizes against width",
        "note": "Initial sizes that do not follow the width",
        "warn": "Initial sizes that a plan does not mend",
    },
    "the start of",
    "The initialisation is half of the condition. A readout should start smaller with width than 1/√n, so "
    "that what it learns outgrows what it was born with. A hidden matrix whose std does not follow its "
    "fan-in starts ever larger, or ever smaller. A learning rate tuned at one width then meets another "
    "network at the next.",
    "Start larger networks with plan.build() or plan.initialize(model), which keep the network's own "
    "initialisation at base size and scale it from there.",
)


def examine(site: Site) -> Iterator[Finding]:
    """TH202 and TH203."""
    try:
        trials = site.trials
    except Untried as error:
        yield untried(error)
    else:
        try:
            growths = measure(trials)
        except UseError as error:
            yield unmeasured("TH202", STEP_SIZES.titles["ok"], STEP_SIZES.why, error)
            return
        yield on_trials(judge(STEP_SIZES, growths), trials)
        # With depth every initialisation that does not know about it leaves the condition: see TH104.
        yield on_trials(judge(START_SIZES, growths[:1]), trials)


def measure(trials: Trials) -> list[Growth]:
    """Train the base, and what is wider and deeper, each without a plan and with one."""

    def train(plan: Plan) -> Training:
        return observe(trials.workload, plan, trials.anatomy(plan.size), steps=STEPS, seed=trials.seed)

    base = train(trials.standard(trials.base))
    return [
        Growth(
            axis,
            standard=compare(train(trials.standard(size)), base),
            planned=compare(train(trials.planned(size)), base),
        )
        for axis, sizes in (("width", trials.widths), ("depth", trials.depths))
        for size in sizes[-1:]
    ]


def judge(question: Question, growths: Sequence[Growth]) -> Finding:
    """What leaves the condition without a plan, and whether a plan mends it."""
    said = [sentence for growth in growths if (sentence := _without_plan(question, growth))]
    level: Level = "note" if said else "ok"
    remedy = question.remedy if said else ""
    left = [line.name for growth in growths for line in _broken(growth.planned, question.condition)]
    lost = [growth.planned.size for growth in growths if not growth.planned.finite]
    steepest = max((_steepest(growth.planned, question.condition) for growth in growths), key=abs)
    if lost:
        level = "warn"
        said.append(f"Under a plan the training diverges at {lost[0]}.")
        remedy = "Check that the network trains at all at this learning rate."
    elif left:
        level = "warn"
        names = listed(list(dict.fromkeys(left)))
        said.append(f"A plan does not mend {names} (steepest exponent {signed(steepest)}).")
        remedy = f"Look at what is special about {names}; survey again with --deep to rule out noise."
    else:
        where = "Under a plan" if said else "Without a plan and with one"
        said.append(f"{where}, all tensors keep to it (steepest exponent {signed(steepest)}).")
    if question.condition == "step":
        said += _unjudged(growths)
    numbers: dict[str, Value] = {"optimizer": OPTIMIZER, "learning rate": LR, "steps": STEPS}
    rows = tuple(_rows(growths, question.condition))
    return Finding(
        question.code,
        level,
        question.titles[level],
        " ".join(said),
        why=question.why,
        remedy=remedy,
        evidence=Evidence(numbers, rows),
    )


def _without_plan(question: Question, growth: Growth) -> str:
    """The worst tensor at ten times the size; empty where all is well."""
    measured, axis = growth.standard, growth.axis
    if not measured.finite:
        return f"Without a plan the training diverges at {measured.size}."
    broken = _broken(measured, question.condition)
    if not broken:
        return ""
    worst = broken[0]
    power = measured.exponent(worst.off(question.condition))
    return (
        f"Without a plan, {counted(len(broken), 'kind')} of tensor out of {len(measured.folded)} "
        f"{'leaves' if len(broken) == 1 else 'leave'} the spectral condition as the {axis} grows: at 10× the "
        f"{axis} {question.subject} {worst.name} is {times(10 ** abs(power))} times too "
        f"{'large' if power > 0 else 'small'} ({axis} to the {signed(power)})."
    )


def _unjudged(growths: Sequence[Growth]) -> Iterator[str]:
    """The tensors that are left out, if there are any."""
    measured = (one for growth in growths for one in (growth.standard, growth.planned))
    names = dict.fromkeys(line.name for one in measured for line in one.folded if line.only_rounding)
    if names:
        yield (
            f"Not judged: {listed(list(names))}, whose gradient is zero up to rounding, as nothing they do "
            "reaches the loss."
        )


def _broken(measured: Spectral, condition: Condition) -> tuple[SpectralRow, ...]:
    least = {"bias": VECTOR_NOISE, "gain": VECTOR_NOISE}
    return tuple(
        line
        for line in measured.broken(condition, ATOL)
        if abs(math.log(line.off(condition))) > math.log(least.get(line.role, NOISE))
    )


def _steepest(measured: Spectral, condition: Condition) -> float:
    powers = (measured.exponent(line.off(condition)) for line in measured.folded)
    return max((power for power in powers if not math.isnan(power)), key=abs, default=0.0)


def _rows(growths: Sequence[Growth], condition: Condition) -> Iterator[Mapping[str, Value]]:
    """By which factor each kind of tensor would be off at ten times the size."""
    rows: dict[str, dict[str, Value]] = {}
    columns: list[str] = []
    for growth in growths:
        found = {f"10× {growth.axis}": growth.standard, f"{growth.axis}, plan": growth.planned}
        columns += found
        for column, measured in found.items():
            for line in measured.folded:
                power = measured.exponent(line.off(condition))
                row = rows.setdefault(line.name, {"tensor": line.name, "role": line.role})
                row[column] = None if math.isnan(power) else round(10**power, 2)
    for row in rows.values():
        yield {column: row.get(column) for column in ("tensor", "role", *columns)}


section = Section("Spectral condition", 70, examine, measures=True)
