"""What is claimed of depth and width. Thresholds were written before a network was trained on CIFAR-10."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from theodolite_studies.depth_expansion.grid import (
    POINTS,
    RegimeGrid,
    Value,
    best_gain,
    coherence,
    effective,
    failures,
    loss_on_test,
    norm,
    slopes,
)
from theodolite_studies.framework.claims import Claim, Decide, Decision, Observation, at_least, at_most
from theodolite_studies.framework.records import Record

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
SIGMAS = 4
"""Standard errors of a share of draws by which it is above a bound for certain: thousands are looked at."""
Seen = Callable[[RegimeGrid], list[Observation]]


def _at_most(limit: float, observe: Seen) -> Decide:
    return at_most(limit, observe, level=LEVEL)


def _at_least(limit: float, observe: Seen) -> Decide:
    return at_least(limit, observe, level=LEVEL)


def _by_width(value: Value, about: str = "") -> Seen:
    """A value at each width, its mean over the depths."""
    return lambda grid: [
        Observation(f"{about}width {width}", grid.over(value)[:, place].mean(0))
        for place, width in enumerate(grid.widths)
    ]


def _over_depths(value: Value) -> Seen:
    """Deepest over shallowest, at each width."""
    return lambda grid: [
        Observation(f"width {width}", grid.of(grid.deep, width, value) / grid.of(grid.shallow, width, value))
        for width in grid.widths
    ]


def _over_widths(value: Value, about: str = "", *, ratio: bool = True) -> Seen:
    """Widest over narrowest, or less it, at each depth."""

    def observe(grid: RegimeGrid) -> list[Observation]:
        ends = [
            [grid.of(n, width, value) for width in (grid.widths[-1], grid.widths[0])] for n in grid.depths
        ]
        found = [wide / narrow if ratio else wide - narrow for wide, narrow in ends]
        return [Observation(f"{about}n {n}", values) for n, values in zip(grid.depths, found, strict=True)]

    return observe


def _at_points(observe: Callable[[str], Seen]) -> Seen:
    return lambda grid: [each for point in POINTS for each in observe(point)(grid)]


def _early(grid: RegimeGrid) -> list[Observation]:
    """The part of the fall of log‖v̄‖ that is done by the middle depth; unknown where there is no fall."""
    if len(grid.depths) < 3:
        return []
    found = []
    for width in grid.widths:
        first, between, last = (
            np.log(grid.of(depth, width, norm("train"))) for depth in (grid.shallow, grid.middle, grid.deep)
        )
        whole = first - last
        share = (first - between) / np.where(whole > 0, whole, math.nan)
        found.append(Observation(f"width {width}", share))
    return found


def _above_the_best(place: int) -> Seen:
    """The test loss at a depth less that at the best one, which is chosen by the other seeds."""

    def observe(grid: RegimeGrid) -> list[Observation]:
        found = []
        for width in grid.widths:
            losses_DS = np.array([grid.of(depth, width, loss_on_test) for depth in grid.depths])
            excess = []
            for seed in range(losses_DS.shape[1]):
                others_DS = np.delete(losses_DS, seed, axis=1) if losses_DS.shape[1] > 1 else losses_DS
                best = int(others_DS.mean(1).argmin())
                excess.append(losses_DS[place, seed] - losses_DS[best, seed])
            found.append(Observation(f"width {width}", np.array(excess)))
        return found

    return observe


def _flattening(grid: RegimeGrid) -> list[Observation]:
    """How much of the test loss the last doubling of width takes away, over what the first does."""
    if len(grid.widths) < 3:
        return []
    losses_DWS = grid.over(loss_on_test)
    first, last = losses_DWS[:, 0] - losses_DWS[:, 1], losses_DWS[:, -2] - losses_DWS[:, -1]
    return [Observation("mean over n", last.mean(0) / first.mean(0))]


def _best_depth(grid: RegimeGrid) -> Decision:
    """By how many octaves the best depth grows. The deepest of all is not known to be the best."""
    best_WS = grid.over(loss_on_test).argmin(0)
    octaves_WS = np.log2(np.array(grid.depths)[best_WS])
    seen = Observation(f"width {grid.widths[0]} to {grid.widths[-1]}", octaves_WS[-1] - octaves_WS[0])
    verdict = seen.verdict(0.5, below=False, level=LEVEL)
    at_edge = [grid.widths[place] for place in (0, -1) if (best_WS[place] == len(grid.depths) - 1).any()]
    if verdict != "holds" and at_edge:
        verdict = "unclear"
    edge = f": the deepest is best at width {' and '.join(map(str, at_edge))}" if at_edge else ""
    return f"{seen.mean:.2f} octaves ± {seen.error:.2f} ({seen.where}{edge})", verdict, ""


def _bounded(name: str) -> Decide:
    """Do two samples fail to align no more often than the bound, for certain?"""

    def decided(grid: RegimeGrid) -> Decision:
        broken, count = [], 0
        for one in grid.records:
            for point in POINTS:
                found = one["points"][point]["alignment"]
                for size, share, bound in zip(found["sizes"], found[name], found["bound"], strict=True):
                    count += 1
                    error = math.sqrt(max(bound * (1 - bound), 1 / found["draws"]) / found["draws"])
                    if share > bound + SIGMAS * error:
                        where = (
                            f"n {one['depth']} width {one['width']} seed {one['seed']} {point} size {size}"
                        )
                        broken.append(f"{where}: {share:.3f} > {bound:.3f}")
        here = f"{count - len(broken)} of {count} samples' shares within it"
        return here, "fails" if broken else "holds", "; ".join(broken[:5])

    return decided


def _crossed(point: str) -> Seen:
    """Failures between the largest samples less those between the smallest."""

    def value(one: Record) -> float:
        shares = one["points"][point]["alignment"]["crossed"]
        return shares[-1] - shares[0]

    return _by_width(value, f"{point} ")


def _crossed_by_width(grid: RegimeGrid) -> list[Observation]:
    values = {point: failures(point, "crossed", grid.middle_size) for point in POINTS}
    return _at_points(lambda point: _over_widths(values[point], f"{point} ", ratio=False))(grid)


def _slope(grid: RegimeGrid) -> list[Observation]:
    found = slopes(grid, norm("train"), lambda one: one["train_loss"])["depth"]
    return [Observation("all networks", found)]


def _visible(grid: RegimeGrid) -> list[Observation]:
    """The slope of ‖μ‖²/λ_max in log width."""

    def visibility(point: str) -> Value:
        return lambda one: one["points"][point]["test"]["norm"] ** 2 / one["points"][point]["test"]["top"]

    return [Observation(point, slopes(grid, visibility(point))["width"]) for point in POINTS]


def _share(point: str, name: str) -> Value:
    """Of pairs of channels; nan where fewer than two channels vary."""

    def value(one: Record) -> float:
        pairs = one["points"][point]["pairs"]
        return math.nan if pairs["near"] is None else pairs[name]

    return value


ENDS = "n {data.deep}/n {data.shallow}"
CLAIMS = (
    # Figure 1 and Assumption 3.
    Claim(
        "{data.regime}: channels' gradients are nearly uncorrelated",
        "near zero",
        f"|r| ≤ 0.1 for ≥ {NEARLY:.0%} of pairs",
        _at_least(NEARLY, _at_points(lambda point: _by_width(_share(point, "near"), f"{point} "))),
    ),
    Claim(
        "{data.regime}: so are those of single entries of maps",
        "near zero",
        f"|r| ≤ 0.1 for ≥ {NEARLY:.0%} of pairs",
        _at_least(NEARLY, _by_width(lambda one: min(pairs["near"] for pairs in one["entries"]))),
    ),
    Claim(
        "{data.regime}: what correlation there is is noise",
        "nearly diagonal",
        f"|r| > 2/√N for ≤ {CHANCE:.0%} of pairs",
        _at_most(CHANCE, _at_points(lambda point: _by_width(_share(point, "beyond"), f"{point} "))),
    ),
    Claim(
        "{data.regime}: C does not depend on width",
        "a constant",
        f"widest/narrowest ≤ {SAME}",
        _at_most(SAME, _at_points(lambda point: _over_widths(effective(point), f"{point} "))),
    ),
    # Figure 2. The ratio to the shallowest is the paper's normalised form.
    Claim(
        "{data.regime}: the train gradient's norm falls with depth",
        "substantially",
        f"{ENDS} ≤ {FALL}",
        _at_most(FALL, _over_depths(norm("train"))),
    ),
    Claim(
        "{data.regime}: the test gradient's norm falls with depth",
        "substantially",
        f"{ENDS} ≤ {FALL}",
        _at_most(FALL, _over_depths(norm("test"))),
    ),
    Claim(
        "{data.regime}: most of the train gradient's fall comes early",
        "early, then flat",
        "log fall by n {data.middle}/whole ≥ 0.5",
        _at_least(0.5, _early),
    ),
    Claim(
        "{data.regime}: wider networks keep a larger train gradient",
        "larger",
        "widest/narrowest ≥ 1",
        _at_least(1, _over_widths(norm("train"))),
    ),
    Claim(
        "{data.regime}: at equal train loss the train gradient still falls with depth",
        "–",
        "slope in log n < 0",
        _at_most(0, _slope),
    ),
    Claim(
        "{data.regime}: in units of one image's spread the test gradient falls with depth",
        "–",
        f"{ENDS} ≤ {FALL}",
        _at_most(FALL, _over_depths(coherence("test"))),
    ),
    Claim(
        "{data.regime}: one more block would gain less in a deeper network",
        "depleted",
        f"best tr(MS⁻¹Mᵀ) on test images: {ENDS} ≤ {FALL}",
        _at_most(FALL, _over_depths(best_gain)),
    ),
    # Figure 3.
    Claim(
        "{data.regime}: the test loss falls with width at every depth",
        "falls",
        "widest − narrowest < 0",
        _at_most(0, _over_widths(loss_on_test, ratio=False)),
    ),
    Claim(
        "{data.regime}: and flattens",
        "flattens",
        "last/first doubling ≤ 0.5",
        _at_most(0.5, _flattening),
    ),
    Claim(
        "{data.regime}: the test loss falls with depth at first",
        "falls",
        f"n {{data.shallow}} − best n ≥ {NOTICED}",
        _at_least(NOTICED, _above_the_best(0)),
    ),
    Claim(
        "{data.regime}: and rebounds",
        "rebounds",
        f"n {{data.deep}} − best n ≥ {NOTICED}",
        _at_least(NOTICED, _above_the_best(-1)),
    ),
    Claim("{data.regime}: the best depth grows with width", "grows", "≥ 0.5 octaves", _best_depth),
    # Theorem 5.
    Claim(
        "{data.regime}: two test samples align as often as the bound has it",
        "Theorem 5",
        "no share above it",
        _bounded("fresh"),
    ),
    Claim("{data.regime}: so do a train and a test sample", "–", "no share above it", _bounded("crossed")),
    Claim(
        "{data.regime}: train and test samples fail to align less often the larger they are",
        "less often",
        "size {data.largest} − size {data.sizes[0]} ≤ 0",
        _at_most(0, _at_points(_crossed)),
    ),
    Claim(
        "{data.regime}: and the wider the network",
        "less often",
        "size {data.middle_size}: widest − narrowest ≤ 0",
        _at_most(0, _crossed_by_width),
    ),
    Claim(
        "{data.regime}: ‖μ‖²/λ_max, on which the bound rests, grows with width",
        "as the width",
        "slope in log width ≥ 0.5",
        _at_least(0.5, _visible),
    ),
)
"""Sections 7.1 to 7.3 and Theorem 5 of the paper, for each regime."""
