"""What the scale-vector study found: claims, with their thresholds, and the table of all arms.

The claims about training were written before anything was run: the mean of the paired differences has the
claimed sign, and zero is outside its 95 % interval. In which cell an arm is judged was changed after the
runs: `scale_vectors_choice` says why. An arm that was not run in full is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from theodolite_studies.framework.paired import Paired, less, standing
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Claim, Verdict
from theodolite_studies.scale_vectors.choice import Floats, best_cell, errors, left_out, one_cell
from theodolite_studies.scale_vectors.flow_claims import flow_claims
from theodolite_studies.scale_vectors.study import EXACT, Arm, Setting

Cell = tuple[float, float]
"""Learning rate and weight decay."""
Losses = Mapping[Cell, Mapping[int, float]]
"""By cell and seed; infinite of a run that diverged."""


@dataclass(frozen=True)
class Comparison:
    """One claim about training: the first arm has a lower loss than the second, or a higher one."""

    claim: str
    first: str
    second: str
    below: bool
    weight_decay: float | None = None
    """Compared at this one; otherwise each arm at the best cell of its grid."""


@dataclass(frozen=True)
class Result:
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


def claims(records: Sequence[Record], setting: Setting) -> list[Claim]:
    """All claims that there are records to tell of."""
    found = [
        Claim(
            each.comparison.claim,
            "lower loss" if each.comparison.below else "higher loss",
            "interval < 0" if each.comparison.below else "interval > 0",
            str(each),
            each.verdict,
        )
        for each in compared(records, setting)
    ]
    return [*found, *flow_claims([record for record in records if record["part"] == EXACT])]


def compared(records: Sequence[Record], setting: Setting) -> list[Result]:
    """The comparisons whose arms both have runs, each arm in the one cell that is best for it."""
    there = losses(records)
    arms = {arm.name: arm for arm in setting.arms if arm.name in there}
    found = []
    for each in COMPARISONS:
        if each.first not in arms or each.second not in arms:
            continue
        pair = [arms[each.first], arms[each.second]]
        doubts = [doubt for arm in pair if (doubt := _missing(arm, there[arm.name], each.weight_decay))]
        if not doubts and pair[0].num_seeds != pair[1].num_seeds:
            doubts = [f"{arm.name}: {arm.num_seeds} seeds" for arm in pair]
        if doubts:
            nothing = Paired(np.array([]))
            found.append(Result(each, nothing, nothing, "; ".join(doubts)))
            continue
        first, second = (_grid(arm, there[arm.name], each.weight_decay) for arm in pair)
        now, before = (Paired(less(rule(first), rule(second))) for rule in (one_cell, left_out))
        found.append(Result(each, now, before))
    return found


def losses(records: Sequence[Record]) -> dict[str, dict[Cell, dict[int, float]]]:
    """By arm, cell and seed."""
    arms: dict[str, dict[Cell, dict[int, float]]] = {}
    for record in records:
        if "arm" in record:
            cell = arms.setdefault(record["arm"], {}).setdefault((record["lr"], record["weight_decay"]), {})
            cell[record["seed"]] = math.inf if record["loss"] is None else record["loss"]
    return arms


def notes(records: Sequence[Record], setting: Setting) -> str:
    """Which tests stand together, what the change of the rule did, and the means of every arm."""
    tests = compared(records, setting)
    parts = [_together(tests), *_changed(tests)] if tests else []
    return "\n\n".join([*parts, *_means(records, setting)])


def _cells(arm: Arm, weight_decay: float | None = None) -> list[Cell]:
    return [
        (2.0**exponent, decay)
        for exponent in arm.exponents
        for decay in arm.decays
        if weight_decay in (None, decay)
    ]


def _missing(arm: Arm, there: Losses, weight_decay: float | None) -> str:
    """What an arm lacks, in words: the best of a part of a grid is not the best of the grid."""
    cells = _cells(arm, weight_decay)
    count = sum(seed in there.get(cell, {}) for cell in cells for seed in range(arm.num_seeds))
    wanted = len(cells) * arm.num_seeds
    return f"{arm.name}: {count} of {wanted} runs" if count < wanted else ""


def _grid(arm: Arm, there: Losses, weight_decay: float | None = None) -> Floats:
    """(seeds, cells); nan of a run that is missing."""
    cells = _cells(arm, weight_decay)
    seeds = range(arm.num_seeds)
    return np.array([[there.get(cell, {}).get(seed, math.nan) for cell in cells] for seed in seeds])


def _together(tests: Sequence[Result]) -> str:
    stands = standing([each.difference.p for each in tests])
    names = [each.comparison.claim for each, kept in zip(tests, stands, strict=True) if kept]
    return (
        f"{len(tests)} paired tests. By Holm's rule, which lets all of them together err once in twenty "
        f"times, {len(names) or 'none'} of them stand{': ' + '; '.join(names) if names else ''}."
    )


def _changed(tests: Sequence[Result]) -> Iterator[str]:
    """How often either rule errs, and what the first one said where it said something else."""
    now, before = ([f"{100 * share:.0f}" for share in errors(rule)] for rule in (one_cell, left_out))
    text = (
        "Each arm is judged in the one cell that is best by the mean over all its seeds. Where there is "
        "nothing to find\n(simulated, 8 seeds, 6 cells), this gives a verdict in {} % of cases if one cell "
        "is best in both arms, in {} % if\nall cells tie in both, in {} % if all tie in one of the two. The "
        "rule was changed after the runs: the first,\nfor each seed the cell that is best for the other "
        "seeds, gives one in {}, {} and {} %."
    )
    yield text.format(*now, *before)
    moved = [each for each in tests if not each.doubt and str(each.before) != str(each.difference)]
    if moved:
        width = max(len(each.comparison.claim) for each in moved)
        numbers = max(len(str(each.before)) for each in moved)
        lines = [
            f"{each.comparison.claim:<{width}}  {each.before!s:<{numbers}}  "
            f"{each.before.verdict(below=each.comparison.below)}"
            for each in moved
        ]
        yield "\n".join(["Other numbers by the first rule:", *lines])


def _means(records: Sequence[Record], setting: Setting) -> Iterator[str]:
    """A line for each arm that has runs."""
    there = losses(records)
    arms = [arm for arm in setting.arms if arm.name in there]
    if not arms:
        return
    width = max(len(arm.name) for arm in arms)
    lines = ["Held-out loss, mean over the seeds, by log2 lr and weight decay; * is the best of an arm."]
    open_ones = 0
    for arm in arms:
        cells = there[arm.name]
        means = {cell: float(np.mean(list(by_seed.values()))) for cell, by_seed in sorted(cells.items())}
        best = _cells(arm)[best_cell(_grid(arm, cells))]
        shown = "  ".join(
            f"{math.log2(lr):g}/{decay:g} {mean:.4f}{'*' if (lr, decay) == best else ' '}"
            for (lr, decay), mean in means.items()
        )
        edge = _edge(arm, best)
        open_ones += bool(edge)
        seeds = max(len(by_seed) for by_seed in cells.values())
        lines.append(f"{arm.name:<{width}}  {seeds} seeds  {shown}  {edge}".rstrip())
    lines.append(
        f"{open_ones} of {len(arms)} bests are at an edge of what was tried, as said beside them: a better "
        "cell may lie beyond."
    )
    yield "\n".join(lines)


def _edge(arm: Arm, best: Cell) -> str:
    """At which edges of its grid the best cell of an arm is."""
    said = []
    values = {"lr": tuple(2.0**exponent for exponent in arm.exponents), "decay": arm.decays}
    for (name, tried), value in zip(values.items(), best, strict=True):
        if len(tried) == 1:
            said.append(f"only {name}")
        elif value in (min(tried), max(tried)):
            said.append(f"{'lowest' if value == min(tried) else 'highest'} {name}")
    return f"({', '.join(said)})" if said else ""
