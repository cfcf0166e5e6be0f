"""What the study of linear solvers has to show, and its tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

from theodolite.present.text import Column
from theodolite.workloads.poisson import SIDE
from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Observation,
    Observe,
    at_least,
    at_most,
    count_at_most,
    lower,
    table,
)
from theodolite_studies.framework.paired import Paired, less, smallest_effect
from theodolite_studies.framework.records import Record, distinct, select

LEVEL = 0.05
"""Of the tests, and with which an effect that is called visible is found."""
THIRD = 1 / 3
USUAL, OTHER = ("random", "smooth"), ("points", "edge")
BROKEN = ("checkerboard", "high waves", "highest wave")
"""Right sides: of the workload; with all waves in them; and with the shortest ones alone, or nearly so."""
LARGER, LARGEST = 64, 128
NETWORK = ("width", "depth", "levels", "parameterization")
"""What tells networks apart, beside the seed."""
Values = Mapping[int, float]
"""By seed."""


def is_scaled(record: Record) -> bool:
    """Is it one of the networks that differ in width alone?"""
    return (record["depth"], record["levels"], record["parameterization"]) == (1, 4, "plan")


def is_deepened(record: Record) -> bool:
    """Is it one of the networks that differ in depth alone?"""
    return (record["width"], record["levels"], record["parameterization"]) == (16, 4, "plan")


def networks(
    records: Sequence[Record], of: Callable[[Record], bool] = lambda record: True
) -> list[list[Record]]:
    """The records of each network, all seeds together, by size."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in select(records, part="trained"):
        if of(record):
            groups.setdefault(tuple(record[key] for key in NETWORK), []).append(record)
    return list(groups.values())


def title(record: Record) -> str:
    """Width and depth, and what else is unusual.

    >>> title({"width": 16, "depth": 1, "levels": 6, "parameterization": "plan"})
    '16 × 1, 6 grids'
    """
    words = [f"{record['width']} × {record['depth']}"]
    words += [f"{record['levels']} grids"] if record["levels"] != 4 else []
    words += [record["parameterization"]] if record["parameterization"] != "plan" else []
    return ", ".join(words)


def mean(counts: Sequence[int | None]) -> float:
    """Mean iterations over several systems; infinite if one was not solved.

    >>> mean([10, 12]), mean([10, None])
    (11.0, inf)
    """
    solved = [each for each in counts if each is not None]
    return float(np.mean(solved)) if len(solved) == len(counts) else math.inf


def costs(records: Sequence[Record], solver: str, kind: str, side: int, *, work: bool = False) -> Values:
    """Iterations that a solver takes, or operations: a mean over the systems of each seed."""
    return {
        row["seed"]: mean(row[solver]) * (row[f"{solver} work"] if work else 1)
        for row in select(records, kind=kind, side=side)
        if solver in row
    }


def losses(records: Sequence[Record]) -> Values:
    """Logarithms of held-out losses to the base 2; infinite where there is none."""
    return {
        row["seed"]: math.inf if row["loss"] is None else math.log2(row["loss"])
        for row in select(records, kind="random", side=SIDE)
    }


def over(first: Values, second: Values) -> Array:
    """The first over the second; nan where neither is finite."""
    top, bottom = shared(first, second)
    with np.errstate(invalid="ignore"):
        return top / bottom


def shared(first: Values, second: Values) -> tuple[Array, Array]:
    """The values of the seeds that both have."""
    seeds = sorted(first.keys() & second.keys())
    one, other = (np.array([values[seed] for seed in seeds], dtype=float) for values in (first, second))
    return one, other


def quotients(
    first: str,
    second: str,
    kinds: Sequence[str],
    sides: Sequence[int] = (SIDE,),
    of: Callable[[Record], bool] = is_scaled,
    *,
    work: bool = False,
) -> Observe:
    """Iterations or work of one solver over those of another, by seed, for every network, kind and side."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        known, found = select(records, part="known"), []
        has_network = "network" in (first, second)
        for own in networks(records, of) if has_network else [[]]:
            for side in sides:
                for kind in kinds:
                    spent = partial(costs, [*known, *own], kind=kind, side=side, work=work)
                    values = over(spent(first), spent(second))
                    words = ([title(own[0])] if own else []) + [f"{kind} {side}²"]
                    if len(values):
                        found.append(Observation(", ".join(words), values))
        return found

    return observe


def growth(of: Callable[[Record], bool]) -> Observe:
    """Iterations on the largest grid over those on the grid of training, by seed."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        found = []
        for own in networks(records, of):
            for kind in USUAL:
                values = over(*(costs(own, "network", kind, side) for side in (LARGEST, SIDE)))
                if len(values):
                    found.append(Observation(f"{title(own[0])}, {kind}", values))
        return found

    return observe


def steps_up(
    of: Callable[[Record], bool], value: Callable[[Sequence[Record]], Values], *, at_once: bool = False
) -> Observe:
    """The value of each network less that of the next smaller one, by seed; at once: from end to end."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        ordered = sorted(networks(records, of), key=lambda own: (own[0]["width"], own[0]["depth"]))
        if at_once:
            ordered = [ordered[0], ordered[-1]] if len(ordered) > 2 else []
        return [
            Observation(f"{title(small[0])} to {title(large[0])}", less(*shared(value(large), value(small))))
            for small, large in itertools.pairwise(ordered)
        ]

    return observe


def trained_iterations(records: Sequence[Record]) -> Values:
    """Iterations of a network on random right sides, at the side of training."""
    return costs(records, "network", "random", SIDE)


def without_plan(records: Sequence[Record]) -> list[Observation]:
    """Iterations with the plan less those without, by seed."""
    planned = {own[0]["width"]: trained_iterations(own) for own in networks(records, is_scaled)}
    return [
        Observation(
            title({**own[0], "parameterization": "plan"}), less(*shared(with_plan, trained_iterations(own)))
        )
        for own in networks(records, lambda record: record["parameterization"] == "standard")
        if (with_plan := planned.get(own[0]["width"]))
    ]


def agreement(records: Sequence[Record]) -> list[Observation]:
    """Spearman's correlation of losses and iterations over the networks with a plan, by seed."""
    rows = select(records, part="trained", kind="random", side=SIDE, parameterization="plan")
    values = []
    for seed in distinct(rows, "seed"):
        own = select(rows, seed=seed)
        pairs = [(losses([row])[seed], trained_iterations([row])[seed]) for row in own]
        if len(pairs) > 2:
            values.append(float(stats.spearmanr(pairs).statistic))
    return [Observation("all sizes", np.array(values))] if values else []


def miscounts(records: Sequence[Record]) -> list[Observation]:
    """The largest difference of the identity from conjugate gradients over all systems of a side."""
    known = select(records, part="known")
    return [
        Observation(f"side {side}", np.array([max(map(_apart, select(known, side=side)))]))
        for side in distinct(known, "side")
    ]


def _apart(record: Record) -> float:
    pairs = zip(record["identity"], record["cg"], strict=True)
    return max(math.inf if None in pair else abs(pair[0] - pair[1]) for pair in pairs)


CLAIMS = (
    Claim(
        "the identity as network takes as many iterations as conjugate gradients (scipy)",
        "not said",
        "the same for every right side",
        count_at_most(0, "iteration", miscounts),
    ),
    Claim(
        "random right sides: the trained network takes a third",
        "accelerates",
        "≤ 1/3 of CG's iterations at 32², every width",
        at_most(THIRD, quotients("network", "cg", ("random",)), level=LEVEL),
    ),
    Claim(
        "smooth right sides too",
        "accelerates",
        "≤ 1/3 of CG's iterations at 32², every width",
        at_most(THIRD, quotients("network", "cg", ("smooth",)), level=LEVEL),
    ),
    Claim(
        "and on a grid that it was not trained on",
        "systems beyond training",
        "≤ 1/3 of CG's iterations at 64², every width",
        at_most(THIRD, quotients("network", "cg", USUAL, (LARGER,)), level=LEVEL),
    ),
    Claim(
        "the number of iterations does not depend on the size of the system",
        "independent of it",
        "128² over 32² ≤ 1.25, widths to 16",
        at_most(1.25, growth(is_scaled), level=LEVEL),
    ),
    Claim(
        "nor with six grids in place of four",
        "independent of it",
        "128² over 32² ≤ 1.25",
        at_most(1.25, growth(lambda record: record["levels"] == 6), level=LEVEL),
    ),
    Claim(
        "under the plan the loss falls with every doubling of the width",
        "not said",
        "log₂ loss < 0, by seed",
        lower(steps_up(is_scaled, losses)),
    ),
    Claim(
        "and the number of iterations falls with every doubling of the width",
        "not said",
        "random, 32²: < 0, by seed",
        lower(steps_up(is_scaled, trained_iterations)),
    ),
    Claim(
        "the loss falls with every doubling of the depth",
        "not said",
        "log₂ loss < 0, by seed",
        lower(steps_up(is_deepened, losses)),
    ),
    Claim(
        "and the number of iterations falls with every doubling of the depth",
        "not said",
        "random, 32²: < 0, by seed",
        lower(steps_up(is_deepened, trained_iterations)),
    ),
    Claim(
        "a network with a lower loss takes fewer iterations",
        "loss of one step",
        "random, 32²: Spearman's correlation over all sizes ≥ 0.8",
        at_least(0.8, agreement, level=LEVEL),
    ),
    Claim(
        "at the largest width the plan takes fewer iterations than one learning rate for all",
        "not said",
        "random, 32²: < 0, by seed",
        lower(without_plan),
    ),
    Claim(
        "point sources and values on an edge: the network takes a third",
        "systems beyond training",
        "≤ 1/3 of CG's iterations at 32², every width",
        at_most(THIRD, quotients("network", "cg", OTHER), level=LEVEL),
    ),
    Claim(
        "right sides of the shortest waves: it takes no more than CG",
        "systems beyond training",
        "≤ CG's iterations at 32², every width",
        at_most(1.0, quotients("network", "cg", BROKEN), level=LEVEL),
    ),
    Claim(
        "multigrid, which is not trained, takes no more iterations than the network",
        "not said",
        "≤ those of every width at 32² and 64²",
        at_most(1.0, quotients("multigrid", "network", USUAL, (SIDE, LARGER)), level=LEVEL),
    ),
    Claim(
        "the network needs less floating-point work than conjugate gradients",
        "not said",
        "operations of a solution ≤ CG's at 32² and 64², every width",
        at_most(1.0, quotients("network", "cg", USUAL, (SIDE, LARGER), work=True), level=LEVEL),
    ),
    Claim(
        "multigrid needs less floating-point work than conjugate gradients",
        "not said",
        "operations of a solution ≤ CG's at 32² and 64²",
        at_most(1.0, quotients("multigrid", "cg", USUAL, (SIDE, LARGER), work=True), level=LEVEL),
    ),
)


def notes(records: Sequence[Record]) -> str:
    """Iterations on the right sides of the workload and on others, work, and what a larger network gains."""
    usual = [(kind, side) for side in (SIDE, LARGER, LARGEST) for kind in USUAL]
    found = [
        _counted(records, usual, "iterations, and the held-out loss of the network", with_loss=True),
        _counted(
            records, [(kind, SIDE) for kind in (*OTHER, *BROKEN)], "iterations on right sides unlike those"
        ),
        _worked(records),
        _gained(records),
    ]
    return "\n\n".join(each for each in found if each)


def _solvers(records: Sequence[Record]) -> list[tuple[str, str, list[Record]]]:
    """A name, the key of the records, and the records of every solver."""
    known = select(records, part="known")
    names = (("conjugate gradients", "cg"), ("multigrid", "multigrid")) if known else ()
    return [(name, key, known) for name, key in names] + [
        (f"network {title(own[0])}", "network", own) for own in networks(records)
    ]


def _counted(
    records: Sequence[Record], cases: Sequence[tuple[str, int]], what: str, *, with_loss: bool = False
) -> str:
    rows = []
    for name, key, own in _solvers(records):
        cells = [_shown([*costs(own, key, *case).values()]) for case in cases]
        if with_loss:
            cells.append(f"{2 ** np.mean([*losses(own).values()]):.4f}" if key == "network" else None)
        rows.append((name, *cells))
    heads = [*(f"{kind} {side}²" for kind, side in cases), *(("loss",) if with_loss else ())]
    columns = [Column("solver"), *(Column(head, side="right") for head in heads)]
    return f"{what}\n{table(columns, rows)}" if rows else ""


def _shown(values: Sequence[float]) -> str | None:
    """Mean and standard error over the seeds, or how many of them did not solve all systems."""
    seen = Observation("", np.array(values))
    if not values:
        return None
    if not math.isfinite(seen.mean):
        return f"unsolved by {sum(map(math.isinf, values))} of {len(values)}"
    return f"{seen.mean:.1f}" + (f" ± {seen.error:.1f}" if seen.error > 0 else "")


def _worked(records: Sequence[Record]) -> str:
    """Work for each point of the grid, of an iteration and of a solution, and over that of CG."""
    rows = []
    for name, key, own in _solvers(records):
        cells: list[str] = []
        for side in (SIDE, LARGER):
            spent, plain = (
                np.mean([*costs(some, solver, "random", side, work=True).values()])
                for solver, some in ((key, own), ("cg", select(records, part="known")))
            )
            once = next(row[f"{key} work"] for row in select(own, side=side))
            cells += [f"{once / side**2:.0f}", f"{spent / side**2:.0f}", f"{spent / plain:.3g}"]
        rows.append((name, *cells))
    heads = [
        Column(f"{word} {side}²", side="right")
        for side in (SIDE, LARGER)
        for word in ("iteration", "solution", "/ CG")
    ]
    what = "floating-point operations for each point of the grid, random right sides"
    return f"{what}\n{table(('solver', *heads), rows)}" if rows else ""


def _gained(records: Sequence[Record]) -> str:
    found = [
        (seen.where, what, seen)
        for of in (is_scaled, is_deepened)
        for what, value in (("log₂ loss", losses), ("iterations", trained_iterations))
        for at_once in (False, True)
        for seen in steps_up(of, value, at_once=at_once)(records)
    ]
    found += [(f"{seen.where}, plan less standard", "iterations", seen) for seen in without_plan(records)]
    rows = [(where, what, str(Paired(seen.values)), _visible(seen)) for where, what, seen in found]
    what = (
        "differences by seed, and their 95 % intervals; visible: the least that is found with a power of 80 %"
    )
    return f"{what}\n{table(('network', 'of', 'difference', 'visible'), rows)}" if rows else ""


def _visible(seen: Observation) -> str | None:
    found = smallest_effect(seen.values, sides=2)
    return f"{found:.2g}" if math.isfinite(found) else None
