"""Would one more block lower the loss, to first order, and where?

A new network has a gradient everywhere, which says nothing, so it is trained for a few steps first. The
signal is judged on held-out examples: neither trained on, nor used for the directions that they judge.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from theodolite.anatomy.names import canonical_modules
from theodolite.core.batches import Batch, targets_in
from theodolite.core.building import in_one_line
from theodolite.core.calling import require_logits
from theodolite.core.errors import UseError
from theodolite.core.examples import fingerprints, num_examples, take
from theodolite.core.size import Size
from theodolite.present.text import counted, listed
from theodolite.probes.signal import gradient_statistics
from theodolite.probes.signal.result import SILENT, PointSignal, Signal
from theodolite.probes.signal.signal import signal
from theodolite.surgery import InsertionPoints, find_points
from theodolite.surveying.budget import ENTRY, TooLong, Work
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Value, rounded, times, with_minus
from theodolite.surveying.section import Section, Unmeasured, measuring, reason
from theodolite.surveying.short_training import ShortTraining, train
from theodolite.surveying.trials import MOST_PARAMETERS, trials_of

WHY = (
    "A new block that ends in zeros changes nothing, and the gradient with respect to these zeros says how "
    "fast the loss falls when they start to move. If that is no more than noise on held-out examples, no "
    "block helps at first. It says no more than that: in the two networks of the growing study, the point "
    "with the largest gain was not where a trained block helped most, and for the same compute two more "
    "blocks did not beat further training without them."
)
HELPS = Check("TH601", "One more block", WHY)
NO_HELP = Check("TH602", "No block is seen to help", WHY)
UNDECIDED = "Undecided whether a block helps"
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
LEAK = 0.01
"""Share of held-out examples that may be training examples by chance, such as duplicate images."""


@dataclass(frozen=True)
class BrieflyTrained(ShortTraining):
    """A network after a few steps of AdamW, and its points."""

    points: InsertionPoints = field(repr=False)
    examples: int
    """Of a sample."""
    seen: frozenset[bytes] = field(repr=False)
    """Fingerprints of the training examples."""


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


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH601 or TH602, or TH603 if it cannot be measured."""
    if not context.anatomy.branches:
        yield PLACE.finding("ok", "The network has no residual branches, so no block can be inserted.")
        return
    with measuring(PLACE, (UseError, RuntimeError)):  # of autograd, and of memory
        require_logits(context.workload.loss, "The signal of a block")
        network = train_briefly(context)
        judges = draw_judges(context, network)
        if context.workload.held_out is not None and judges.barred > LEAK * judges.drawn:
            yield EXAMPLES.finding(
                "warn",
                f"{judges.barred} of {judges.drawn} held-out examples are also in the first few training "
                "batches.",
                title="Held-out examples in the training data",
                remedy="Give held_out(seed, step) data of its own, split off before batches are drawn.",
                numbers={"held-out examples": judges.drawn, "trained on": judges.barred},
            )
            if judges.examples < FEWEST_JUDGES:
                return
        found = measure(context, network, judges)
    yield one_more(found)


def one_more(found: SignalMeasurement) -> Finding:
    """TH601 if a point has a gain above its noise, else TH602."""
    signal = found.signal
    points = counted(len(signal.points), "point")
    best = max(signal.above or signal.points, key=lambda one: one.gain)
    gain = _gain(best)
    noted = f" ({'; '.join(signal.notes)}.)" if signal.notes else ""
    # Without the covariance matrix, which would be most of the page.
    figure = signal.figure()
    panels = tuple(one for one in figure.panels if one.data[0]["type"] != "heatmap")
    evidence: dict[str, Any] = {
        "numbers": _numbers(found),
        "rows": list(_rows(signal)),
        "figures": [dataclasses.replace(figure, panels=panels)],
    }
    if signal.silent:
        return NO_HELP.finding(
            "note",
            f"{found.where} it is undecided whether a new block lowers the held-out loss: {SILENT}.{noted}",
            title=UNDECIDED,
            remedy="For a trained network, theodolite grow tells more, on your data and with a certificate.",
            **evidence,
        )
    if signal.deepest and signal.seeming:
        best = max(signal.seeming, key=lambda one: one.gain)
        return NO_HELP.finding(
            "note",
            f"{found.where} it is undecided whether a new block lowers the held-out loss. At {best.name} the "
            f"gain is {_gain(best)}, which seems to be above its noise, but {signal.doubt}.",
            title=UNDECIDED,
            remedy="Survey again with --deep, which takes more examples. For a trained network, theodolite "
            "grow tells more, on your data and with a certificate.",
            **evidence,
        )
    if signal.deepest:
        return NO_HELP.finding(
            "note",
            f"{found.where} a new block lowers the held-out loss by more than its noise at none of {points}. "
            f"The largest gain is {gain}, at {best.name}; {signal.threshold:.2g} standard errors are needed."
            + noted,
            remedy=f"{signal.judged_on} examples may be too few: survey again with --deep. For a trained "
            "network, theodolite grow tells more, on your data and with a certificate.",
            **evidence,
        )
    where = f"at {len(signal.above)} of {points}" if len(signal.points) > 1 else "at the only point"
    return HELPS.finding(
        "ok" if found.network.learns else "note",
        f"{found.where} a new block lowers the held-out loss, to first order, {where}, most at {best.name}: "
        f"by {gain}{_by_branch(best)}. How much a trained block helps is another question.{noted}",
        remedy="Ask again when the network is trained: theodolite grow inserts a block where it helps, and "
        "certifies on held-out examples by how much the loss falls.",
        **evidence,
    )


def _gain(best: PointSignal) -> str:
    return with_minus(f"{rounded(best.gain)} ± {times(best.error)} per unit of step")


def train_briefly(context: SurveyContext) -> BrieflyTrained:
    """The surveyed network after a few steps; if it is large, the deepest of the trials, or their base.

    Raises Unmeasured if no block can be inserted, TooLong if all are too large.
    """
    effort = DEEP if context.deep else QUICK
    for size, extra in _sizes(context):
        if (number := context.num_parameters(size)) > MOST_PARAMETERS:
            why = f"networks of {size} are too large, with {number:,} parameters"
            continue
        model = context.build(size)
        batch, sample, work = _amounts(context, model, effort)
        if work <= extra * effort.work:
            points = _points(context, model)
            if _are_run_one_by_one(model, points):
                each = PASSES * (1 + PART) * _work_of_one(context, model).total
                sample = min(sample, max(effort.examples[0], int(effort.work / each)))
            batches = [take(context.draw(step), slice(batch)) for step in range(effort.steps)]
            found = train(context, size, batches)
            seen = frozenset(fingerprints(batches))
            return BrieflyTrained(found.model, size, found.rate, found.losses, points, sample, seen)
        why = f"at {size} it takes {work / effort.work:.2g} times the work that is allowed"
    raise TooLong(why)


def draw_judges(context: SurveyContext, network: BrieflyTrained) -> Distinct:
    """Held-out examples that the network was not trained on."""
    return _distinct(partial(context.draw, held_out=True), 0, network.examples, network.seen)


def measure(context: SurveyContext, network: BrieflyTrained, judges: Distinct) -> SignalMeasurement:
    """The signal, along directions from batches after those of the training."""
    held_out = frozenset(fingerprints(judges.batches)) if judges.examples else frozenset()
    wanted = math.ceil(PART * judges.examples)
    others = _distinct(context.draw, len(network.losses), wanted, held_out)
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
    loss = context.workload.loss
    found = signal(network.model, loss, others.batches, judges.batches, points=network.points)
    course = f"{network.before:.3g} to {network.after:.3g}"
    course = f"loss {course}" if network.learns else f"which did not lower the loss, {course}"
    where = context.where(network.size).removesuffix(",")
    where = f"{where}, after {len(network.losses)} steps of AdamW ({course}),"
    return SignalMeasurement(found, network, where)


def _by_branch(best: PointSignal) -> str:
    """The share of each branch in the gain, if there are several."""
    if len(best.shares) < 2 or best.gain <= 0:
        return ""
    shares = [f"{share / best.gain:.0%} by branch {at}" for at, share in enumerate(best.shares)]
    return f" ({with_minus(listed(shares))})"


def _numbers(found: SignalMeasurement) -> dict[str, Value]:
    network, signal = found.network, found.signal
    bounds = [one.alignment_bound for one in signal.points]
    numbers: dict[str, Value] = {
        "size": str(network.size),
        **network.numbers,
        "examples that give the directions": signal.estimated_on,
        "examples that judge them": signal.judged_on,
        "points above noise": f"{len(signal.above)} of {len(signal.points)}",
        "noise, in standard errors": signal.threshold,
        "two samples do not align, at most": f"{min(bounds):.2g} to {max(bounds):.2g}",
    }
    return numbers | ({"places for no block": listed(list(signal.left))} if signal.left else {})


def _rows(found: Signal) -> Iterator[dict[str, Value]]:
    several = max(len(one.shares) for one in found.points) > 1
    for one in found.points:
        yield {
            "point": one.name,
            "gain": one.gain,
            "±": one.error,
            "above": "unsure" if one.unsure else one in found.above,
            "unaligned": one.alignment_bound,
            "C": one.covariance.effective,
            "chance": one.covariance.chance,
            **{f"branch {branch}": share for branch, share in enumerate(one.shares) if several},
        }


def _sizes(context: SurveyContext) -> Iterator[tuple[Size, float]]:
    """Sizes to try, and the allowed multiple of the work."""
    yield context.size, 1.01
    yield from ((size, 1.01) for size in trials_of(context).depths[-1:])
    yield trials_of(context).base, EXTRA


def _amounts(context: SurveyContext, model: nn.Module, effort: SignalEffort) -> tuple[int, int, float]:
    """Examples in a training batch and in a sample, and the multiplications of all of it."""
    one = _work_of_one(context, model)
    # The number of operations does not depend on that of examples.
    each = one.multiplications + ENTRY * one.entries
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
    try:
        return context.forward_work(model, take(context.batch, slice(0, 1)))
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


def _points(context: SurveyContext, model: nn.Module) -> InsertionPoints:
    """Where a block could be inserted."""
    try:
        found = find_points(model, take(context.batch, slice(0, 2))[0])
        if not found.found:
            place, why = next(iter(found.left.items()))
            raise UseError(f"none of {counted(len(found.left), 'place')} works, the first is {place} ({why})")
        return found
    except UseError as error:
        raise Unmeasured(
            PLACE.finding(
                "note",
                f"No block can be inserted into this network: {reason(error)}.",
                title="No place for a block",
                remedy="To make a trained network deeper, keep its blocks in an nn.ModuleList or "
                "nn.Sequential, and let each return the stream plus what it adds.",
            )
        ) from error


def _distinct(draw: Callable[[int], Batch], start: int, wanted: int, barred: Collection[bytes]) -> Distinct:
    """Up to `wanted` examples that differ from each other and from those barred."""
    found: list[Batch] = []
    known: set[bytes] = set()
    drawn = among = 0
    for step in count(start):
        batch = draw(step)
        prints = fingerprints(batch)
        first = {one: index for index, one in reversed(list(enumerate(prints)))}
        new = sorted(index for one, index in first.items() if one not in known and one not in barred)
        new = new[: wanted - len(known)]
        drawn += len(prints)
        among += sum(one in barred for one in prints)
        if not new:
            break
        known.update(prints[index] for index in new)
        found.append(take(batch, new))
        if len(known) == wanted:
            break
    return Distinct(found, len(known), drawn, among)


section = Section("Depth", 78, examine, measures=True)
