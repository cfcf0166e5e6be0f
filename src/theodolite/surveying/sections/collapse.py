"""Where along the depth do classes come apart, and what is left for the later blocks?

In a new network NC1 says nothing about depth, so the network is trained briefly first. It is judged only if
it solves its task by then: what it has not learned may be what its later blocks are for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from theodolite.core.batches import Batch, targets_in
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.calling import call, logits, require_logits
from theodolite.core.errors import UseError
from theodolite.present.text import counted
from theodolite.probes.features.collapse import Collapse, CollapseAt, collapse
from theodolite.surveying.budget import first_of
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, rounded
from theodolite.surveying.section import Section, Unmeasured, measuring
from theodolite.surveying.short_training import ShortTraining, train
from theodolite.surveying.trials import MOST_PARAMETERS, OPTIMIZER_WORK

APART = Check(
    "TH531",
    "Classes over depth",
    "Each block of a classifier can draw the examples of a class together and the classes apart. Where later "
    "blocks hardly do so any more, they have nothing left to do, and neither have the blocks that a deeper "
    "network adds.",
)
EACH, TOGETHER = 0.05, 0.2
"""In later blocks NC1 falls by less than these shares: in each of them, and in all together."""
IDLE = 0.25
"""Least share of such blocks that is worth a note."""
ACCURACY = 0.9
"""Below this accuracy depth is not judged."""
BEHIND = 0.02
"""Classes are apart where the nearest class mean is right for a share of the examples that is at most so far
below the accuracy. With 1024 examples the standard error of either is at most 0.01."""
FEWEST_EACH = 8
"""Fewest examples of a class, on average: n of a class bound NC1 by about n, and hide how it falls."""


@dataclass(frozen=True)
class ClassifierEffort:
    """How much is spent."""

    steps: int
    """Of training."""
    examples: int
    """Held-out examples, about."""
    parameters: int
    """Most of the network."""
    work: float
    """Multiplications of the training, to which its steps are cut."""


QUICK = ClassifierEffort(steps=128, examples=1024, parameters=MOST_PARAMETERS, work=4e10)
DEEP = ClassifierEffort(steps=1024, examples=4096, parameters=8 * MOST_PARAMETERS, work=2e12)
FEWEST_STEPS = 32
"""With less work than these take, nothing is trained."""
MOST_EXAMPLES, FEWER_EXAMPLES = 256, 64
"""In a training batch, and if all steps with the first are too much work."""


@dataclass(frozen=True)
class DrawnBatches:
    """Batches that are drawn again each time they are read, so that only one is in memory."""

    context: SurveyContext
    steps: int
    examples: int
    """Most in a batch."""
    held_out: bool = False

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.steps):
            yield first_of(self.context.draw(step, held_out=self.held_out), self.examples)


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH531."""
    if not _has_classes(context.batch):
        yield APART.finding(
            "ok", "The targets are not one class for each example, so no classes are compared."
        )
        return
    if not context.anatomy.branches:
        yield APART.finding("ok", "The network has no residual branches, so there are no blocks to compare.")
        return
    with measuring(APART, (UseError, RuntimeError)):  # of autograd, and of memory
        require_logits(context.workload.loss, "Neural collapse")
        effort = DEEP if context.deep else QUICK
        batches, judges = _affordable(context, effort), _held_out(context, effort)
        network = train(context, context.size, batches)
        if not math.isfinite(network.after):
            raise UseError(f"the loss is {network.losses[-1]} after {len(network.losses) - 1} steps of AdamW")
        found = collapse(network.model, context.workload.loss, judges)
    yield judge(network, found)


def judge(network: ShortTraining, found: Collapse) -> Finding:
    """TH531: after how many blocks are classes apart, so that later ones change little?"""
    places = [place for place in found.places if place.block is not None]
    profile = [place.geometry.quotient for place in places]
    blocks = len(places) - 1
    evidence = _evidence(network, found, places)
    trained = f"after {len(network.losses)} steps of AdamW"
    if found.accuracy < ACCURACY:
        return _unjudged(f"held-out accuracy is only {found.accuracy:.0%} {trained}", **evidence)
    if blocks < 1 or not math.isfinite(profile[-1]):
        return _unjudged(f"the spread of classes along the blocks is not known {trained}", **evidence)
    where = f"At {network.size}, {trained} (held-out accuracy {found.accuracy:.0%}),"
    apart = next(
        at
        for at, place in enumerate(places)
        if (place.geometry.nearest >= found.accuracy - BEHIND and _hardly_falls(profile[at:])) or at == blocks
    )
    later = blocks - apart
    if later < max(1, IDLE * blocks):
        return APART.finding(
            "ok",
            f"{where} NC1, the spread within classes over that between them, goes from "
            f"{rounded(profile[0])} before the first of {counted(blocks, 'block')} to "
            f"{rounded(profile[-1])} after the last.",
            **evidence,
        )
    evidence["numbers"] |= {"blocks": blocks, "blocks before classes are apart": apart}
    fall = 1 - profile[-1] / profile[apart]
    together = f"by {fall:.1%} in all of them" if fall > 0 else "not in all of them together"
    return APART.finding(
        "note",
        f"{where} classes are apart {f'after {apart}' if apart else 'before the first'} of "
        f"{counted(blocks, 'block')}: NC1, the spread within classes over that between them, falls by less "
        f"than {EACH:.0%} in each later block, and {together}.",
        title="Blocks after classes are apart",
        remedy="Compare with a network of fewer blocks before you make this one deeper. For a trained "
        "network, th.probes.collapse(model, loss, batches) shows whether the later blocks are used by then, "
        "and theodolite grow whether one more would help.",
        **evidence,
    )


def _unjudged(why: str, **evidence: Any) -> Finding:
    """TH531 of a network of which nothing can be said."""
    return APART.finding(
        "ok",
        f"Not judged: {why}.",
        remedy="Look at the trained network with th.probes.collapse(model, loss, batches).",
        **evidence,
    )


def _hardly_falls(profile: Sequence[float]) -> bool:
    """Does NC1 fall by little in each of these steps, and in all together?"""
    kept = [after / before for before, after in pairwise(profile)]
    return all(one > 1 - EACH for one in kept) and profile[-1] > (1 - TOGETHER) * profile[0]


def _evidence(network: ShortTraining, found: Collapse, places: Sequence[CollapseAt]) -> dict[str, Any]:
    before = [None, *(place.geometry.quotient for place in places)]
    return {
        "numbers": {
            "size": str(network.size),
            **network.numbers,
            "held-out examples": found.samples,
            "classes": len(found.classes),
            "held-out accuracy": found.accuracy,
        },
        "rows": [
            {
                "place": place.name,
                "NC1": place.geometry.quotient,
                "NC1 falls by": None if last is None else 1 - place.geometry.quotient / last,
                "NC1 pinv": place.geometry.pinv,
                "nearest class mean is right": place.geometry.nearest,
            }
            for place, last in zip(places, before, strict=False)
        ],
        "figures": [found.figure()],
    }


def _has_classes(batch: Batch) -> bool:
    """Is there one whole number for each example? Tokens of a text are not examples."""
    inputs, targets = batch
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
    return (
        isinstance(targets, Tensor)
        and not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
        and first is not None
        and first.shape[:1] == targets.shape
    )


def _affordable(context: SurveyContext, effort: ClassifierEffort) -> DrawnBatches:
    """Batches of the training. Raises Unmeasured if it would take too much work."""
    parameters = context.num_parameters(context.size)
    if parameters > effort.parameters:
        raise Unmeasured(_unjudged(f"{parameters:,} parameters are too many for a short training"))
    model = context.build()
    for examples in (MOST_EXAMPLES, FEWER_EXAMPLES):
        batch = first_of(context.batch, examples)
        work = 3 * context.forward_work(model, batch).total + OPTIMIZER_WORK * parameters
        steps = min(effort.steps, int(effort.work / work))
        if steps == effort.steps:
            break
    if steps < FEWEST_STEPS:
        raise Unmeasured(_unjudged(f"a short training, of {FEWEST_STEPS} steps, takes too much work"))
    with untouched_randomness(context.seed), evaluated(model), torch.no_grad():
        shape = tuple(logits(call(model, batch[0])).shape)
    if len(shape) != 2 or shape[1] < 2:
        why = f"logits of shape {shape} are not a number for each class of each example"
        raise Unmeasured(_unjudged(why))
    return DrawnBatches(context, steps, examples)


def _held_out(context: SurveyContext, effort: ClassifierEffort) -> DrawnBatches:
    """Held-out examples. Raises Unmeasured if their classes have too few."""
    size = min(effort.examples, targets_in(context.draw(0, held_out=True)))
    found = DrawnBatches(context, math.ceil(effort.examples / size), effort.examples, held_out=True)
    labels = torch.cat([targets for _, targets in found])
    counts = labels[labels >= 0].bincount()
    examples, classes = int(counts.sum()), int((counts > 0).sum())
    if classes < 2 or examples < FEWEST_EACH * classes:
        why = (
            f"{counted(examples, 'held-out example')} of {counted(classes, 'class')} are too few, as the "
            f"spread of classes takes two of them, and {FEWEST_EACH} examples of each"
        )
        raise Unmeasured(_unjudged(why))
    return found


section = Section("Classes over depth", 79, examine, measures=True)
