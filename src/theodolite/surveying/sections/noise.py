"""How large a batch is worth it, at the start of training and after a few steps?

The critical batch usually grows during training, often by orders of magnitude, as the mean gradient fades and
the noise does not. So a batch that is too small after a few steps is too small later on, which is worth a
note, and one that is too large then may be right later, which is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from theodolite.core.batches import Batch
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.examples import fingerprints, num_examples, take
from theodolite.present.text import counted
from theodolite.probes.noise.noise import UNITS, noise
from theodolite.probes.noise.result import Noise
from theodolite.surveying.budget import ENTRY, OPERATION, examples_in, first_of
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Value
from theodolite.surveying.section import Section, Unmeasured, measuring, reason
from theodolite.surveying.short_training import STEPS, ShortTraining, wake
from theodolite.surveying.trials import MOST_PARAMETERS

BATCH = Check(
    "TH801",
    "Noise and batch size",
    "Up to the critical batch, twice the batch nearly halves the steps to the same loss; far beyond it, more "
    "examples in a step are wasted. It is small in the first steps, and usually grows during training.",
)
BELOW = 4.0
"""The batch is worth a note if the critical batch is surely more than this many times as large."""


@dataclass(frozen=True)
class NoiseEffort:
    """How much is spent."""

    examples: int
    """Most that have a part in a measurement."""
    parameters: int
    """Most of the network."""
    work: float
    """Multiplications of one measurement, to which its examples are cut."""


QUICK = NoiseEffort(examples=1024, parameters=MOST_PARAMETERS, work=3e10)
DEEP = NoiseEffort(examples=8192, parameters=8 * MOST_PARAMETERS, work=1e12)
FEWEST = 16
"""With fewer gradients nothing is measured."""
MOST_DRAWN = 256
"""Batches that are drawn for a measurement, at most."""


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH801."""
    with measuring(BATCH, (UseError, RuntimeError)):  # of autograd, and of memory
        batch = examples_in(context.whole_batch)
        if batch is None:
            raise Unmeasured(_unjudged("the tensors of a batch do not all have its examples in dimension 0"))
        examples, microbatch = _affordable(context)
        batches = _unseen(context, examples)
        start = _measure(context, context.build(), batches, microbatch, batch)
        trained: ShortTraining | str = ""
        after: Noise | None = None
        try:
            trained = wake(context, context.size)
            after = _measure(context, trained.model, batches, microbatch, batch)
        except UseError as error:  # too long, or not finite: the start is known
            trained = reason(error)
    yield judge(start, trained, after)


def judge(start: Noise, trained: ShortTraining | str, after: Noise | None) -> Finding:
    """TH801: is the batch far below the critical one? `trained` may say why there is nothing after steps."""
    found = start if after is None else after
    if isinstance(trained, ShortTraining):
        numbers_of_training = trained.numbers
        before = f"is {_few(start.critical)}" if start.critical and start.known else "is not known"
        sentence = (
            f"After {counted(len(trained.losses), 'step')} of AdamW, {_inside(found.sentence)} At the start "
            f"the critical batch {before}. Over a training it usually grows."
        )
    else:
        numbers_of_training = {"after a few steps": f"not measured: {trained}"}
        sentence = f"At the start, {_inside(found.sentence)} Over a training it usually grows."
    numbers: dict[str, Value] = {
        "examples in a step": found.batch,
        "critical batch": found.critical,
        "lower end": found.low,
        "upper end": found.high,
        "critical batch at the start": start.critical,
        "measured on examples": found.examples,
        "gradients": found.units,
        **numbers_of_training,
    }
    first = {one.name: one.critical for one in (start.whole, *start.tensors)}
    rows: list[dict[str, Value]] = [
        {
            "tensor": one.name,
            "parameters": one.parameters,
            **({} if after is None else {"at the start": first[one.name]}),
            "critical batch": one.critical,
            "lower end": one.low,
            "upper end": one.high,
        }
        for one in (found.whole, *found.tensors)
    ]
    evidence: dict[str, Any] = {"numbers": numbers, "rows": rows, "figures": [found.figure()]}
    if found.low is not None and found.low > BELOW * found.batch:
        return BATCH.finding(
            "note",
            sentence,
            title="Larger batches save steps",
            remedy="If steps are what you wait for, take a larger batch, up to the critical one, and tune "
            "the learning rate for it. th.probes.NoiseMeter measures the critical batch along your training.",
            **evidence,
        )
    remedy = "" if found.known else "Measure on more examples, with --deep or th.probes.noise."
    return BATCH.finding("ok", sentence, remedy=remedy, **evidence)


def _unjudged(why: str) -> Finding:
    """TH801 where nothing is measured."""
    return BATCH.finding(
        "ok",
        f"Not measured: {why}.",
        remedy="Measure it along your training, with th.probes.NoiseMeter.",
    )


def _measure(
    context: SurveyContext, model: nn.Module, batches: list[Batch], microbatch: int, batch: int
) -> Noise:
    with untouched_randomness(context.seed), context.calling():
        return noise(model, context.workload.loss, batches, microbatch=microbatch, batch=batch)


def _affordable(context: SurveyContext) -> tuple[int, int]:
    """Examples of a measurement, and of one gradient. Raises Unmeasured if it would take too much work."""
    effort = DEEP if context.deep else QUICK
    parameters = context.num_parameters(context.size)
    if parameters > effort.parameters:
        raise Unmeasured(_unjudged(f"{parameters:,} parameters are too many for a survey"))
    one = context.forward_work(context.build(), first_of(context.batch, 1))
    each = 3 * (one.multiplications + ENTRY * one.entries)
    fixed = 3 * OPERATION * one.operations
    units = min(UNITS, int(effort.work / (each + fixed)))
    if units < FEWEST:
        raise Unmeasured(_unjudged(f"{FEWEST} gradients of one example take too much work"))
    microbatch = max(1, min(effort.examples // UNITS, int((effort.work / units - fixed) / each)))
    return units * microbatch, microbatch


def _unseen(context: SurveyContext, examples: int) -> list[Batch]:
    """Examples that the few steps are not trained on, each once. Raises Unmeasured if there are too few."""
    found: list[Batch] = []
    seen: set[bytes] = set()
    for step in range(1, STEPS + 1):
        seen.update(fingerprints(context.draw(step)))
    left = examples
    for step in range(STEPS + 1, STEPS + 1 + MOST_DRAWN):
        batch = first_of(context.draw(step), 2 * left)
        new = []
        for index, made in enumerate(fingerprints(batch)):
            if made not in seen:
                seen.add(made)
                new.append(index)
        if not new:  # the batches repeat
            break
        part = take(batch, new[:left])
        found.append(part)
        left -= num_examples(part)
        if not left:
            break
    if (number := examples - left) < FEWEST:
        raise Unmeasured(
            _unjudged(f"only {counted(number, 'example')} are not in the first batches already: they repeat")
        )
    return found


def _inside(sentence: str) -> str:
    """A sentence that goes on after a comma."""
    return sentence[0].lower() + sentence[1:]


def _few(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{float(f'{value:.2g}'):,.0f}"


section = Section("Noise and batch size", 78, examine, measures=True)
