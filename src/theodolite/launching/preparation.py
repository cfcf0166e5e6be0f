"""What `scale` runs: which sizes, lengths, learning rates and seeds a budget pays for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from theodolite.anatomy.flop import flop
from theodolite.core.arguments import number as check_number
from theodolite.core.arguments import one_of, positive
from theodolite.core.batches import on_device, targets_in
from theodolite.core.building import (
    build_hollow,
    build_model,
    check_device,
    one_thread,
    untouched_randomness,
)
from theodolite.core.errors import UseError
from theodolite.core.size import Size, rounded
from theodolite.optimizers.schedule import KINDS, LRFactor
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted, duration, number
from theodolite.workloads import Workload

USUAL_STEPS = 4000
"""Of a target that names no tokens."""
LAW_NETWORKS = 3
LEAST_STEPS = 48
"""Of the shortest run."""
NARROWEST, WIDEST_RATIO, DEEPEST_RATIO = 32, 8, 4
"""The base is up to this much smaller than the target, and no narrower."""
FEWEST_RATES = 3
TIMED_STEPS = 2
FURTHER = 2
"""Learning rates that the budget keeps in reserve, for where the best is the last one tried."""


@dataclass(frozen=True)
class Design:
    """How much is run of everything."""

    seeds: int
    """For each learning rate at the base."""
    lengths: tuple[int, ...]
    """Tokens of the runs at the base, in units of the shortest."""
    batches: tuple[int, ...]
    """Batches at the base, in units of the smallest, if the target's is larger."""
    law_lengths: tuple[int, ...]
    law_seeds: int


DESIGNS = (
    Design(4, (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), 3),
    Design(3, (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), 2),
    Design(3, (1, 2, 4), (1, 4), (1, 2, 4), 2),
    Design(3, (1, 4), (1, 4), (1, 2, 4), 1),
)
"""From the richest to the one that is the least."""


@dataclass(frozen=True)
class Stage:
    """Runs that answer one question."""

    name: str
    """Of its folder."""
    question: str
    sizes: tuple[Size, ...]
    num_rates: int
    seeds: int
    runs: int
    flop: float
    seconds: float
    """On one worker, as a few timed steps say."""


@dataclass(frozen=True)
class Preparation(Result):
    """What will be run, what it costs, and how long it takes. Made by `prepare`."""

    kind: ClassVar[str] = "preparation"
    loads: ClassVar[bool] = True

    workload: str
    target: Size
    """With its batch and tokens."""
    target_flop: float
    base: Size
    """The smallest size, at which the learning rate is found; with the tokens of the shortest run."""
    budget: float
    """The part of the target's FLOP that may be used."""
    rates: tuple[float, ...]
    stages: tuple[Stage, ...]
    workers: int

    @property
    def flop(self) -> float:
        """Of all runs."""
        return sum(stage.flop for stage in self.stages)

    @property
    def allowed(self) -> float:
        """FLOP that all runs together may take."""
        return self.budget * self.target_flop

    def further(self, num: int) -> float:
        """FLOP of more learning rates at the base."""
        stage = self.stage("rate")
        return num * stage.flop / stage.num_rates

    @property
    def seconds(self) -> float:
        """About how long all of it takes."""
        return sum(stage.seconds for stage in self.stages) / self.workers

    def stage(self, name: str) -> Stage:
        """By name: `rate`, `transfer`, `law`."""
        return next(stage for stage in self.stages if stage.name == name)

    def blocks(self) -> Iterator[Block]:
        """The target and the base, a row for each stage."""
        yield (
            f"{self.workload} to {self.target}: {number(self.target_flop)} FLOP\n"
            f"from {self.base}: {self.flop / self.target_flop:.2%} of the target's FLOP"
            f" (at most {self.budget:.2%}; {FURTHER} more learning rates are kept in reserve), about "
            f"{duration(self.seconds)} with {counted(self.workers, 'worker')}"
        )
        yield self.table()

    def table(self) -> Table:
        """A row for each stage."""
        rows = [
            (
                stage.question,
                _listed(stage.sizes),
                stage.num_rates,
                stage.seeds,
                stage.runs,
                stage.flop / self.target_flop,
            )
            for stage in self.stages
        ]
        share = Column("of the target", show="{:.2%}".format)
        return Table(("question", "sizes", "learning rates", "seeds", "runs", share), rows)


def prepare(
    workload: Workload,
    to: Size,
    *,
    budget: float = 0.03,
    base: Size | None = None,
    rates: Sequence[float],
    schedule: str = "wsd",
    workers: int = 1,
    device: str = "cpu",
) -> Preparation:
    """Choose what to run within a budget, from the richest design that fits.

    Args:
        workload: what is trained.
        to: the target. Its batch is that of the workload by default, its tokens those of 4000 steps.
        budget: the part of the target's FLOP that all runs together may use.
        base: the smallest network; by default up to 8 times narrower and 4 times shallower than the target.
        rates: learning rates to try at the base.
        schedule: of all runs. With `wsd` and `constant` runs of several lengths share their beginning.
        workers: runs at a time, for the estimate of the time.
        device: on which steps are timed.
    """
    _check(to, base, budget, rates, schedule)
    batch = to.batch or workload.size.batch or workload.usual_batch
    tokens = to.tokens or workload.size.tokens or workload.tokens_in(USUAL_STEPS, batch)
    target = Size(to.width, to.depth, batch, tokens)
    small = _base(workload, target) if base is None else base
    if small.width > target.width or small.depth > target.depth or small == target.network:
        raise UseError(
            f"the base is {small} and the target {target.network}: the base has to be narrower or shallower, "
            "and neither wider nor deeper"
        )
    costs = _Costs(workload, schedule, device)
    target_flop = costs.flop(target.network) * tokens
    usual = min(workload.size.batch or workload.usual_batch, batch)
    shortest = workload.tokens_in(LEAST_STEPS, usual)
    short = [design for design in DESIGNS if shortest * design.lengths[-1] <= tokens]
    if not short:
        num = LEAST_STEPS * min(design.lengths[-1] for design in DESIGNS)
        raise UseError(
            f"the target has {rounded(tokens)} tokens, and the small runs alone take up to {num} steps: give "
            f"it tokens={workload.tokens_in(num, usual)} or more"
        )

    def made(design: Design, seen: int) -> Preparation:
        at = small.at(batch=usual, tokens=seen)
        stages = _stages(target, at, design, tuple(rates), costs)
        return Preparation(
            workload.name, target, target_flop, at, budget, tuple(rates), stages, max(1, workers)
        )

    def whole(one: Preparation) -> float:
        return one.flop + one.further(FURTHER)

    least = [whole(made(design, shortest)) / target_flop for design in short]
    for design, needed in zip(short, least, strict=True):
        if needed <= budget:
            longest = tokens / 4 / design.lengths[-1]  # so that something is left to forecast
            steps = int(LEAST_STEPS * max(1.0, min(budget / needed, longest / shortest)))
            steps -= steps % design.batches[-1]  # so that the largest batch makes whole steps
            while whole(found := made(design, workload.tokens_in(steps, usual))) > found.allowed:
                steps -= design.batches[-1]  # decays are whole steps too
            return found
    way = f"budget={min(least) * 1.01:.3g}, " if min(least) * 1.01 < 1 else ""
    raise UseError(
        f"budget is {budget:.3%} of the target's {number(target_flop)} FLOP, and the least that tells "
        f"anything takes {min(least):.3%}: give {way}a target with more tokens, or a smaller base"
    )


def _check(to: Size, base: Size | None, budget: float, rates: Sequence[float], schedule: str) -> None:
    for name, size in (("to", to), ("base", base)):
        if not isinstance(size, Size) and not (name == "base" and size is None):
            raise UseError(f"{name} is {size!r}: give a Size, for example Size(256, 4)")
    if base is not None and base != base.network:
        raise UseError(
            f"base is {base}: its batch and tokens follow from the budget, so give Size({base.width}, "
            f"{base.depth})"
        )
    check_number("budget", budget, least=1e-9, most=1)
    for rate in rates:
        positive("lr", rate)
    if len(set(rates)) < FEWEST_RATES:
        raise UseError(f"lr is {list(rates)}: give {FEWEST_RATES} learning rates or more, as 2^-10:2^-4")
    one_of("schedule", schedule, KINDS)


def _stages(
    target: Size, base: Size, design: Design, rates: tuple[float, ...], costs: _Costs
) -> tuple[Stage, ...]:
    assert base.tokens is not None
    assert base.batch is not None
    assert target.batch is not None
    lengths = [base.at(tokens=base.tokens * length) for length in design.lengths]
    most = [min(base.batch * factor, target.batch) for factor in design.batches]
    batches = [base.at(batch=batch) for batch in dict.fromkeys(most) if batch > base.batch]

    def networks(*factors: tuple[int, int]) -> list[Size]:
        """The base and larger ones, none larger than the target."""
        sizes = [
            Size(
                min(w * base.width, target.width), min(d * base.depth, target.depth), base.batch, base.tokens
            )
            for w, d in ((1, 1), *factors)
        ]
        return list(dict.fromkeys(sizes))

    points = [
        one.at(tokens=base.tokens * length)
        for one in networks((2, 1), (2, 2), (4, 1), (1, 2), (1, 4))[:LAW_NETWORKS]
        for length in design.law_lengths
    ]
    return (
        _stage("rate", "best learning rate, and how it follows tokens and batch", [*lengths, *batches],
               len(rates), design.seeds, costs, shared=len(lengths)),
        _stage("transfer", "does it hold for larger networks", networks((2, 1), (1, 2)), FEWEST_RATES,
               design.seeds, costs),
        _stage("law", "how the loss falls with size and tokens", points, 1, design.law_seeds, costs),
    )  # fmt: skip


def _stage(
    name: str, question: str, sizes: Sequence[Size], rates: int, seeds: int, costs: _Costs, shared: int = 0
) -> Stage:
    """`shared` of the sizes, the first ones, are lengths that share their beginning."""
    distinct = list(dict.fromkeys(sizes))
    tokens = [float(size.tokens or 0) for size in distinct]
    for place in range(shared - 1):  # all but the longest make their decay alone
        tokens[place] *= costs.alone(distinct[place])
    each = rates * seeds
    work = [(size, seen * each) for size, seen in zip(distinct, tokens, strict=True)]
    return Stage(
        name=name,
        question=question,
        sizes=tuple(distinct),
        num_rates=rates,
        seeds=seeds,
        runs=len(distinct) * each,
        flop=sum(costs.flop(size.network) * seen for size, seen in work),
        seconds=sum(costs.seconds(size) * seen for size, seen in work),
    )


class _Costs:
    """FLOP and seconds of a workload for each target that it is trained on."""

    def __init__(self, workload: Workload, schedule: str, device: str) -> None:
        self._workload, self._schedule, self._device = workload, schedule, device
        self.flop = cache(self._flop)
        self._seconds_of = cache(self._timed)

    def seconds(self, size: Size) -> float:
        """Of one target, on one worker."""
        return self._seconds_of(size.network, size.batch)

    def alone(self, size: Size) -> float:
        """The share of its steps that a run does not have in common with a longer one."""
        steps = self._workload.steps_for(size)
        return 1 - LRFactor(self._schedule, steps).stable_until / steps

    def _flop(self, network: Size) -> float:
        batch = self._workload.draw(0, 0)
        try:
            return flop(self._workload.build, batch[0], size=network).training / max(1, targets_in(batch))
        except UseError:  # the forecast says so
            model = build_hollow(self._workload.build, network)
            return 6.0 * sum(tensor.numel() for tensor in model.parameters())

    def _timed(self, network: Size, num: int | None) -> float:
        """A few steps without an optimizer, timed."""
        check_device(self._device)
        workload = self._workload.with_batch(num)
        with untouched_randomness(0), one_thread():
            model = build_model(workload.build, network, seed=0).to(self._device).train()
            batch = on_device(workload.draw(0, 0), self._device)
            times = []
            for _ in range(1 + TIMED_STEPS):
                start = time.perf_counter()
                workload.evaluate(model, batch).backward()
                if torch.device(self._device).type == "cuda":
                    torch.cuda.synchronize(self._device)
                times.append(time.perf_counter() - start)
        return 1.3 * min(times[1:]) / max(1, targets_in(batch))  # the optimizer, evaluations


def _base(workload: Workload, target: Size) -> Size:
    """The smallest network that can be built and is not too small to tell anything."""
    depth = max(target.depth // DEEPEST_RATIO, min(target.depth, 2))
    ratio = WIDEST_RATIO
    while ratio > 1:
        width, rest = divmod(target.width, ratio)
        if rest == 0 and width >= NARROWEST:
            try:
                build_hollow(workload.build, Size(width, depth))
                return Size(width, depth)
            except Exception:  # a width that this network cannot have
                pass
        ratio //= 2
    raise UseError(
        f"the target is {target.network}, and no network of {', '.join(f'1/{r}' for r in (8, 4, 2))} of its "
        f"width can be built with width {NARROWEST} or more: give base=Size(…)"
    )


def _listed(sizes: Sequence[Size]) -> str:
    networks = dict.fromkeys(size.network for size in sizes)
    lengths = sorted({size.tokens for size in sizes if size.tokens})
    batches = sorted({size.batch for size in sizes if size.batch})
    text = ", ".join(map(str, networks)) + f"; {' / '.join(map(rounded, lengths))} tokens"
    return text + (f"; batch {' / '.join(map(str, batches))}" if len(batches) > 1 else "")
