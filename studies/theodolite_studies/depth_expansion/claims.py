"""What is claimed of depth and width, decided by the records of the study.

Sections 7.1 to 7.3 and Theorem 5 of the paper. Every threshold was written down before a network was
trained on CIFAR-10.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from theodolite_studies.depth_expansion.cases import (
    above_the_best,
    broken_bounds,
    by_width,
    deepest_over_shallowest,
    early,
    falling,
    flattening,
    loss_on_test,
    widest_less_narrowest,
    widest_over_narrowest,
)
from theodolite_studies.depth_expansion.values import (
    POINTS,
    Grid,
    Value,
    best_gain,
    coherence,
    effective,
    failures,
    grids,
    norm,
    slopes,
)
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case, Claim, Verdict, settled

LEVEL = 0.05
"""How often a claim may be said to hold, or to fail, where it is just at its threshold."""
NEARLY = 0.9
"""The least share of pairs of coordinates whose correlation is within ±0.1, for “near zero”."""
CHANCE = 0.1
"""The largest share beyond `2/√N`, which is one in twenty of uncorrelated pairs, for no more than noise."""
SAME = 1.5
"""Widest over narrowest, at most, for a C that does not depend on width."""
FALL = 0.5
"""Deepest over shallowest, at most, for a signal that decreases “substantially”."""
NOTICED = 0.02
"""Nats of test loss, at least: a fall from the shallowest to the best depth, or a rebound to the deepest."""


def claims(records: Sequence[Record]) -> list[Claim]:
    """All that there are records for, regime by regime."""
    return [
        claim
        for grid in grids(records)
        for claims_of in (_covariance, _signal, _losses, _alignment)
        for claim in claims_of(grid)
    ]


def _covariance(grid: Grid) -> Iterator[Claim]:
    """Figure 1 and Assumption 3."""
    yield _settled(
        grid,
        "channels' gradients are nearly uncorrelated",
        "near zero",
        f"|r| ≤ 0.1 for ≥ {NEARLY:.0%} of pairs",
        [case for point in POINTS for case in by_width(grid, _share(point, "near"), f"{point} ")],
        limit=NEARLY,
        below=False,
    )
    yield _settled(
        grid,
        "so are those of single entries of maps",
        "near zero",
        f"|r| ≤ 0.1 for ≥ {NEARLY:.0%} of pairs",
        by_width(grid, lambda one: min(pairs["near"] for pairs in one["entries"])),
        limit=NEARLY,
        below=False,
    )
    yield _settled(
        grid,
        "what correlation there is is noise",
        "nearly diagonal",
        f"|r| > 2/√N for ≤ {CHANCE:.0%} of pairs",
        [case for point in POINTS for case in by_width(grid, _share(point, "beyond"), f"{point} ")],
        limit=CHANCE,
        below=True,
    )
    yield _settled(
        grid,
        "C does not depend on width",
        "a constant",
        f"widest/narrowest ≤ {SAME}",
        [case for point in POINTS for case in widest_over_narrowest(grid, effective(point), f"{point} ")],
        limit=SAME,
        below=True,
    )


def _signal(grid: Grid) -> Iterator[Claim]:
    """Figure 2. The ratio to the shallowest is the paper's normalised form."""
    ends = f"n {grid.depths[-1]}/n {grid.depths[0]}"
    for split in ("train", "test"):
        yield _settled(
            grid,
            f"the {split} gradient's norm falls with depth",
            "substantially",
            f"{ends} ≤ {FALL}",
            deepest_over_shallowest(grid, norm(split)),
            limit=FALL,
            below=True,
        )
    if len(grid.depths) > 2:
        middle = _middle(grid.depths)
        yield _settled(
            grid,
            "most of the train gradient's fall comes early",
            "early, then flat",
            f"log fall by n {middle}/whole ≥ 0.5",
            early(grid, middle),
            limit=0.5,
            below=False,
        )
    yield _settled(
        grid,
        "wider networks keep a larger train gradient",
        "larger",
        "widest/narrowest ≥ 1",
        widest_over_narrowest(grid, norm("train")),
        limit=1,
        below=False,
    )
    yield _settled(
        grid,
        "at equal train loss the train gradient still falls with depth",
        "–",
        "slope in log n < 0",
        [Case("all networks", slopes(grid, norm("train"), lambda one: one["train_loss"])["depth"])],
        limit=0,
        below=True,
    )
    yield _settled(
        grid,
        "in units of one image's spread the test gradient falls with depth",
        "–",
        f"{ends} ≤ {FALL}",
        deepest_over_shallowest(grid, coherence("test")),
        limit=FALL,
        below=True,
    )
    yield _settled(
        grid,
        "one more block would gain less in a deeper network",
        "depleted",
        f"best tr(MS⁻¹Mᵀ) on test images: {ends} ≤ {FALL}",
        deepest_over_shallowest(grid, best_gain),
        limit=FALL,
        below=True,
    )


def _losses(grid: Grid) -> Iterator[Claim]:
    """Figure 3."""
    shallow, deep = grid.depths[0], grid.depths[-1]
    yield _settled(
        grid,
        "the test loss falls with width at every depth",
        "falls",
        "widest − narrowest < 0",
        widest_less_narrowest(grid, loss_on_test),
        limit=0,
        below=True,
    )
    if len(grid.widths) > 2:
        yield _settled(
            grid,
            "and flattens",
            "flattens",
            "last/first doubling ≤ 0.5",
            flattening(grid),
            limit=0.5,
            below=True,
        )
    yield _settled(
        grid,
        "the test loss falls with depth at first",
        "falls",
        f"n {shallow} − best n ≥ {NOTICED}",
        above_the_best(grid, shallow),
        limit=NOTICED,
        below=False,
    )
    yield _settled(
        grid,
        "and rebounds",
        "rebounds",
        f"n {deep} − best n ≥ {NOTICED}",
        above_the_best(grid, deep),
        limit=NOTICED,
        below=False,
    )
    yield _best_depth(grid)


def _alignment(grid: Grid) -> Iterator[Claim]:
    """Theorem 5."""
    sizes = grid.records[0]["points"]["pool"]["alignment"]["sizes"]
    middle = _middle(sizes)
    yield _bounded(grid, "fresh", "two test samples align as often as the bound has it", "Theorem 5")
    yield _bounded(grid, "crossed", "so do a train and a test sample", "–")
    yield _settled(
        grid,
        "train and test samples fail to align less often the larger they are",
        "less often",
        f"size {sizes[-1]} − size {sizes[0]} ≤ 0",
        [case for point in POINTS for case in falling(grid, point, sizes)],
        limit=0,
        below=True,
    )
    yield _settled(
        grid,
        "and the wider the network",
        "less often",
        f"size {middle}: widest − narrowest ≤ 0",
        [
            case
            for point in POINTS
            for case in widest_less_narrowest(grid, failures(point, "crossed", middle), f"{point} ")
        ],
        limit=0,
        below=True,
    )
    yield _settled(
        grid,
        "‖μ‖²/λ_max, on which the bound rests, grows with width",
        "as the width",
        "slope in log width ≥ 0.5",
        [Case(point, slopes(grid, _visibility(point))["width"]) for point in POINTS],
        limit=0.5,
        below=False,
    )


def _best_depth(grid: Grid) -> Claim:
    """A best depth that is the deepest of all is not known to be the best."""
    best_WS = grid.over(loss_on_test).argmin(0)
    octaves_WS = np.log2(np.array(grid.depths)[best_WS])
    case = Case(f"width {grid.widths[0]} to {grid.widths[-1]}", octaves_WS[-1] - octaves_WS[0])
    verdict: Verdict = case.verdict(0.5, below=False, level=LEVEL)
    at_edge = [grid.widths[w] for w in (0, -1) if (best_WS[w] == len(grid.depths) - 1).any()]
    if verdict != "holds" and at_edge:
        verdict = "unclear"
    edge = f": the deepest is best at width {' and '.join(map(str, at_edge))}" if at_edge else ""
    here = f"{case.mean:.2f} octaves ± {case.error:.2f} ({case.where}{edge})"
    return Claim(_named(grid, "the best depth grows with width"), "grows", "≥ 0.5 octaves", here, verdict)


def _bounded(grid: Grid, name: str, claim: str, paper: str) -> Claim:
    broken, count = broken_bounds(grid, name)
    here = f"{count - len(broken)} of {count} samples' shares within it"
    verdict: Verdict = "fails" if broken else "holds"
    return Claim(_named(grid, claim), paper, "no share above it", here, verdict, "; ".join(broken[:5]))


def _settled(
    grid: Grid,
    claim: str,
    paper: str,
    threshold: str,
    cases: Sequence[Case],
    *,
    limit: float,
    below: bool,
) -> Claim:
    return settled(_named(grid, claim), paper, threshold, cases, limit=limit, below=below, level=LEVEL)


def _named(grid: Grid, claim: str) -> str:
    return f"{grid.regime}: {claim}"


def _share(point: str, name: str) -> Value:
    """Of pairs of channels; nan where fewer than two channels vary."""

    def value(one: Record) -> float:
        pairs = one["points"][point]["pairs"]
        return math.nan if pairs["near"] is None else pairs[name]

    return value


def _visibility(point: str) -> Value:
    def value(one: Record) -> float:
        found = one["points"][point]["test"]
        return found["norm"] ** 2 / found["top"]

    return value


def _middle(values: Sequence[int]) -> int:
    """The one in the middle, the lower of two."""
    return values[(len(values) - 1) // 2]
