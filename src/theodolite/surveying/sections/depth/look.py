"""Where one more block is asked for: in which network, after which steps of training, on which units.

A network at its start has a gradient everywhere, which says nothing. So it is trained for a few steps first.
What judges is held out: units that were not trained on, and had no part in the direction that they judge.
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
from theodolite.anatomy.specimen import shapes_of
from theodolite.core.batches import Batch
from theodolite.core.building import evaluated, in_one_line, untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.examples import fingerprints, num_examples, take
from theodolite.core.size import Size
from theodolite.fleet.training import targets_in
from theodolite.probes.signal import gradient_statistics
from theodolite.probes.signal.result import Signal
from theodolite.probes.signal.signal import signal
from theodolite.surgery import Points, find_points
from theodolite.surveying.budget import ENTRY, TooLong, Work, pass_work
from theodolite.surveying.curvature_setup import MOST_PARAMETERS
from theodolite.surveying.finding import Value
from theodolite.surveying.site import Site
from theodolite.surveying.trials import LR
from theodolite.surveying.wording import counted


@dataclass(frozen=True)
class Effort:
    """How much is spent."""

    steps: int
    """Of training."""
    targets: int
    """In a batch of it, about; one unit at least."""
    sample: int
    """Targets in the sample that judges, about, …"""
    units: tuple[int, int]
    """… and at least and at most so many units, …"""
    batches: int
    """… of no more than so many batches, unless these are the fewest units."""
    work: float
    """Multiplications, to which batches and samples are cut down as far as they can be."""


QUICK = Effort(steps=16, targets=256, sample=2048, units=(32, 1024), batches=16, work=1.3e11)
DEEP = Effort(steps=64, targets=1024, sample=8192, units=(64, 4096), batches=64, work=1.6e12)
FEWEST = 16
"""Targets to which a batch of training is cut down."""
EXTRA = 2
"""Times the work that is put up with for the base of the trials."""
PASSES = 5
"""Forward passes that a unit of a sample takes: the network, the candidates in it, and the way back."""
FEWEST_JUDGES = gradient_statistics.FEWEST
"""Units that judge: of fewer the standard error is not known."""
PART, FEWEST_DIRECTIONS = 0.5, 8
"""Units that give the directions: so many for each that judges, and not fewer than these."""
MAPS = (nn.Linear, _ConvNd, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
"""Modules whose parameters have a gradient for each unit."""
RATES = LR, LR / 4, LR / 16
"""Learning rates: the next is tried where one does not lower the loss."""


class NoPlace(UseError):
    """No block can be inserted."""


class TooFew(UseError):
    """There are too few units that are independent of each other."""


@dataclass(frozen=True)
class Ground:
    """A network after a few steps of AdamW, and its points."""

    model: nn.Module = field(repr=False)
    size: Size
    points: Points = field(repr=False)
    units: int
    """That a sample takes."""
    rate: float
    losses: tuple[float, ...]
    """At the start of each step."""
    seen: frozenset[bytes] = field(repr=False)
    """Fingerprints of the units that it was trained on."""

    @property
    def before(self) -> float:
        """The loss on the first batch."""
        return self.losses[0]

    @property
    def after(self) -> float:
        """The loss in the mean of the last quarter of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 4) :])

    @property
    def learns(self) -> bool:
        """Has the loss fallen?"""
        return self.after < self.before


@dataclass(frozen=True)
class Sample:
    """Units that all differ."""

    batches: list[Batch] = field(repr=False)
    units: int
    drawn: int
    """To find them so many were drawn, …"""
    barred: int
    """… of which so many were among those that may not be in it."""


@dataclass(frozen=True)
class Look:
    """What was seen, and on what."""

    signal: Signal
    ground: Ground
    where: str
    """To open a sentence with."""

    @property
    def numbers(self) -> dict[str, Value]:
        """What is measured on, for the evidence."""
        return {
            "size": str(self.ground.size),
            "steps of AdamW": len(self.ground.losses),
            "learning rate": self.ground.rate,
            "loss at the start": self.ground.before,
            "loss after the steps": self.ground.after,
            "units that give the directions": self.signal.estimated_on,
            "units that judge them": self.signal.judged_on,
        }


def find_ground(site: Site) -> Ground:
    """The surveyed network after its steps; if it is large the deepest of the trials, or their base.

    Raises NoPlace where no block can be inserted, TooLong where all are too large, and whatever keeps the
    trials from being found.
    """
    effort = DEEP if site.deep else QUICK
    for size, extra in _sizes(site):
        if sum(math.prod(shape) for shape in shapes_of(site.build_hollow(size)).values()) > MOST_PARAMETERS:
            continue
        model = site.build(size)
        batch, sample, work = _amounts(site, model, effort)
        if work <= extra * effort.work:
            points = _points(site, model)
            if _are_run_one_by_one(model, points):
                sample = min(sample, max(effort.units[0], _affordable(site, model, effort)))
            return _trained(site, size, points, effort.steps, batch, sample)
    raise TooLong(f"networks of {size} are too large for it")


def draw_judges(site: Site, ground: Ground) -> Sample:
    """Held-out units that the network was not trained on."""
    name = "held_out" if site.workload.held_out is not None else "the held-out batch"
    return _distinct(name, site.workload.draw_held_out, 0, ground.units, ground.seen)


def look_at(site: Site, ground: Ground, judges: Sample) -> Look:
    """The signal, along directions from batches that come after those of the training."""
    draw = partial(site.workload.draw, site.seed)
    held_out = frozenset(fingerprints(judges.batches)) if judges.units else frozenset()
    others = _distinct("batch", draw, len(ground.losses), math.ceil(PART * judges.units), held_out)
    for sample, kind, rest, needed in (
        (judges, "held-out units", "those trained on", FEWEST_JUDGES),
        (others, "units in further batches", "those held out", FEWEST_DIRECTIONS),
    ):
        if sample.units < needed:
            raise TooFew(
                f"of {sample.drawn} {kind} only {sample.units} differ from each other and from {rest}, and "
                f"{needed} are needed"
            )
    found = signal(ground.model, site.workload.loss, others.batches, judges.batches, points=ground.points)
    name = str(ground.size) if ground.size == site.size else f"{ground.size}, a small network of the trials"
    course = f"{ground.before:.3g} to {ground.after:.3g}"
    course = f"loss {course}" if ground.learns else f"which did not lower the loss, {course}"
    return Look(found, ground, f"At {name}, after {len(ground.losses)} steps of AdamW ({course}),")


def _sizes(site: Site) -> Iterator[tuple[Size, float]]:
    """Sizes to try, and how many times the work they may take."""
    yield site.size, 1.01
    yield from ((size, 1.01) for size in site.trials.depths[-1:])
    yield site.trials.base, EXTRA


def _amounts(site: Site, model: nn.Module, effort: Effort) -> tuple[int, int, float]:
    """Units in a batch of training and in a sample, and the multiplications that all of it takes."""
    one = _work_of_one(site, model)
    each = one.multiplications + ENTRY * one.entries  # operations are as many for any number of units
    targets = max(1, targets_in(site.batch) // num_examples(site.batch))
    fewest, most = effort.units
    most = min(most, effort.batches * num_examples(site.batch))

    def work(batch: int, sample: int) -> float:
        return each * (3 * effort.steps * batch + PASSES * (1 + PART) * sample)

    batch = max(1, effort.targets // targets)
    sample = max(fewest, min(most, effort.sample // targets))
    share = effort.work / max(effort.work, work(batch, sample))
    batch = max(min(batch, math.ceil(FEWEST / targets)), int(batch * share))
    sample = max(fewest, int(sample * share))
    return batch, sample, work(batch, sample)


def _work_of_one(site: Site, model: nn.Module) -> Work:
    """What a forward pass of one unit takes."""
    with untouched_randomness(site.seed), evaluated(model), torch.no_grad():
        try:
            return pass_work(lambda: site.workload.evaluate(model, take(site.batch, slice(0, 1))))
        except (IndexError, RuntimeError) as error:  # the network has run on the whole batch before
            raise UseError(
                f"a batch cannot be cut into single examples, as a graph cannot: {in_one_line(error)}"
            ) from error


def _are_run_one_by_one(model: nn.Module, points: Points) -> bool:
    """Does a block end in a parameter whose gradient is known for all units of a batch together only?"""
    modules = dict(canonical_modules(model))
    return any(
        not isinstance(modules[point.like].get_submodule(closer.name.rpartition(".")[0]), MAPS)
        for point in points.found
        for closer in point.outputs
    )


def _affordable(site: Site, model: nn.Module, effort: Effort) -> int:
    """Units of a sample that there is work for if each is run by itself."""
    return int(effort.work / (PASSES * (1 + PART) * _work_of_one(site, model).total))


def _points(site: Site, model: nn.Module) -> Points:
    """Where a block could be inserted."""
    try:
        found = find_points(model, take(site.batch, slice(0, 2))[0])
    except UseError as error:
        raise NoPlace(str(error)) from error
    if not found.found:
        place, reason = next(iter(found.left.items()))
        raise NoPlace(f"of {counted(len(found.left), 'place')} none will do, the first is {place} ({reason})")
    return found


def _trained(site: Site, size: Size, points: Points, steps: int, batch: int, sample: int) -> Ground:
    """At the highest of a few learning rates that lowers the loss; at the lowest if none does."""
    draw = partial(site.workload.draw, site.seed)
    batches = [take(_called("batch", draw, step), slice(batch)) for step in range(steps)]
    seen = frozenset(fingerprints(batches))
    for rate in RATES:
        model = site.build(size)
        losses = tuple(_steps(site, model, rate, batches))
        ground = Ground(model, size, points, sample, rate, losses, seen)
        if ground.learns:
            break
    return ground


def _steps(site: Site, model: nn.Module, rate: float, batches: list[Batch]) -> Iterator[float]:
    """The loss at the start of each step of AdamW, up to one that is not finite."""
    trainable = [tensor for tensor in model.parameters() if tensor.requires_grad]
    if not trainable:
        raise UseError("no parameter requires a gradient, so that nothing is trained")
    optimizer = torch.optim.AdamW(trainable, lr=rate, weight_decay=0.0)
    model.train()
    with untouched_randomness(site.seed), torch.enable_grad():
        for batch in batches:
            optimizer.zero_grad()
            loss = site.workload.evaluate(model, batch)
            yield float(loss.detach())
            if not loss.isfinite():
                return
            loss.backward()
            optimizer.step()


def _distinct(
    name: str, draw: Callable[[int], Batch], start: int, units: int, barred: Collection[bytes]
) -> Sample:
    """So many units that differ from each other and from those barred, or as many as there are."""
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
        ][: units - len(known)]
        drawn += len(prints)
        among += sum(one in barred for one in prints)
        if not new:
            break
        known.update(prints[index] for index in new)
        found.append(take(batch, new))
        if len(known) == units:
            break
    return Sample(found, len(known), drawn, among)


def _called(name: str, draw: Callable[[int], Batch], step: int) -> Batch:
    """A batch; whatever goes wrong with it is an error of use."""
    try:
        return draw(step)
    except UseError:
        raise
    except Exception as error:
        raise UseError(f"{name} failed at step {step}: {in_one_line(error)}") from error
