"""TH525: does the stream differ along a number that each example has, such as a diffusion time?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.present.text import counted
from theodolite.probes.stream.along import StreamAlong
from theodolite.probes.stream.stream import stream
from theodolite.surveying.budget import first_of
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, rounded, times
from theodolite.surveying.section import measuring
from theodolite.surveying.sections.stream.measurement import MOST_PASS, StreamMeasurement

DIFFERENCES = Check(
    "TH525",
    "The stream along a number of the examples",
    "Where each example comes with a number, such as the time of a diffusion, one network does many tasks. "
    "The stream may grow, and its gradient change with depth, by far more at one time than at another. A "
    "mean over the batch hides this.",
)
GROUPS, MOST_EXAMPLES, FEWEST_EXAMPLES = 4, 64, 16
"""Groups, and examples in all of them; the fewest if a forward pass takes much work."""
FEWEST_EACH = 4
"""Fewest examples in a group. With two, random groups differ by a factor of 2 in 2 of 48 cases; with four,
by 1.7 at most."""
APART = 2.0
"""Factor between groups from which a finding is a note."""


def between_examples(context: SurveyContext, found: StreamMeasurement) -> Iterator[Finding]:
    """TH525, if the inputs hold a number for each example."""
    given = example_number(context.batch)
    if given is None:
        return
    name, values = given
    with measuring(DIFFERENCES, (UseError, RuntimeError)):
        batch = first_of(context.batch, MOST_EXAMPLES)
        examples = min(MOST_EXAMPLES, len(values))
        groups = min(GROUPS, examples // FEWEST_EACH)
        if groups < 2:
            raise UseError(
                f"the batch has {counted(examples, 'example')}, and two groups need {2 * FEWEST_EACH}"
            )
        work = context.forward_work(found.model, batch).total
        if not context.deep and work > MOST_PASS:
            examples = max(min(FEWEST_EXAMPLES, examples), int(examples * MOST_PASS / work))
        seen = stream(
            found.model,
            context.workload.loss,
            first_of(batch, examples),
            skip=False,
            along=values[:examples],
            groups=groups,
        )
    yield judge(found, name, seen)


def example_number(batch: Batch) -> tuple[str, Tensor] | None:
    """The first input that is one floating-point number for each example, and how to name it.

    It stands beside a tensor of more dimensions with as many examples as the first input; no name is read.

    >>> import torch
    >>> images, times = torch.zeros(4, 3, 8, 8), torch.rand(4)
    >>> name, found = example_number(((images, times), images))
    >>> name, found is times, example_number((images, images))
    ('input 1', True, None)
    """
    inputs = batch[0]
    entries: list[tuple[str, Any]]
    if isinstance(inputs, Mapping):
        entries = [(f"input {key!r}", value) for key, value in inputs.items()]
    elif isinstance(inputs, tuple | list):
        entries = [(f"input {at}", value) for at, value in enumerate(inputs)]
    else:
        return None
    tensors = [(name, value) for name, value in entries if isinstance(value, Tensor) and value.ndim]
    rows = {len(value) for _, value in tensors if value.ndim > 1}
    for name, value in tensors:
        of_examples = len(value) in rows and len(value) == len(tensors[0][1])
        if of_examples and value.is_floating_point() and value.ndim == 1 and len(value.unique()) > 1:
            return name, value
    return None


def judge(found: StreamMeasurement, name: str, seen: StreamAlong) -> Finding:
    """TH525: by which factor the growth of the stream, or of its gradient, differs between groups."""
    spans = {"stream": seen.growth_span, "gradient": seen.gradient_span}
    factors = {what: high / low for what, (low, high) in spans.items()}
    low, high = seen.groups[0].low, seen.groups[-1].high
    where = found.where.removesuffix(",")
    groups = f"{counted(len(seen.groups), 'group')} of examples by {name}, {rounded(low)} to {rounded(high)}"
    said = [
        f"the stream is {_to(seen.growth_span)} times its start after the last block",
        f"its gradient is {_to(seen.gradient_span)} times as large before the first block as after the last",
    ]
    said = [text for text, span in zip(said, spans.values(), strict=True) if not math.isnan(span[0])]
    apart = any(factor > APART for factor in factors.values())
    return DIFFERENCES.finding(
        "note" if apart else "ok",
        f"{where}, in {groups}: {'; '.join(said) or 'there is no gradient and no growth to compare'}.",
        title="Symptoms that differ between examples" if apart else "",
        remedy="A mean over the batch hides this: look at th.probes.stream(…, along=t) with this input as t, "
        "also during training, and consider routing with a query that depends on it, or weights of the loss "
        "over it."
        if apart
        else "",
        numbers={
            **({} if found.training is None else found.training.numbers),
            "size": str(found.size),
            "examples": sum(group.examples for group in seen.groups),
            **{f"{what}, largest over smallest": factor for what, factor in factors.items()},
        },
        rows=[
            {
                "from": group.low,
                "to": group.high,
                "examples": group.examples,
                "loss": group.stream.loss,
                "stream": group.stream.growth.ratio,
                "gradient": group.stream.backward.ratio,
                "f/h": group.stream.branches[-1].share,
                "least cosine": group.cosines[0],
            }
            for group in seen.groups
        ],
        figures=[seen.figure()],
    )


def _to(span: tuple[float, float]) -> str:
    return " to ".join(dict.fromkeys(map(times, span)))
