"""What one more block is measured on: a network after a few training steps, and which examples.

A new network has a gradient everywhere, which says nothing, so it is trained for a few steps first. The
signal is judged on held-out examples: neither trained on, nor used for the directions that they judge.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from theodolite.anatomy.names import canonical_modules
from theodolite.core.batches import Batch, targets_in
from theodolite.core.building import evaluated, in_one_line, untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.examples import fingerprints, num_examples, take
from theodolite.core.size import Size
from theodolite.present.text import counted
from theodolite.probes.signal import gradient_statistics
from theodolite.probes.signal.result import Signal
from theodolite.probes.signal.signal import signal
from theodolite.surgery import InsertionPoints, find_points
from theodolite.surveying.budget import ENTRY, TooLong, Work, pass_work
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Value
from theodolite.surveying.section import Unmeasured
from theodolite.surveying.trials import LR, MOST_PARAMETERS, trials_of

PLACE = Check(
    "TH603",
    "Where a block could be inserted",
    "A trained network can be made deeper if its blocks are in a list: a copy of a block that adds nothing "
    "is inserted between two of them, and the function stays the same. A network that is built anew at "
    "another depth does not need this.",
)
EXAMPLES = Check(
    "TH603",
    "Too few independent examples",
    "Whether a loss falls is judged by its spread over independent examples: sequences or images, each drawn "
    "separately and none of them trained on. A repeated example makes the error estimate too small, and on "
    "training examples any network looks better than it is.",
)


@dataclass(frozen=True)
class SignalEffort:
    """How much is spent."""

    steps: int
    """Of training."""
    targets: int
    """In a training batch, about; at least one example."""
    sample: int
    """Targets in the sample that judges, about, …"""
    examples: tuple[int, int]
    """… with at least and at most so many examples, …"""
    batches: int
    """… from no more than so many batches, unless these are the fewest examples."""
    work: float
    """Multiplications to which batches and samples are cut as far as possible."""


QUICK = SignalEffort(steps=16, targets=256, sample=2048, examples=(32, 1024), batches=16, work=1.3e11)
DEEP = SignalEffort(steps=64, targets=1024, sample=8192, examples=(64, 4096), batches=64, work=1.6e12)
FEWEST = 16
"""Fewest targets that a training batch is cut to."""
EXTRA = 2
"""Times the work that is allowed for the base of the trials."""
PASSES = 5
"""Forward passes for each example of a sample: the network, the candidates in it, and the way back."""
FEWEST_JUDGES = gradient_statistics.FEWEST
"""With fewer held-out examples the standard error is not known."""
PART, FEWEST_DIRECTIONS = 0.5, 8
"""Examples that give the directions: so many for each that judges, and not fewer than these."""
MAPS = (nn.Linear, _ConvNd, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
"""Modules with per-example gradients of their parameters."""
RATES = LR, LR / 4, LR / 16
"""Learning rates: the next is tried if one does not lower the loss."""


@dataclass(frozen=True)
class BrieflyTrained:
    """A network after a few steps of AdamW, and its points."""

    model: nn.Module = field(repr=False)
    size: Size
    points: InsertionPoints = field(repr=False)
    examples: int
    """Of a sample."""
    rate: float
    losses: tuple[float, ...]
    """Before each step."""
    seen: frozenset[bytes] = field(repr=False)
    """Fingerprints of the training examples."""

    @property
    def before(self) -> float:
        """The loss on the first batch."""
        return self.losses[0]

    @property
    def after(self) -> float:
        """The mean loss of the last quarter of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 4) :])

    @property
    def learns(self) -> bool:
        """Has the loss fallen?"""
        return self.after < self.before


@dataclass(frozen=True)
class Distinct:
    """Examples that all differ."""

    batches: list[Batch] = field(repr=False)
    examples: int
    drawn: int
    """How many were drawn to find them, …"""
    barred: int
    """… and how many of those were excluded."""


@dataclass(frozen=True)
class SignalMeasurement:
    """The signal, and what it was measured on."""

    signal: Signal
    network: BrieflyTrained
    where: str
    """Begins a sentence."""

    @property
    def setting(self) -> dict[str, Value]:
        """What was measured, for the evidence."""
        return {
            "size": str(self.network.size),
            "steps of AdamW": len(self.network.losses),
            "learning rate": self.network.rate,
            "loss at the start": self.network.before,
            "loss after the steps": self.network.after,
            "examples that give the directions": self.signal.estimated_on,
            "examples that judge them": self.signal.judged_on,
        }


def train_briefly(context: SurveyContext) -> BrieflyTrained:
    """The surveyed network after a few steps; if it is large, the deepest of the trials, or their base.

    Raises Unmeasured if no block can be inserted, TooLong if all are too large.
    """
    effort = DEEP if context.deep else QUICK
    for size, extra in _sizes(context):
        if context.num_parameters(size) > MOST_PARAMETERS:
            continue
        model = context.build(size)
        batch, sample, work = _amounts(context, model, effort)
        if work <= extra * effort.work:
            points = _points(context, model)
            if _are_run_one_by_one(model, points):
                sample = min(sample, max(effort.examples[0], _affordable(context, model, effort)))
            return _trained(context, size, points, effort.steps, batch, sample)
    raise TooLong(f"networks of {size} are too large")


def draw_judges(context: SurveyContext, network: BrieflyTrained) -> Distinct:
    """Held-out examples that the network was not trained on."""
    name = "held_out" if context.workload.held_out is not None else "the held-out batch"
    return _distinct(name, context.workload.draw_held_out, 0, network.examples, network.seen)


def measure(context: SurveyContext, network: BrieflyTrained, judges: Distinct) -> SignalMeasurement:
    """The signal, along directions from batches after those of the training."""
    draw = partial(context.workload.draw, context.seed)
    held_out = frozenset(fingerprints(judges.batches)) if judges.examples else frozenset()
    others = _distinct("batch", draw, len(network.losses), math.ceil(PART * judges.examples), held_out)
    for sample, kind, rest, needed in (
        (judges, "held-out examples", "those trained on", FEWEST_JUDGES),
        (others, "examples in further batches", "those held out", FEWEST_DIRECTIONS),
    ):
        if sample.examples < needed:
            raise Unmeasured(
                EXAMPLES.finding(
                    "note",
                    f"It cannot be decided whether a block helps: of {sample.drawn} {kind} only "
                    f"{sample.examples} differ from each other and from {rest}, and {needed} are needed.",
                    remedy="Let batch(seed, step) and held_out(seed, step) draw other examples at every "
                    "step.",
                )
            )
    found = signal(
        network.model, context.workload.loss, others.batches, judges.batches, points=network.points
    )
    name = str(network.size)
    name += "" if network.size == context.size else ", a small network of the trials"
    course = f"{network.before:.3g} to {network.after:.3g}"
    course = f"loss {course}" if network.learns else f"which did not lower the loss, {course}"
    return SignalMeasurement(
        found, network, f"At {name}, after {len(network.losses)} steps of AdamW ({course}),"
    )


def _sizes(context: SurveyContext) -> Iterator[tuple[Size, float]]:
    """Sizes to try, and the allowed multiple of the work."""
    yield context.size, 1.01
    yield from ((size, 1.01) for size in trials_of(context).depths[-1:])
    yield trials_of(context).base, EXTRA


def _amounts(context: SurveyContext, model: nn.Module, effort: SignalEffort) -> tuple[int, int, float]:
    """Examples in a training batch and in a sample, and the multiplications of all of it."""
    one = _work_of_one(context, model)
    each = (
        one.multiplications + ENTRY * one.entries
    )  # the number of operations does not depend on that of examples
    targets = max(1, targets_in(context.batch) // num_examples(context.batch))
    fewest, most = effort.examples
    most = min(most, effort.batches * num_examples(context.batch))

    def work(batch: int, sample: int) -> float:
        return each * (3 * effort.steps * batch + PASSES * (1 + PART) * sample)

    batch = max(1, effort.targets // targets)
    sample = max(fewest, min(most, effort.sample // targets))
    share = effort.work / max(effort.work, work(batch, sample))
    batch = max(min(batch, math.ceil(FEWEST / targets)), int(batch * share))
    sample = max(fewest, int(sample * share))
    return batch, sample, work(batch, sample)


def _work_of_one(context: SurveyContext, model: nn.Module) -> Work:
    """Work of a forward pass of one example."""
    with untouched_randomness(context.seed), evaluated(model), torch.no_grad():
        try:
            return pass_work(lambda: context.workload.evaluate(model, take(context.batch, slice(0, 1))))
        except (IndexError, RuntimeError) as error:  # the network has run on the whole batch before
            raise UseError(
                f"a batch cannot be cut into single examples, as a graph cannot: {in_one_line(error)}"
            ) from error


def _are_run_one_by_one(model: nn.Module, points: InsertionPoints) -> bool:
    """Does a block end in a parameter without per-example gradients?"""
    modules = dict(canonical_modules(model))
    return any(
        not isinstance(modules[point.like].get_submodule(closer.name.rpartition(".")[0]), MAPS)
        for point in points.found
        for closer in point.outputs
    )


def _affordable(context: SurveyContext, model: nn.Module, effort: SignalEffort) -> int:
    """Examples of a sample that are affordable if each is run separately."""
    return int(effort.work / (PASSES * (1 + PART) * _work_of_one(context, model).total))


def _points(context: SurveyContext, model: nn.Module) -> InsertionPoints:
    """Where a block could be inserted."""
    try:
        found = find_points(model, take(context.batch, slice(0, 2))[0])
        if not found.found:
            place, reason = next(iter(found.left.items()))
            raise UseError(
                f"none of {counted(len(found.left), 'place')} works, the first is {place} ({reason})"
            )
        return found
    except UseError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise Unmeasured(
            PLACE.finding(
                "note",
                f"No block can be inserted into this network: {reason}.",
                title="No place for a block",
                remedy="To make a trained network deeper, keep its blocks in an nn.ModuleList or "
                "nn.Sequential, and let each return the stream plus what it adds.",
            )
        ) from error


def _trained(
    context: SurveyContext, size: Size, points: InsertionPoints, steps: int, batch: int, sample: int
) -> BrieflyTrained:
    """Trained at the highest of a few learning rates that lowers the loss; at the lowest if none does."""
    draw = partial(context.workload.draw, context.seed)
    batches = [take(_called("batch", draw, step), slice(batch)) for step in range(steps)]
    seen = frozenset(fingerprints(batches))
    for rate in RATES:
        model = context.build(size)
        losses = tuple(_steps(context, model, rate, batches))
        network = BrieflyTrained(model, size, points, sample, rate, losses, seen)
        if network.learns:
            break
    return network


def _steps(context: SurveyContext, model: nn.Module, rate: float, batches: list[Batch]) -> Iterator[float]:
    """The loss before each step of AdamW, up to one that is not finite."""
    trainable = [tensor for tensor in model.parameters() if tensor.requires_grad]
    if not trainable:
        raise UseError("no parameter requires a gradient, so nothing is trained")
    optimizer = torch.optim.AdamW(trainable, lr=rate, weight_decay=0.0)
    model.train()
    with untouched_randomness(context.seed), torch.enable_grad():
        for batch in batches:
            optimizer.zero_grad()
            loss = context.workload.evaluate(model, batch)
            yield float(loss.detach())
            if not loss.isfinite():
                return
            loss.backward()
            optimizer.step()


def _distinct(
    name: str, draw: Callable[[int], Batch], start: int, wanted: int, barred: Collection[bytes]
) -> Distinct:
    """Up to `wanted` examples that differ from each other and from those barred."""
    found: list[Batch] = []
    known: set[bytes] = set()
    drawn = among = 0
    for step in count(start):
        batch = _called(name, draw, step)
        prints = fingerprints(batch)
        new = [
            index
            for index, one in enumerate(prints)
            if one not in known and one not in barred and prints.index(one) == index
        ][: wanted - len(known)]
        drawn += len(prints)
        among += sum(one in barred for one in prints)
        if not new:
            break
        known.update(prints[index] for index in new)
        found.append(take(batch, new))
        if len(known) == wanted:
            break
    return Distinct(found, len(known), drawn, among)


def _called(name: str, draw: Callable[[int], Batch], step: int) -> Batch:
    """A batch. Any exception in it becomes a UseError."""
    try:
        return draw(step)
    except UseError:
        raise
    except Exception as error:
        raise UseError(f"{name} failed at step {step}: {in_one_line(error)}") from error
