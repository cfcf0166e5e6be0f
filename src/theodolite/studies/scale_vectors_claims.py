"""What the scale-vector study found: claims, with their thresholds, and the table of all arms.

The claims about training were written before anything was run: the mean of the paired differences has the
claimed sign, and zero is outside its 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from theodolite.studies.paired import Paired, paired, standing
from theodolite.studies.records import Record
from theodolite.studies.scale_vectors import EXACT
from theodolite.studies.scale_vectors_flow_claims import flow_claims
from theodolite.studies.verdict import Claim

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


def claims(records: Sequence[Record]) -> list[Claim]:
    """All claims that there are records to tell of."""
    arms = losses(records)
    found = [
        Claim(
            each.claim,
            "lower loss" if each.below else "higher loss",
            "interval < 0" if each.below else "interval > 0",
            str(difference),
            difference.verdict(below=each.below),
        )
        for each, difference in compared(arms)
    ]
    return [*found, *flow_claims([record for record in records if record["part"] == EXACT])]


def losses(records: Sequence[Record]) -> dict[str, dict[Cell, dict[int, float]]]:
    """By arm, cell and seed."""
    arms: dict[str, dict[Cell, dict[int, float]]] = {}
    for record in records:
        if "arm" in record:
            cell = arms.setdefault(record["arm"], {}).setdefault((record["lr"], record["weight_decay"]), {})
            cell[record["seed"]] = math.inf if record["loss"] is None else record["loss"]
    return arms


def compared(arms: Mapping[str, Losses]) -> list[tuple[Comparison, Paired]]:
    """The comparisons whose arms both have runs."""
    found = []
    for each in COMPARISONS:
        if each.first in arms and each.second in arms:
            first, second = (tuned(arms[name], each.weight_decay) for name in (each.first, each.second))
            if first.keys() & second.keys():
                found.append((each, paired(first, second)))
    return found


def tuned(cells: Losses, weight_decay: float | None = None) -> dict[int, float]:
    """The loss of each seed in the cell that is best for the mean of the other seeds.

    No seed has a say in the choice it is judged by, so that a larger grid is no advantage by chance alone.

    >>> tuned({(0.1, 0.0): {0: 0.5, 1: 3.0, 2: 3.0}, (0.2, 0.0): {0: 2.0, 1: 2.0, 2: 2.0}})
    {0: 2.0, 1: 3.0, 2: 3.0}
    """
    chosen = {cell: by_seed for cell, by_seed in cells.items() if weight_decay in (None, cell[1])}
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in chosen.values()))) if chosen else []
    found = {}
    for seed in seeds:
        others = [each for each in seeds if each != seed] or seeds
        best = min(chosen, key=lambda cell: sum(chosen[cell][each] for each in others))
        found[seed] = chosen[best][seed]
    return found


def notes(records: Sequence[Record]) -> str:
    """How many tests there are and which stand together, and the means of every arm over its grid."""
    arms = losses(records)
    if not arms:
        return ""
    tests = compared(arms)
    stands = standing([difference.p for _, difference in tests])
    names = [each.claim for (each, _), kept in zip(tests, stands, strict=True) if kept]
    lines = [
        f"{len(tests)} paired tests. By Holm's rule, which lets all of them together err once in twenty "
        f"times, {len(names) or 'none'} of them stand{': ' + '; '.join(names) if names else ''}.",
        "",
        "Held-out loss, mean over the seeds, by log2 lr and weight decay; * is the best of an arm.",
    ]
    width = max(map(len, arms))
    for name, cells in arms.items():
        means = {cell: float(np.mean(list(by_seed.values()))) for cell, by_seed in sorted(cells.items())}
        best = min(means, key=lambda cell: means[cell])
        shown = "  ".join(
            f"{math.log2(lr):g}/{decay:g} {mean:.4f}{'*' if (lr, decay) == best else ' '}"
            for (lr, decay), mean in means.items()
        )
        lines.append(f"{name:<{width}}  {len(next(iter(cells.values())))} seeds  {shown}".rstrip())
    return "\n".join(lines)
