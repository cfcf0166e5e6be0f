"""The best learning rate of trial networks, under a plan and without one: downhill, an octave at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.fleet.run import Run
from theodolite.fleet.training import targets_in, train
from theodolite.planning.parameterization import Parameterization
from theodolite.surveying.batches import few
from theodolite.surveying.budget import Budget, TooLong, pass_work
from theodolite.surveying.trials import LR, OPTIMIZER, Trials
from theodolite.surveying.wording import counted
from theodolite.sweeping.curves import Row
from theodolite.sweeping.families import Family, analyse
from theodolite.sweeping.transfer import SMALL_LOSS
from theodolite.workloads import Workload

START = round(math.log2(LR))
LOWEST, HIGHEST = START - 6, START + 6
"""Exponents of the learning rates between which the best is sought."""
FAR, CLOSE = 1.0, 0.5
"""Octaves: an optimum has moved if it is farther away than the first, or than the second and this is dear."""
DEAR = 0.05
"""Of the progress."""
TARGETS = 128
"""In a batch, about; one example at least."""
HELD_OUT = 2
"""Batches by which a network is judged."""
RUNS = 8
"""What one size takes about, plan and standard together; for the estimate of what can be afforded."""
OPTIMIZER_WORK = 60
"""What a step of AdamW takes for one parameter, in multiplications of a matrix product."""


class Untold(UseError):
    """These few small runs cannot tell; the message says why."""


@dataclass(frozen=True)
class Effort:
    """How much is spent."""

    steps: int
    seeds: int
    halves: bool
    """Are the half octaves beside the best one tried too?"""
    work: float
    """Most multiplications that one size may take."""
    planned: float
    """Most multiplications that all sizes together may take by the estimate, …"""
    most: float
    """… and in the end, as an optimum may be farther away."""


QUICK = Effort(steps=16, seeds=1, halves=False, work=2.6e11, planned=4.5e11, most=7e11)
DEEP = Effort(steps=32, seeds=3, halves=True, work=2e12, planned=2.4e13, most=2.4e13)
SURE_SEEDS = 3
"""Where the optimum seems to move under a plan, so many seeds decide."""


@dataclass(frozen=True)
class Move:
    """From the optimum of the base to that of a larger network."""

    size: Size
    octaves: float
    """Between the two; nan where all learning rates diverged."""
    share: float
    """What the larger network loses with the best rate of the base, of the progress."""
    sure: bool
    """Is that more than the noise of seeds? One seed cannot say so."""

    @property
    def counts(self) -> bool:
        """Has the optimum moved, and does that cost more than 1 % of the progress?"""
        if math.isinf(self.share):
            return True
        return self.share > SMALL_LOSS and abs(self.octaves) > (CLOSE if self.share > DEAR else FAR)


@dataclass(frozen=True, eq=False)
class Rates:
    """Loss against learning rate at several sizes. At base size both families are one and the same."""

    plan: Family
    standard: Family
    progress: float
    """By how much the loss of the base falls at its best. The loss itself may be near zero."""
    steps: int
    targets: int
    """In a batch."""


def seek(trials: Trials) -> Rates:
    """Train the base and larger networks at several learning rates, downhill to where it goes up again.

    Raises Untold where the networks are too large, nothing is learnt, or the base has no optimum.
    """
    effort = DEEP if trials.site.deep else QUICK
    workload = _lighter(trials.workload)
    larger = _affordable(trials, workload, effort)
    runs = _Runs(trials, workload, effort, Budget(effort.most, deep=trials.site.deep))
    seeds = range(trials.seed, trials.seed + effort.seeds)
    center, progress = _center(runs, seeds)
    for how in ("standard", "plan"):
        for size in larger:
            runs.descend(how, size, center, seeds)
    found = runs.rates(progress, seeds)
    more = range(trials.seed, trials.seed + SURE_SEEDS)
    if len(seeds) < len(more) and any(move.counts for move in moves(found.plan, found.progress)):
        with suppress(Untold):  # then the finding says that it may be noise
            for size in (trials.base, *larger):
                runs.descend("plan", size, center, more)
            found = runs.rates(progress, seeds)
    return found


def moves(family: Family, progress: float) -> tuple[Move, ...]:
    """To every larger size, how far the optimum moves and what that costs, of the progress."""
    here = family.optimum(family.base)
    by_size = {transfer.size: transfer for transfer in family.transfers}
    found = []
    for optimum in family.optima:
        if optimum.size == family.base:
            continue
        if optimum.size not in by_size:  # all diverged
            found.append(Move(optimum.size, math.nan, math.inf, sure=True))
            continue
        transfer = by_size[optimum.size]
        octaves = family.scale.place(optimum.value) - family.scale.place(here.value)
        share = transfer.lost / progress
        sure = math.isinf(share) or transfer.interval.low > 0
        found.append(Move(optimum.size, octaves, share, sure))
    return tuple(found)


@dataclass
class _Runs:
    """Every run is made once."""

    trials: Trials
    workload: Workload
    effort: Effort
    budget: Budget
    losses: dict[tuple[Parameterization, Size, float, int], float] = field(default_factory=dict)
    """Held-out, infinite where the run diverged."""
    first: list[float] = field(default_factory=list)
    """Training losses before the first step, of every run."""
    steps: dict[Size, float] = field(default_factory=dict)
    """What a step takes at each size."""

    def descend(self, how: Parameterization, size: Size, start: float, seeds: Sequence[int]) -> float:
        """The best exponent, one above it and two below having been tried.

        Above the optimum curves are rough and have dents; below they are smooth.
        """
        made = {exponent for kind, at, exponent, _ in self.losses if (kind, at) == (how, size)}
        means = {exponent: self._mean(how, size, exponent, seeds) for exponent in sorted({*made, start})}
        while True:
            best = min(means, key=lambda exponent: (means[exponent], exponent))
            near = (one for one in (best - 1, best - 2, best + 1) if LOWEST <= one <= HIGHEST)
            new = next((one for one in near if one not in means), None)
            if new is None:
                break
            means[new] = self._mean(how, size, new, seeds)
        if self.effort.halves:
            for exponent in (best - 0.5, best + 0.5):
                self._mean(how, size, exponent, seeds)
        return best

    def _mean(self, how: Parameterization, size: Size, exponent: float, seeds: Iterable[int]) -> float:
        return statistics.fmean(self._loss(how, size, exponent, seed) for seed in seeds)

    def _loss(self, how: Parameterization, size: Size, exponent: float, seed: int) -> float:
        key = how, size, exponent, seed
        if key not in self.losses:
            self.losses[key] = self._train(*key)
        return self.losses[key]

    def _train(self, how: Parameterization, size: Size, exponent: float, seed: int) -> float:
        if size not in self.steps:
            self.steps[size] = step_work(self.trials, self.workload, size)
        try:
            self.budget.spend(self.effort.steps * self.steps[size])
        except TooLong as error:
            made = counted(len(self.losses), "small run")
            raise Untold(f"{made} {'was' if len(self.losses) == 1 else 'were'} not enough: {error}") from None
        lr = 2.0**exponent
        planned = how == "plan"
        run = Run(
            self.workload.name,
            size,
            lr,
            optimizer=OPTIMIZER,
            parameterization=how,
            base=self.trials.base if planned else None,
            seed=seed,
            steps=self.effort.steps,
            warmup=self.effort.steps // 10,
            held_out=HELD_OUT,
        )
        plan = self.trials.planned(size, lr) if planned else self.trials.standard(size, lr)
        outcome = train(run, self.workload, plan=plan)
        self.first += [loss for step, loss in outcome.metrics["loss"] if step == 0]
        return math.inf if outcome.held_out is None else outcome.held_out

    def rates(self, progress: float, seeds: Sequence[int]) -> Rates:
        """What all runs say together. Only these seeds are there for the standard parameterization."""
        base = self.trials.base
        rows = []
        for (how, size, exponent, seed), loss in self.losses.items():
            if how == "plan":
                rows.append(_row("plan", size, exponent, seed, loss))
            if seed in seeds and (how == "standard" or size == base):
                rows.append(_row("standard", size, exponent, seed, loss))
        plan, plain = analyse(rows, base=base)
        targets = targets_in(self.workload.draw(self.trials.seed, 0))
        return Rates(plan, plain, progress, self.effort.steps, targets)


def _row(how: Parameterization, size: Size, exponent: float, seed: int, loss: float) -> Row:
    known = math.isfinite(loss)
    return {
        "optimizer": OPTIMIZER,
        "parameterization": how,
        "width": size.width,
        "depth": size.depth,
        "seed": seed,
        "lr": 2.0**exponent,
        "status": "finished" if known else "diverged",
        "held_out": loss if known else None,
    }


def _center(runs: _Runs, seeds: Sequence[int]) -> tuple[float, float]:
    """The exponent that is best at the base, and the progress it makes; if it has one and makes some."""
    base = runs.trials.base
    best = runs.descend("plan", base, START, seeds)
    loss = statistics.fmean(runs.losses["plan", base, best, seed] for seed in seeds)
    after = f"after {counted(runs.effort.steps, 'step')} of {base}"
    if math.isinf(loss):
        raise Untold(f"{base} diverges at every learning rate down to 2^{LOWEST}")
    first = statistics.fmean(runs.first)
    if not first - loss > SMALL_LOSS * abs(first):
        raise Untold(f"{after} the loss is {loss:.3f} at best, and it began at {first:.3f}")
    if best in (LOWEST, HIGHEST):
        raise Untold(f"{after} the best learning rate is 2^{best:g} or beyond, the end of those tried")
    return best, first - loss


def _affordable(trials: Trials, workload: Workload, effort: Effort) -> list[Size]:
    """Along each axis the largest size that does not take too long; where there is time, all of those.

    The deeper ones are left out where all together would take too long.
    """
    works = {
        size: _work(trials, workload, effort, size) for size in (trials.base, *trials.widths, *trials.depths)
    }
    wider, deeper = (
        [size for size in axis if works[size] <= effort.work] for axis in (trials.widths, trials.depths)
    )
    if not wider or works[trials.base] + works[wider[0]] > effort.planned:
        raise Untold(f"networks wider than {trials.base} take too long to be trained for a few steps")
    chosen = [*wider, *deeper] if trials.site.deep else [*wider[-1:], *deeper[-1:]]
    if sum(works[size] for size in (trials.base, *chosen)) > effort.planned:
        return [size for size in chosen if size in wider]
    return chosen


def _work(trials: Trials, workload: Workload, effort: Effort, size: Size) -> float:
    """About what all runs of a size take, in multiplications."""
    return RUNS * effort.seeds * effort.steps * step_work(trials, workload, size)


def step_work(trials: Trials, workload: Workload, size: Size) -> float:
    """About what one step of training takes, in multiplications."""
    model = trials.site.build(size)
    with untouched_randomness(trials.seed), torch.no_grad():
        work = pass_work(lambda: workload.evaluate(model, workload.draw(trials.seed, 0)))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return 3 * work.total + OPTIMIZER_WORK * num_parameters


def _lighter(workload: Workload) -> Workload:
    """The workload with few targets in a batch, if all its tensors have examples as their first dimension."""

    held_out = workload.held_out
    return replace(
        workload,
        batch=lambda seed, step: few(workload.draw(seed, step), TARGETS),
        held_out=None if held_out is None else lambda seed, step: few(held_out(seed, step), TARGETS),
    )
