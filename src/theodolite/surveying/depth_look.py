"""Where one more block is asked for: in which network, after which steps of training, on which units.

A network at its start has a gradient everywhere, which says nothing. So it is trained for a few steps first.
What judges is held out: units that were not trained on, and had no part in the direction that they judge.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from theodolite.anatomy.specimen import shapes_of
from theodolite.building import evaluated, in_one_line, untouched_randomness
from theodolite.errors import UseError
from theodolite.fleet.training import targets_in
from theodolite.probes.signal import Signal, signal
from theodolite.probes.units import fingerprints, take, units_in
from theodolite.size import Size
from theodolite.surgery import Points, find_points
from theodolite.surveying.finding import Value
from theodolite.surveying.site import Site
from theodolite.surveying.spot import MOST_PARAMETERS, TooLong
from theodolite.surveying.trials import LR
from theodolite.workloads import Batch


@dataclass(frozen=True)
class Effort:
    """How much is spent."""

    steps: int
    """Of training."""
    targets: int
    """In a batch of it, about; one unit at least."""
    sample: int
    """Targets in each of two samples, about, …"""
    units: tuple[int, int]
    """… and at least and at most so many units."""
    work: float
    """Multiplications, to which batches and samples are cut down as far as they can be."""


QUICK = Effort(steps=16, targets=256, sample=2048, units=(16, 256), work=6e10)
DEEP = Effort(steps=100, targets=2048, sample=16_384, units=(64, 1024), work=3e12)
FEWEST = 16
"""Targets to which a batch of training is cut down."""
EXTRA = 5
"""Times the work that is put up with for the base of the trials."""
PASSES = 5
"""Forward passes that a unit of a sample takes: the network, the candidates in it, and the way back."""
CALMER = 0.25
"""Where a learning rate does not lower the loss, this part of it is tried, …"""
TRIES = 3
"""… so many times in all."""
LEAST = 8
"""Units in a sample: of fewer the standard error is not known."""


class NoPlace(UseError):
    """No block can be inserted."""


class TooFew(UseError):
    """There are too few units that are independent of each other."""


@dataclass(frozen=True)
class Trained:
    """A network after a few steps of AdamW."""

    model: nn.Module
    size: Size
    steps: int
    rate: float
    before: float
    """The loss on the first batch, …"""
    after: float
    """… and in the mean of the last quarter of the steps."""
    seen: frozenset[bytes]
    """Fingerprints of the units it was trained on."""

    @property
    def learns(self) -> bool:
        """Has the loss fallen?"""
        return self.after < self.before


@dataclass(frozen=True)
class Sample:
    """Units that all differ."""

    batches: list[Batch]
    units: int
    drawn: int
    """To find them, so many were drawn, …"""
    barred: int
    """… of which so many were among those that may not be in it."""


@dataclass(frozen=True)
class Look:
    """What was seen, and on what."""

    signal: Signal
    trained: Trained
    where: str
    """To open a sentence with."""

    @property
    def ground(self) -> dict[str, Value]:
        """What is measured on, for the evidence."""
        return {
            "size": str(self.trained.size),
            "steps of AdamW": self.trained.steps,
            "learning rate": self.trained.rate,
            "loss at the start": self.trained.before,
            "loss after them": self.trained.after,
            "units that give the directions": self.signal.estimated_on,
            "units that judge them": self.signal.judged_on,
        }


def find_ground(site: Site) -> tuple[Trained, Points, int]:
    """The network after its steps, its points, and how many units a sample takes.

    It is the surveyed network if that is small, otherwise the deepest of the trials, or their base.

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
            return _trained(site, model, size, effort.steps, batch), _points(site, model), sample
    raise TooLong(f"networks of {size} are too large for it")


def draw_judges(site: Site, trained: Trained, units: int) -> Sample:
    """Held-out units that the network was not trained on."""
    return _distinct(
        (
            (f"held_out(0, {step})", lambda step=step: site.workload.draw_held_out(step))
            for step in range(units)
        ),
        units,
        trained.seen,
    )


def look_at(site: Site, trained: Trained, points: Points, judges: Sample) -> Look:
    """The signal, along directions from batches that come after those of the training."""
    if judges.units < LEAST:
        raise TooFew(
            f"of {judges.drawn} held-out units that were drawn only {judges.units} differ from each other and "
            f"from those trained on, and {LEAST} are needed"
        )
    seed, begin = site.seed, trained.steps
    others = _distinct(
        (
            (f"batch({seed}, {step})", lambda step=step: site.workload.draw(seed, step))
            for step in range(begin, begin + judges.units)
        ),
        judges.units,
        set(fingerprints(judges.batches)),
    )
    if others.units < LEAST:
        raise TooFew(
            f"of {others.drawn} units in the batches only {others.units} differ from each other and from those "
            f"held out, and {LEAST} are needed"
        )
    found = signal(trained.model, site.workload.loss, others.batches, judges.batches, points=points)
    name = (
        str(trained.size) if trained.size == site.size else f"{trained.size}, a small network of the trials"
    )
    losses = f"loss {trained.before:.3g} to {trained.after:.3g}"
    if not trained.learns:
        losses = f"which did not lower the loss, {trained.before:.3g} to {trained.after:.3g}"
    return Look(found, trained, f"At {name}, after {trained.steps} steps of AdamW ({losses}),")


def _sizes(site: Site) -> Iterator[tuple[Size, float]]:
    """Sizes to try, and how many times the work they may take."""
    yield site.size, 1.01
    yield from ((size, 1.01) for size in site.trials.depths[-1:])
    yield site.trials.base, EXTRA


def _amounts(site: Site, model: nn.Module, effort: Effort) -> tuple[int, int, float]:
    """Units in a batch of training and in a sample, and the multiplications that these take."""
    one = take(site.batch, slice(0, 1))
    with (
        untouched_randomness(site.seed),
        evaluated(model),
        torch.no_grad(),
        FlopCounterMode(display=False) as counter,
    ):
        site.workload.evaluate(model, one)
    each = counter.get_total_flops() / 2
    targets = max(1, targets_in(site.batch) // units_in(site.batch))
    fewest, most = effort.units

    def work(batch: int, sample: int) -> float:
        return each * (3 * effort.steps * batch + PASSES * 2 * sample)

    batch = max(1, effort.targets // targets)
    sample = min(most, max(fewest, effort.sample // targets))
    if (whole := work(batch, sample)) > effort.work:
        share = effort.work / whole
        batch = max(min(batch, -(-FEWEST // targets)), int(batch * share))
        sample = max(fewest, int(sample * share))
    return batch, sample, work(batch, sample)


def _points(site: Site, model: nn.Module) -> Points:
    """Where a block could be inserted; if nowhere, each reason once."""
    try:
        found = find_points(model, take(site.batch, slice(0, 2))[0])
    except UseError as error:
        raise NoPlace(str(error)) from error
    if not found.found:
        reasons = dict.fromkeys(
            reason.partition(": ")[2] or reason for said in found.left.values() for reason in said.split("; ")
        )
        raise NoPlace(f"nowhere in {', '.join(found.left)}: {'; '.join(reasons)}")
    return found


def _trained(site: Site, model: nn.Module, size: Size, steps: int, units: int) -> Trained:
    """The network after its steps, at the highest of a few learning rates that lowers the loss."""
    batches = [
        take(
            _drawn(f"batch({site.seed}, {step})", lambda step=step: site.workload.draw(site.seed, step)),
            slice(units),
        )
        for step in range(steps)
    ]
    seen = frozenset(fingerprints(batches))
    for attempt in range(TRIES):
        rate = LR * CALMER**attempt
        model = site.build(size)
        losses = _losses(site, model, rate, batches)
        found = Trained(model, size, steps, rate, losses[0], statistics.fmean(losses[-(steps // 4) :]), seen)
        if found.learns:
            break
    return found


def _losses(site: Site, model: nn.Module, rate: float, batches: list[Batch]) -> list[float]:
    """Of AdamW's steps, one for each batch; the last is not finite where it diverges."""
    trainable = [tensor for tensor in model.parameters() if tensor.requires_grad]
    if not trainable:
        raise UseError("no parameter requires a gradient, so that nothing is trained")
    optimizer = torch.optim.AdamW(trainable, lr=rate, weight_decay=0.0)
    losses: list[float] = []
    with untouched_randomness(site.seed), torch.enable_grad():
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            loss = site.workload.evaluate(model, batch)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                return losses
            loss.backward()
            optimizer.step()
    return losses
