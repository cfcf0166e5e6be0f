"""What the transfer study found: claims, tables, figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from theodolite.core.size import Size
from theodolite.present.text import signed
from theodolite.sweeping import Family, Optimum, OptimumDrift, analyse
from theodolite.sweeping.figures import draw
from theodolite.sweeping.transfer import ALONG
from theodolite_studies.framework.claims import Decided
from theodolite_studies.framework.records import Record, distinct, select

MOST, MOST_DIT = 1.0, 0.5
"""Octaves by which the optimum of a plan may move: of a language model, and of a diffusion transformer."""
DEEP_ENOUGH = 8
"""By how much deeper a network without norms must be for a claim about depth."""
BARE = "gpt-enwik8-bare"
BARE_NETWORKS = (BARE, "gpt-none")
DIT, DIT_RANDOM = "dit-cifar10", "dit-cifar10-random"
KINDS = {BARE: "-bare", "gpt-none": "-bare", DIT: "-dit", DIT_RANDOM: "-dit-random"}
"""By network, what its figures have in their names."""
NAMES = {
    BARE: ", no norms",
    "gpt-none": ", no norms",
    DIT: ", DiT",
    DIT_RANDOM: ", DiT with random modulation",
}
"""And what follows the name of the optimizer in words."""
PAPER = {
    ("muon-kimi", "plan", "width"): "2^-7 from 128 to 1024",
    ("muon-kimi", "standard", "width"): "2^-6 to 2^-8",
    ("muon-kimi", "plan", "depth"): "2^-7 from 4 to 64",
    ("muon-kimi", "standard", "depth"): "2^-7 from 4 to 64",
    ("bare", "plan", "depth"): "trains to 256",
    ("bare", "standard", "depth"): "fails at 256",
}
"""Figure 1 and tables 8 to 13, which have Muon-Kimi alone, over the range that is run here."""


class NetworkFamilies:
    """The study's data: runs, and by network what a sweep's analysis says of them."""

    def __init__(self, records: Sequence[Record], base: Size) -> None:
        self.records, self.base = records, base

    @cached_property
    def by_network(self) -> dict[str, tuple[Family, ...]]:
        """The families of each workload."""
        names = sorted(distinct(self.records, "workload"), key=lambda name: name in (DIT, DIT_RANDOM))
        return {name: analyse(select(self.records, workload=name), base=self.base) for name in names}


def claims(data: NetworkFamilies) -> list[Decided]:
    """What was claimed before anything was run, as far as there are runs to tell."""
    found: list[Decided] = []
    for workload, families in data.by_network.items():
        pairs: dict[str, dict[str, Family]] = {}
        for family in families:
            pairs.setdefault(family.optimizer, {})[family.parameterization] = family
        for pair in pairs.values():
            if "plan" not in pair or "standard" not in pair:
                continue
            if workload in BARE_NETWORKS:
                found += _without_norms(pair["plan"], pair["standard"])
            else:
                found += _with_norms(workload, pair["plan"], pair["standard"])
    return found


def _decided(statement: str, paper: str, threshold: str, here: str, holds: bool) -> Decided:
    return Decided(statement, paper, threshold, here, "holds" if holds else "fails")


def _with_norms(workload: str, plan: Family, standard: Family) -> Iterator[Decided]:
    optimizer, name = plan.optimizer, f"{plan.optimizer}{NAMES.get(workload, '')}"
    most = MOST_DIT if workload in (DIT, DIT_RANDOM) else MOST
    paper = {} if workload in (DIT, DIT_RANDOM) else PAPER
    for along in ALONG:
        mine, other = plan.drift(along), standard.drift(along)
        if mine is None or other is None:
            continue
        yield _decided(
            f"{name}, {along}: the plan's optimum moves at most {'one' if most == 1 else 'half an'} octave",
            paper.get((optimizer, "plan", along), "–"),
            f"≤ {most:g} octave, bracketed",
            _moved(mine, plan),
            mine.movement <= most and not mine.bounded,
        )
        yield _decided(
            f"{name}, {along}: the standard one's moves more, beyond noise",
            paper.get((optimizer, "standard", along), "–"),
            "intervals apart",
            _moved(other, standard),
            other.movement > mine.movement and _apart(mine, other),
        )
    if plan.changes:
        worst = max(plan.changes, key=lambda change: change.change)
        yield _decided(
            f"{name}: wider and deeper is never worse under the plan",
            "lower loss throughout" if optimizer == "muon-kimi" and paper else "–",
            "no rise beyond noise",
            f"at worst {signed(worst.change, 3)}, {worst.smaller} to {worst.larger}",
            plan.never_worse,
        )


def _apart(one: OptimumDrift, other: OptimumDrift) -> bool:
    """Do the intervals of two drifts leave each other alone? Those that are not known do not."""
    if not (one.interval.known and other.interval.known):
        return False
    return one.interval.high < other.interval.low or other.interval.high < one.interval.low


def _without_norms(plan: Family, standard: Family) -> Iterator[Decided]:
    """Depth without norms: at which learning rates the deepest network still trains, and how well."""
    sizes = sorted(optimum.size for optimum in plan.optima)
    name, first, last = plan.optimizer, sizes[0], sizes[-1]
    if last.depth < DEEP_ENOUGH * first.depth:
        return
    yield _decided(
        f"{name} without norms: under the plan deeper is never worse, with the base's learning rate",
        PAPER["bare", "plan", "depth"],
        "no rise beyond noise",
        f"{_loss(plan.optimum(first))} at {first}, {_loss(plan.optimum(last))} at {last}",
        plan.never_worse and math.isfinite(plan.optimum(last).loss),
    )
    lost = next((each for each in standard.transfers if each.size == last), None)
    fails = lost is None or not math.isfinite(lost.loss) or lost.lost > 0.1 * abs(lost.loss)
    own = standard.optimum(last)
    if not math.isfinite(own.loss):
        tried = next(curve.values for curve in standard.curves if curve.size == last)
        seen = f"diverged from 2^{math.log2(tried[0]):.0f} to 2^{math.log2(tried[-1]):.0f}, at {last}"
    else:
        there = f"{lost.loss:.3f}" if lost is not None and math.isfinite(lost.loss) else "diverged"
        seen = f"{there}; its own best {own.loss:.3f}, at {last}"
    yield _decided(
        f"{name} without norms: the standard one fails at the base's learning rate when deep",
        PAPER["bare", "standard", "depth"],
        "loses > 10 % or diverges",
        seen,
        fails,
    )


def _loss(optimum: Optimum) -> str:
    return f"{optimum.loss:.3f}" if math.isfinite(optimum.loss) else "diverged"


def _moved(drift: OptimumDrift, family: Family) -> str:
    """How far, and between which optima: the lowest and the highest of all sizes."""
    optima = [math.log2(family.optimum(size).value) for size in drift.sizes]
    least = "at least " if drift.bounded else ""
    return f"{least}{drift.movement:.2f} octaves, 2^{min(optima):.2f} to 2^{max(optima):.2f}"


def notes(data: NetworkFamilies) -> str:
    """A table of losses for each network and way to train it."""
    return "\n\n".join(
        f"{workload}: {family}" for workload, families in data.by_network.items() for family in families
    )


def figures(data: NetworkFamilies) -> Iterator[tuple[str, str]]:
    """Losses against learning rates, for each network and optimizer."""
    for workload, families in data.by_network.items():
        for optimizer in dict.fromkeys(family.optimizer for family in families):
            mine = [family for family in families if family.optimizer == optimizer]
            title = f"{optimizer}{NAMES.get(workload, '')}: held-out loss against log2 of the base lr"
            yield f"{optimizer}{KINDS.get(workload, '')}", draw(mine, title=title)
