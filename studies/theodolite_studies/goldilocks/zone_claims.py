"""What the paper says about the curvature before training, and what would make it hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from theodolite_studies.framework.claims import Array, Claim, Observation, Observe, at_least, at_most
from theodolite_studies.goldilocks.curves import Measured, SeedCurve
from theodolite_studies.goldilocks.setting import NETWORKS, NORMED, Column

FLAT_RATIO, FLAT_SPREAD = 1.1, 0.1
"""Largest over smallest excess; their difference as a part of A's peak along T in the same network."""
SAME, OTHER = 0.05, 0.2
"""Two curves are the same, or are not: the largest difference as a part of A's peak."""
LARGE, SMALL = 1.0, -1.0
"""log10 of the α from which on it is large, and up to which it is small."""
ANY: tuple[Column, ...] = ("A", "B", "C", "D", "E")


def _curves(
    columns: Sequence[Column], rows: Sequence[str], number: Callable[..., Array], *, of_peak: bool = False
) -> Observe:
    """`number` of the curves of these rows, of every network that has them in one of these columns.

    As a part of A's peak along T in the same network, if it is asked for, where that was measured.
    """

    def observe(data: Measured) -> list[Observation]:
        found = []
        for network in NETWORKS:
            unit = data.peak(network, "A") if of_peak else None
            for column in columns:
                curves = [data.curve(network, column, row) for row in rows]
                if any(each is None for each in curves) or (of_peak and unit is None):
                    continue
                if unit is not None and any(each and len(each.seeds) != len(unit) for each in curves):
                    continue
                values = number(*curves) / (1.0 if unit is None else unit)
                found.append(Observation(f"{network} {column}", values))
        return found

    return observe


def _over_peak_of_a(data: Measured) -> list[Observation]:
    """The peak along T of a network with LayerNorm over A's."""
    found = []
    for network in NETWORKS:
        for column in NORMED:
            mine, other = data.peak(network, column), data.peak(network, "A")
            if mine is not None and other is not None and len(mine) == len(other):
                found.append(Observation(f"{network} {column}", mine / other))
    return found


def _saturation(data: Measured) -> Sequence[Observation]:
    """The root mean square difference from what d directions show of t."""

    def difference(*curves: SeedCurve) -> Array:
        seen = [(each["excess"], projected_excess(each["t"], data.setting.directions)) for each in curves]
        squares = [(excess - expected) ** 2 for excess, expected in seen]
        return np.sqrt(np.nanmean(np.concatenate(squares, 1), 1))

    return _curves(ANY, ["alpha", "temperature", "joint"], difference)(data)


def _logits(number: Callable[[SeedCurve], Array]) -> Observe:
    def observe(data: Measured) -> list[Observation]:
        curves = {(name, column): data.logits(name, column) for name in NETWORKS for column in NORMED}
        return [Observation(f"{name} {column}", number(one)) for (name, column), one in curves.items() if one]

    return observe


def _largest_from_tenth(name: str) -> Callable[[SeedCurve], Array]:
    return lambda one: np.asarray(one[name][:, one.at >= SMALL - 1e-9].max(1))


def projected_excess(t: Array, directions: int) -> Array:
    """What RᵀHR shows of `t = Tr(H)/‖H‖_F`: `√d·t/√(t² + d + 1)`.

    >>> round(float(projected_excess(np.array(1e9), 50)), 2)
    7.07
    """
    return np.asarray(math.sqrt(directions) * t / np.sqrt(t**2 + directions + 1))


def _ends_over_peak(one: SeedCurve) -> Array:
    excess = one["excess"]
    return _ratio(np.maximum(excess[:, 0], excess[:, -1]), excess.max(1))


def _largest_over_smallest(joint: SeedCurve) -> Array:
    return _ratio(joint["excess"].max(1), joint["excess"].min(1))


def _ratio(one: Array, other: Array) -> Array:
    """Infinite where there is nothing positive to divide by."""
    return np.where(other > 0, one / np.where(other > 0, other, 1.0), math.inf)


def _spread(*, low: float = -math.inf, high: float = math.inf) -> Callable[[SeedCurve], Array]:
    def value(joint: SeedCurve) -> Array:
        return np.asarray(np.ptp(joint["excess"][:, (joint.at >= low - 1e-9) & (joint.at <= high + 1e-9)], 1))

    return value


def _small_less_half_of_large(joint: SeedCurve) -> Array:
    large = joint["excess"][:, joint.at >= LARGE - 1e-9].mean(1)
    return np.asarray(joint["excess"][:, 0] - 0.5 * large)


def _mirror_difference(alpha: SeedCurve, along: SeedCurve) -> Array:
    """Both have their points at the same places once T = α^-L, in the other direction."""
    return np.asarray(np.abs(alpha["excess"] - along["excess"][:, ::-1]).max(1))


def _least(alpha: SeedCurve, along: SeedCurve) -> Array:
    return np.minimum(alpha["excess"].min(1), along["excess"].min(1))


def _scores(one: SeedCurve) -> Array:
    """Tr(S) in its standard errors; where it is exact, 0 if it vanishes beside ‖S‖ and infinity if not."""
    trace, error = one["trace of S"], one["trace of S error"]
    vanishes = np.abs(trace) <= 1e-9 * one["frobenius of S"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error > 0, trace / error, np.where(vanishes, 0.0, np.sign(trace) * math.inf))


def _residual_where_negative(along: SeedCurve) -> Array:
    negative = along.mean() < 0
    if not negative.any():
        return np.full(len(along.seeds), math.nan)
    return np.asarray(along["excess of S"][:, negative].max(1))


def _goes_with_gauss_newton(along: SeedCurve) -> Array:
    pairs = zip(along["excess"], along.share_of_g, strict=True)
    return np.array([np.corrcoef(excess, share)[0, 1] for excess, share in pairs])


ZONE_CLAIMS = (
    Claim(
        "A–E: a zone along T: the excess falls off to both sides of a peak",
        "in all architectures",
        "both ends < half the peak",
        at_most(0.5, _curves(ANY, ["temperature"], _ends_over_peak)),
    ),
    Claim(
        "A–E: a zone along α: the excess falls off to both sides of a peak",
        "in all architectures",
        "both ends < half the peak",
        at_most(0.5, _curves(ANY, ["alpha"], _ends_over_peak)),
    ),
    Claim(
        "A: flat under joint scaling, T = α^L",
        "flat",
        f"max/min ≤ {FLAT_RATIO}",
        at_most(FLAT_RATIO, _curves(("A",), ["joint"], _largest_over_smallest)),
    ),
    Claim(
        "B–E: flat under joint scaling for large α (T = α^L; D, E: T = α)",
        "flat, at least roughly",
        f"spread over α ≥ 10 ≤ {FLAT_SPREAD} of the peak",
        at_most(FLAT_SPREAD, _curves(ANY[1:], ["joint"], _spread(low=LARGE), of_peak=True)),
    ),
    Claim(
        "B: joint scaling fails for small α",
        "breaks down",
        "excess at α = 10⁻³ < half of that at α ≥ 10",
        at_most(0.0, _curves(("B",), ["joint"], _small_less_half_of_large)),
    ),
    Claim(
        "E: joint scaling fails for small α",
        "breaks down",
        "excess at α = 10⁻³ < half of that at α ≥ 10",
        at_most(0.0, _curves(("E",), ["joint"], _small_less_half_of_large)),
    ),
    Claim(
        "C: T = α^(L−ℒ) is flat for small α",
        "partial symmetry",
        f"spread over α ≤ 0.1 ≤ {FLAT_SPREAD} of the peak",
        at_most(FLAT_SPREAD, _curves(("C",), ["identity"], _spread(high=SMALL), of_peak=True)),
    ),
    Claim(
        "C: T = α^L is not",
        "the identity path prevails",
        f"spread over α ≤ 0.1 ≥ {OTHER} of the peak",
        at_least(OTHER, _curves(("C",), ["joint"], _spread(high=SMALL), of_peak=True)),
    ),
    Claim(
        "A: α does what T = α^-L does",
        "perfect symmetry",
        f"difference ≤ {SAME} of the peak",
        at_most(SAME, _curves(("A",), ["alpha", "temperature"], _mirror_difference, of_peak=True)),
    ),
    Claim(
        "B, C: it does not",
        "symmetry broken",
        f"difference ≥ {OTHER} of the peak",
        at_least(OTHER, _curves(("B", "C"), ["alpha", "temperature"], _mirror_difference, of_peak=True)),
    ),
    Claim("D, E: the peak along T is lower than A's", "lower", "D/A, E/A < 1", at_most(1.0, _over_peak_of_a)),
    Claim("D, E: much lower", "much lower", "D/A, E/A < 0.5", at_most(0.5, _over_peak_of_a)),
    Claim(
        "D, E: the excess is negative somewhere",
        "can become negative",
        "least excess along α and T < 0",
        at_most(0.0, _curves(NORMED, ["alpha", "temperature"], _least)),
    ),
    Claim(
        "A–C: Tr(S) = 0, ReLU networks without norms",
        "– (exact)",
        "|Tr(S)| ≤ 2 standard errors, median along T",
        at_most(2.0, _curves(ANY[:3], ["temperature"], lambda one: np.median(np.abs(_scores(one)), 1))),
    ),
    Claim(
        "D, E: Tr(S) < 0, LayerNorm",
        "–",
        "Tr(S) ≤ −2 standard errors, median along T",
        at_most(-2.0, _curves(NORMED, ["temperature"], lambda one: np.median(_scores(one), 1))),
    ),
    Claim(
        "D, E: where the excess is negative, so is that of S",
        "–",
        "excess of S < 0 wherever the mean excess is",
        at_most(0.0, _curves(NORMED, ["temperature"], _residual_where_negative)),
    ),
    Claim(
        "A–E: along T the excess goes with the share of G",
        "– (G carries it in homogeneous nets)",
        "correlation with ‖G‖/(‖G‖+‖S‖) ≥ 0.8",
        at_least(0.8, _curves(ANY, ["temperature"], _goes_with_gauss_newton)),
    ),
    Claim(
        "A–E: the projected excess is √d·t/√(t² + d + 1), which saturates at √d",
        "–",
        "root mean square difference ≤ 0.25",
        at_most(0.25, _saturation),
    ),
    Claim(
        "D, E: the output is linear in α for α ≥ 0.1",
        "holds but for very small α",
        "KL < 10⁻³",
        at_most(1e-3, _logits(_largest_from_tenth("kl"))),
    ),
    Claim(
        "D, E: the same by the logits themselves",
        "–",
        "relative difference < 0.01",
        at_most(0.01, _logits(_largest_from_tenth("error"))),
    ),
    Claim(
        "D, E: for α = 10⁻³ it is not",
        "ε prevails",
        "relative difference > 0.1",
        at_least(0.1, _logits(lambda one: one["error"][:, 0])),
    ),
)
