"""Is the best learning rate of a small network also the best of a larger one, without a plan and with one?

The best rate is found by short trainings: downhill from a start, an octave at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from theodolite.core.batches import targets_in
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.fleet.run import Run
from theodolite.fleet.training import train
from theodolite.planning.parameterization import Parameterization
from theodolite.present.text import counted, listed, signed
from theodolite.surveying.budget import Budget, TooLong, with_few
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Level, Value
from theodolite.surveying.section import Section, Unmeasured, measuring
from theodolite.surveying.trials import LR, OPTIMIZER, Trials, trials_of
from theodolite.sweeping.curves import Row
from theodolite.sweeping.families import Family, analyse, optimum_text
from theodolite.sweeping.figures import figures
from theodolite.sweeping.transfer import SMALL_LOSS, Along
from theodolite.workloads import Workload

TRANSFER = Check(
    "TH401",
    "Learning-rate transfer",
    "Tuning the learning rate on a small network pays off if the result is also the best rate of the large "
    "network. If the optimum moves, the large network trains with a rate that is several times too large or "
    "too small, and tuning at its own size is too expensive.",
)
TITLES: Mapping[Level, str] = {
    "ok": "A learning rate that transfers",
    "note": "A learning rate that transfers only under a plan",
    "warn": "A learning rate that moves even under a plan",
}
SWEEP = "theodolite sweep: more steps and seeds, and sizes closer to yours"
START = round(math.log2(LR))
LOWEST, HIGHEST = START - 6, START + 6
"""Exponents of the learning rates between which the best is searched."""
FAR, CLOSE = 1.0, 0.5
"""Octaves: an optimum has moved if it is farther away than the first, or than the second at a high cost."""
HIGH_COST = 0.05
"""Of the progress."""
TARGETS = 128
"""In a batch, about; at least one example."""
HELD_OUT = 2
"""Held-out batches that a network is evaluated on."""
RUNS = 8
"""Runs of one size, about, plan and standard together; to estimate the work."""


class Undecided(UseError):
    """These few small runs cannot decide; the message says why."""


@dataclass(frozen=True)
class SearchEffort:
    """How much is spent."""

    steps: int
    seeds: int
    halves: bool
    """Are the half octaves beside the best one tried too?"""
    work: float
    """Most multiplications of one size, …"""
    planned: float
    """… of all sizes by the estimate, …"""
    most: float
    """… and in fact, as an optimum may be farther away."""


QUICK = SearchEffort(steps=16, seeds=1, halves=False, work=2.6e11, planned=4.5e11, most=1e12)
DEEP = SearchEffort(steps=32, seeds=3, halves=True, work=2e12, planned=2.4e13, most=2.4e13)
SURE_SEEDS = 3
"""Seeds that decide if the optimum seems to move under a plan."""


@dataclass(frozen=True)
class Move:
    """From the optimum of the base to that of a larger network."""

    size: Size
    octaves: float
    """Between the two; nan if all learning rates diverged."""
    share: float
    """The share of the progress that the larger network loses with the best rate of the base."""
    sure: bool
    """Is that more than the noise of seeds? One seed cannot tell."""

    @property
    def counts(self) -> bool:
        """Has the optimum moved, at a cost of more than 1 % of the progress?"""
        if math.isinf(self.share):
            return True
        return self.share > SMALL_LOSS and abs(self.octaves) > (CLOSE if self.share > HIGH_COST else FAR)


@dataclass(frozen=True, eq=False)
class RateSearch:
    """Loss against learning rate at several sizes. At base size both families are the same."""

    plan: Family
    standard: Family
    progress: float
    """By how much the loss of the base falls at its best rate. The loss itself may be near zero."""
    steps: int
    targets: int
    """In a batch."""
    undecided: str = ""
    """Why more seeds could not decide, where they were asked."""


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH401."""
    trials = trials_of(context)
    with measuring(TRANSFER):
        try:
            found = search(trials)
        except Undecided as error:
            raise Unmeasured(
                TRANSFER.finding(
                    "note",
                    f"A few small runs cannot decide whether the learning rate transfers: {error}.",
                    remedy=f"Find out with {SWEEP}.",
                )
            ) from error
    yield rate_transfers(found)


def rate_transfers(found: RateSearch) -> Finding:
    """TH401: the optimum at each size, and the cost of using that of the base."""
    planned, standard = (moves(family, found.progress) for family in (found.plan, found.standard))
    moved, moved_without = ([move for move in some if move.counts] for some in (planned, standard))
    surely = [move for move in moved if move.sure]
    base = found.plan.base
    remedy = ""
    level: Level = "warn" if surely else "note" if moved or moved_without else "ok"
    title = TITLES[level]
    if surely:
        said = [_moves(found.plan, surely, "Under a plan, the best learning rate moves")]
        remedy = f"{_tune_larger(found.plan)}Read TH201, TH202 and TH203, and confirm it with {SWEEP}."
    elif moved:
        title = TRANSFER.title
        said = [
            _moves(found.plan, moved, "Under a plan, the best learning rate seems to move"),
            "The seeds differ by as much, so this may be noise."
            if found.plan.optimum(base).num_seeds > 1
            else f"This is one seed, so it may be noise; with more, {found.undecided}.",
        ]
        remedy = f"Find out with --deep, or {SWEEP}."
    else:
        said = [_stays(found.plan, planned, "Under a plan, the best learning rate")]
    if moved_without:
        said.append(_moves(found.standard, moved_without, "Without a plan it moves"))
        remedy = remedy or (
            f"Tune the learning rate at {base}, and train larger networks with it under "
            f"th.plan(build, inputs, size=…, base=Size({base.width}, {base.depth}), lr=…)."
        )
    else:
        said.append(_stays(found.standard, standard, "Without a plan it"))
    return TRANSFER.finding(
        level,
        " ".join(said),
        title=title,
        remedy=remedy,
        numbers={
            "optimizer": OPTIMIZER,
            "steps": found.steps,
            "seeds": found.plan.optimum(base).num_seeds,
            "targets in a batch": found.targets,
        },
        rows=list(_rows(found)),
        figures=figures((found.plan, found.standard)),
    )


def search(trials: Trials) -> RateSearch:
    """Train the base and larger networks at several learning rates, until the loss rises on both sides.

    Raises Undecided if the networks are too large, nothing is learned, or the base has no optimum.
    """
    effort = DEEP if trials.context.deep else QUICK
    workload = with_few(trials.workload, TARGETS)
    larger = _affordable(trials, workload, effort)
    runs = _Runs(trials, workload, effort, Budget(effort.most, deep=trials.context.deep))
    seeds = range(trials.seed, trials.seed + effort.seeds)
    center, progress = _center(runs, seeds)
    runs.compare(larger, center, seeds)
    found = runs.found(progress)
    more = range(trials.seed, trials.seed + SURE_SEEDS)
    if len(seeds) < len(more) and any(move.counts for move in moves(found.plan, found.progress)):
        try:
            center, progress = _center(runs, more)
            runs.compare(larger, center, more)
            found = runs.found(progress)
        except Undecided as error:  # then the finding says that it may be noise
            found = replace(found, undecided=str(error))
    return found


def moves(family: Family, progress: float) -> tuple[Move, ...]:
    """For every larger size, how far the optimum moves and what share of the progress that costs."""
    here = family.optimum(family.base)
    by_size = {transfer.size: transfer for transfer in family.transfers}
    found = []
    for optimum in (one for one in family.optima if one.size != family.base):
        transfer = by_size.get(optimum.size)
        if transfer is None:  # all diverged
            found.append(Move(optimum.size, math.nan, math.inf, sure=True))
            continue
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
    effort: SearchEffort
    budget: Budget
    losses: dict[tuple[Parameterization, Size, float, int], float] = field(default_factory=dict)
    """Held-out; infinite if the run diverged."""
    first: list[float] = field(default_factory=list)
    """Training losses before the first step, of every run."""
    steps: dict[Size, float] = field(default_factory=dict)
    """Work of a step at each size."""

    def compare(self, sizes: Sequence[Size], start: float, seeds: Sequence[int]) -> None:
        """Search at these sizes without a plan and with one, on the same seeds."""
        for size in sizes:
            self.descend("standard", size, start, seeds)
            self.descend("plan", size, start, seeds)

    def descend(self, how: Parameterization, size: Size, start: float, seeds: Sequence[int]) -> float:
        """The best exponent, after one above it and two below were tried.

        Above the optimum curves are rough and have local minima; below they are smooth.
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
        keys = [(how, size, exponent, seed) for seed in seeds]
        for key in keys:
            if key not in self.losses:
                self.losses[key] = self._train(*key)
        return statistics.fmean(self.losses[key] for key in keys)

    def _train(self, how: Parameterization, size: Size, exponent: float, seed: int) -> float:
        if size not in self.steps:
            self.steps[size] = self.trials.step_work(size, self.workload)
        try:
            self.budget.spend(self.effort.steps * self.steps[size])
        except TooLong as error:
            made = counted(len(self.losses), "small run")
            verb = "was" if len(self.losses) == 1 else "were"
            raise Undecided(f"{made} {verb} not enough: {error}") from None
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
        outcome = train(run, self.workload, plan=plan, metrics=False)
        self.first += [loss for step, loss in outcome.metrics["loss"] if step == 0]
        return math.inf if outcome.held_out is None else outcome.held_out

    def found(self, progress: float) -> RateSearch:
        """All runs together. At base size those under a plan serve both."""
        base = self.trials.base
        rows: list[Row] = []
        for (how, size, exponent, seed), loss in self.losses.items():
            known = math.isfinite(loss)
            row: Row = {
                "optimizer": OPTIMIZER,
                "parameterization": how,
                "width": size.width,
                "depth": size.depth,
                "seed": seed,
                "lr": 2.0**exponent,
                "status": "finished" if known else "diverged",
                "held_out": loss if known else None,
            }
            rows.append(row)
            if how == "plan" and size == base:
                rows.append({**row, "parameterization": "standard"})
        plan, standard = analyse(rows, base=base)
        targets = targets_in(self.workload.draw(self.trials.seed, 0))
        return RateSearch(plan, standard, progress, self.effort.steps, targets)


def _center(runs: _Runs, seeds: Sequence[int]) -> tuple[float, float]:
    """The best exponent at the base, and its progress. Raises Undecided if there is none."""
    base = runs.trials.base
    best = runs.descend("plan", base, START, seeds)
    loss = statistics.fmean(runs.losses["plan", base, best, seed] for seed in seeds)
    after = f"after {counted(runs.effort.steps, 'step')} of {base}"
    if math.isinf(loss):
        raise Undecided(f"{base} diverges at every learning rate down to 2^{LOWEST}")
    first = statistics.fmean(runs.first)
    if not first - loss > SMALL_LOSS * abs(first):
        raise Undecided(f"{after} the loss is {loss:.3f} at best, and it started at {first:.3f}")
    if best in (LOWEST, HIGHEST):
        raise Undecided(
            f"{after} the best learning rate is 2^{best:g} or beyond, at the end of the range tried"
        )
    return best, first - loss


def _affordable(trials: Trials, workload: Workload, effort: SearchEffort) -> list[Size]:
    """Along each axis the largest size that does not take too long; if deep, all of them.

    The deeper ones are left out if all together take too long.
    """
    works = {
        size: RUNS * effort.seeds * effort.steps * trials.step_work(size, workload)
        for size in (trials.base, *trials.larger)
    }
    wider, deeper = (
        [size for size in axis if works[size] <= effort.work] for axis in (trials.widths, trials.depths)
    )
    if not wider or works[trials.base] + works[wider[0]] > effort.planned:
        raise Undecided(f"networks wider than {trials.base} take too long to train for a few steps")
    chosen = [*wider, *deeper] if trials.context.deep else [*wider[-1:], *deeper[-1:]]
    if sum(works[size] for size in (trials.base, *chosen)) > effort.planned:
        return [size for size in chosen if size in wider]
    return chosen


def _stays(family: Family, found: Sequence[Move], what: str) -> str:
    """How far it moves at most, and what that costs."""
    farthest = max(abs(move.octaves) for move in found)
    most = max(move.share for move in found)
    cost = f"costs them at most {_percent(most)} of the progress" if most >= 0.0005 else "costs them nothing"
    near = "at" if farthest < 0.05 else f"within {farthest:.1f} octaves of"
    base, sizes = family.base, [curve.size for curve in family.curves]
    widest = max(size for size in sizes if size.depth == base.depth)
    deepest = max(size for size in sizes if size.width == base.width)
    up_to = listed([str(size) for size in (widest, deepest) if size != base])
    return (
        f"{what} stays {near} {_value(family, base)}, the best of {base}, up to {up_to}. Using the rate of "
        f"{base} {cost}."
    )


def _moves(family: Family, found: Sequence[Move], what: str) -> str:
    """The worst of the moves in words: one that diverges, or the farthest."""
    worst = max(found, key=lambda move: (math.isinf(move.share), math.isnan(move.octaves), abs(move.octaves)))
    if math.isnan(worst.octaves):
        return f"{what} out of range: {worst.size} diverges at all rates that were tried."
    here, there = (_value(family, size) for size in (family.base, worst.size))
    axis: Along = "width" if worst.size.width != family.base.width else "depth"
    drift = family.drift(axis)
    pace = ""
    if drift is not None and not drift.bounded:
        pace = f", {signed(drift.slope)} octaves per doubling of the {axis}"
    lost = f"loses {_percent(worst.share) if worst.share <= 1 else 'more than all'} of the progress"
    if math.isinf(worst.share):
        lost = "diverges"
    return (
        f"{what} from {here} at {family.base} to {there} at {worst.size}{pace}. With the rate of "
        f"{family.base}, {worst.size} {lost}."
    )


def _tune_larger(family: Family) -> str:
    """The size from which the optimum stays, if there is one."""
    found = [reach for reach in family.reaches if reach.smallest not in (None, family.base)]
    return "".join(f"From {reach.smallest} to {reach.largest} it stays: tune there. " for reach in found)


def _rows(found: RateSearch) -> Iterator[Mapping[str, Value]]:
    """The optimum at every size, and what the best rate of the base loses there."""
    families = {"plan": found.plan, "standard": found.standard}
    lost = {
        how: {move.size: move.share for move in moves(family, found.progress)}
        for how, family in families.items()
    }
    for size in (curve.size for curve in found.plan.curves):
        row: dict[str, Value] = {"size": str(size)}
        for how, family in families.items():
            optimum = family.optimum(size)
            row[f"best, {how}"] = optimum_text(optimum, family.scale)
            row[f"loss, {how}"] = round(optimum.loss, 3) if math.isfinite(optimum.loss) else None
            row[f"lost, {how}"] = _percent(lost[how][size]) if size in lost[how] else None
        yield row


def _value(family: Family, size: Size) -> str:
    """The optimum, with its interval if that says something."""
    optimum = family.optimum(size)
    return family.scale.text(optimum.value) if optimum.noisy else optimum_text(optimum, family.scale)


def _percent(share: float) -> str:
    return "diverges" if math.isinf(share) else f"{100 * share:.1f} %"


section = Section("Learning-rate transfer", 75, examine, measures=True)
