"""What is claimed of scale vectors: paired differences of training runs, and the gradient flow of a gain.

In which cell of its grid an arm is judged was changed after the runs. The first rule, `left_out`, chose a
cell for every seed by the other seeds, so that no seed had a say in the choice it was judged by. But where
cells of an arm tie, seeds change cells in concert: they are no longer independent, and Student's t counts
them as if they were. `erring` measures it. An arm that was not run in full is not judged.
"""

# D draws, S seeds, C cells

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Decided,
    Observation,
    Observe,
    all_within,
    at_least,
    at_most,
    decide,
    each,
    per,
)
from theodolite_studies.framework.paired import LEVEL, Paired, Verdict, less
from theodolite_studies.framework.records import Record, distinct, select
from theodolite_studies.scale_vectors.arms import EXACT, Arm, ArmSetting

GridCell = tuple[float, float]
"""Learning rate and weight decay."""
Losses = Mapping[GridCell, Mapping[int, float]]
"""By cell and seed; infinite of a run that diverged."""
Rule = Callable[[Array], Array]
"""From losses (…, seeds, cells) to those by which an arm is judged (…, seeds)."""
DRAWS = 4000


@dataclass(frozen=True)
class Comparison:
    """One claim about training: the first arm has a lower loss than the second, or a higher one."""

    claim: str
    first: str
    second: str
    below: bool
    weight_decay: float | None = None
    """Compared at this one; otherwise each arm at the best cell of its grid."""


COMPARISONS = (
    Comparison("removing all gains hurts", "removed cosine paper", "plain cosine paper", False),
    Comparison("decay helps input gains", "plain cosine paper", "plain cosine matrices", True),
    Comparison("the same, norms on both sides", "peri cosine paper", "peri cosine matrices", True, 0.5),
    Comparison("decay harms output gains", "peri cosine everything", "peri cosine paper", False, 0.5),
    Comparison("a gain for each reader helps", "heterogeneous cosine paper", "plain cosine paper", True),
    Comparison("gains on both sides help", "both cosine paper", "plain cosine paper", True),
    Comparison("magnitude and direction help", "direction cosine paper", "plain cosine paper", True),
    Comparison("all three together help", "all cosine paper", "plain cosine paper", True),
    Comparison("and against the usual decay", "all cosine paper", "plain cosine matrices", True),
    Comparison("all three, wsd", "all wsd paper", "plain wsd paper", True),
    Comparison("all three, 256 × 8", "all 256x8 cosine paper", "plain 256x8 cosine paper", True),
    Comparison("all three, Muon-Kimi", "all muon-kimi cosine paper", "plain muon-kimi cosine paper", True),
)
"""The mean of the paired differences has the claimed sign, and zero is outside its 95 % interval."""


@dataclass(frozen=True)
class Compared:
    """What came out of a comparison."""

    comparison: Comparison
    difference: Paired
    """Empty if there is a doubt."""
    before: Paired
    """The same by the rule that was used first."""
    doubt: str = ""
    """Why the two arms cannot be compared."""

    @property
    def verdict(self) -> Verdict:
        """By the rule that is used."""
        return self.difference.verdict(below=self.comparison.below)

    def __str__(self) -> str:
        """Numbers, or why there are none."""
        return self.doubt or str(self.difference)


class ArmRuns:
    """The study's data: the losses of every arm, and the records of the flow."""

    def __init__(self, records: Sequence[Record], setting: ArmSetting) -> None:
        self.exact = select(records, part=EXACT)
        self.losses: dict[str, dict[GridCell, dict[int, float]]] = {}
        for record in records:
            if "arm" in record:
                cells = self.losses.setdefault(record["arm"], {})
                losses = cells.setdefault((record["lr"], record["weight_decay"]), {})
                losses[record["seed"]] = math.inf if record["loss"] is None else record["loss"]
        self.arms = {arm.name: arm for arm in setting.arms if arm.name in self.losses}

    @cached_property
    def compared(self) -> list[Compared]:
        """The comparisons whose arms both have runs, each arm in the one cell that is best for it."""
        found, nothing = [], Paired(np.array([]))
        for one in COMPARISONS:
            if one.first not in self.arms or one.second not in self.arms:
                continue
            pair = [self.arms[one.first], self.arms[one.second]]
            doubts = [doubt for arm in pair if (doubt := self._missing(arm, one.weight_decay))]
            if not doubts and pair[0].num_seeds != pair[1].num_seeds:
                doubts = [f"{arm.name}: {arm.num_seeds} seeds" for arm in pair]
            if doubts:
                found.append(Compared(one, nothing, nothing, "; ".join(doubts)))
                continue
            first, second = (self.grid(arm, one.weight_decay) for arm in pair)
            now, before = (Paired(less(rule(first), rule(second))) for rule in (one_cell, left_out))
            found.append(Compared(one, now, before))
        return found

    def grid(self, arm: Arm, weight_decay: float | None = None) -> Array:
        """(seeds, cells); nan of a run that is missing."""
        cells, there = arm.cells(weight_decay), self.losses[arm.name]
        seeds = range(arm.num_seeds)
        return np.array([[there.get(cell, {}).get(seed, math.nan) for cell in cells] for seed in seeds])

    def _missing(self, arm: Arm, weight_decay: float | None) -> str:
        """What an arm lacks, in words: the best of a part of a grid is not the best of the grid."""
        there = self.losses[arm.name]
        found = [
            seed in there.get(cell, {}) for cell in arm.cells(weight_decay) for seed in range(arm.num_seeds)
        ]
        return f"{arm.name}: {sum(found)} of {len(found)} runs" if not all(found) else ""


def best_cell(losses: Array) -> NDArray[np.int_]:
    """From (…, seeds, cells) to the cell with the lowest mean, among those in which the fewest runs diverged.

    >>> int(best_cell(np.array([[np.inf, np.inf, 0.1], [3.0, 2.0, np.inf], [3.0, 2.0, np.inf]])))
    1
    """
    ended = np.isfinite(losses)
    means = np.where(ended, losses, 0.0).sum(-2) / np.maximum(ended.sum(-2), 1)
    fewest = ended.sum(-2) == ended.sum(-2).max(-1, keepdims=True)
    return np.asarray(np.argmin(np.where(fewest, means, np.inf), -1))


def one_cell(losses: Array) -> Array:
    """The losses in the cell that is best by the mean over all seeds.

    >>> one_cell(np.array([[0.5, 2.0], [3.0, 2.0], [3.0, 2.1]]))
    array([2. , 2. , 2.1])
    """
    best = best_cell(losses)
    return np.asarray(np.take_along_axis(losses, best[..., None, None], -1)[..., 0])


def left_out(losses: Array) -> Array:
    """The first rule: the loss of each seed in the cell that is best by the mean over the other seeds.

    >>> left_out(np.array([[0.5, 2.0], [3.0, 2.0], [3.0, 2.0]]))
    array([2., 3., 3.])
    """
    found = []
    for seed in range(losses.shape[-2]):
        best = best_cell(np.delete(losses, seed, -2))
        found.append(np.take_along_axis(losses[..., seed, :], best[..., None], -1)[..., 0])
    return np.stack(found, -1)


def erring(rule: Rule, first: Sequence[float], second: Sequence[float], *, seeds: int = 8) -> float:
    """How often two arms that are alike at their best are told apart, by simulation.

    Args:
        rule: by which both are judged.
        first: means of the cells of one arm, in standard deviations of a run, above its best cell.
        second: those of the other.
        seeds: of both. Runs are independent and normal, which is the worst case: what cells of a seed have in
            common does not move the choice.
    """
    generator = np.random.default_rng(0)
    judged = [
        rule(np.array(means) + generator.normal(size=(DRAWS, seeds, len(means)))) for means in (first, second)
    ]
    differences_DS = judged[0] - judged[1]
    errors_D = differences_DS.std(1, ddof=1) / np.sqrt(seeds)
    limit = stats.t.ppf((1 + LEVEL) / 2, seeds - 1)
    return float((np.abs(differences_DS.mean(1)) > limit * errors_D).mean())


def errors(rule: Rule) -> tuple[float, float, float]:
    """Where one of six cells is best in both arms, where all tie in both, and where all tie in one."""
    distinct_means, tied = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0), (0.0,) * 6
    pairs = ((distinct_means, distinct_means), (tied, tied), (tied, distinct_means))
    first, second, third = (erring(rule, *pair) for pair in pairs)
    return first, second, third


def claims(data: ArmRuns) -> list[Decided]:
    """All claims that there are records to tell of."""
    found = []
    for one in data.compared:
        paper, sign = ("lower loss", "<") if one.comparison.below else ("higher loss", ">")
        found.append(Decided(one.comparison.claim, paper, f"interval {sign} 0", str(one), one.verdict))
    return [*found, *decide(FLOW_CLAIMS, data.exact)]


def _powers(records: Sequence[Record]) -> Array:
    """Of the step with which the drift goes, by seed, over the finer half of the steps; how far off 1."""
    found = []
    for seed in sorted(distinct(records, "seed")):
        mine = sorted((record["step"], record["drift"]) for record in select(records, seed=seed))
        steps, drifts = np.array(mine[: len(mine) // 2]).T
        found.append(float(np.polyfit(np.log(steps), np.log(drifts), 1)[0]))
    return np.abs(np.array(found) - 1)


def _last_power(record: Record) -> float:
    """Of the time with which a quantity grows, over the last three octaves."""
    values, times = record["values"], record["times"]
    return float(np.log2(values[-1] / values[-4]) / np.log2(times[-1] / times[-4]))


def _finest(records: Sequence[Record]) -> list[float]:
    conserved = select(records, kind="conservation")
    finest = min((record["step"] for record in conserved), default=0.0)
    return [record["gain"] for record in select(conserved, step=finest)]


def _all(name: str, kind: str) -> Callable[[Sequence[Record]], list[float]]:
    return lambda records: [record[name] for record in select(records, kind=kind) if name in record]


def _named(where: str, value: Callable[[Record], float], **only: Any) -> Observe:
    def observe(records: Sequence[Record]) -> list[Observation]:
        return [Observation(where, one.values) for one in per("kind", value, **only)(records)]

    return observe


FLOW_CLAIMS = (
    Claim(
        "γ² − ‖w‖² drifts as the step",
        "conserved by the flow",
        "power off 1 by ≤ 0.1",
        at_most(0.1, each("kind", _powers, lambda kind: "GD", kind="conservation")),
    ),
    Claim("γ² follows from ‖a‖", "exact", "off ≤ 0.01", all_within(0.01, _finest)),
    Claim("dA/dt is the formula's", "exact", "off ≤ 1e-06", all_within(1e-6, _all("error", "flow"))),
    Claim("dc/dt = 2λ‖w‖² − 2μγ²", "exact", "off ≤ 1e-06", all_within(1e-6, _all("error", "balance"))),
    Claim("μ = λ: c falls as e^-2λt", "balances", "off ≤ 1e-06", all_within(1e-6, _all("shrunk", "balance"))),
    Claim(
        "μ = 0 < λ: γ drifts up",
        "drifts up",
        "> 0",
        at_least(
            0.0,
            _named(
                "mean of c",
                lambda one: one["drift"],
                kind="balance",
                on_weight=bool,
                on_gain=lambda decay: not decay,
            ),
        ),
    ),
    Claim(
        "noise, μ = 0: E‖γ‖² grows on",
        "no bound",
        "power ≥ 0.5",
        at_least(0.5, _named("last 3 octaves", _last_power, kind="noise", on_gain=lambda decay: not decay)),
    ),
    Claim(
        "noise, μ > 0: E‖γ‖² is bounded",
        "≤ (Dq + ½‖a*‖²)/2μ",
        "share ≤ 1",
        at_most(
            1.0,
            _named("largest", lambda one: max(one["values"]) / one["bound"], kind="noise", on_gain=bool),
        ),
    ),
)
"""Of the gradient flow of a scale vector. Thresholds are those of rounding and of the step."""
