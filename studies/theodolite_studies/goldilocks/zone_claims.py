"""What the paper says about the curvature before training, and what would make it hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case, Claim, settled
from theodolite_studies.goldilocks.curves import Array, Curve, curve
from theodolite_studies.goldilocks.networks import NETWORKS, NORMED, Column
from theodolite_studies.goldilocks.setting import Setting

FLAT_RATIO, FLAT_SPREAD = 1.1, 0.1
"""Largest over smallest excess; their difference as a part of A's peak along T in the same network."""
SAME, OTHER = 0.05, 0.2
"""Two curves are the same, or are not: the largest difference as a part of A's peak."""
LARGE, SMALL = 1.0, -1.0
"""log10 of the α from which on it is large, and up to which it is small."""
ANY: tuple[Column, ...] = ("A", "B", "C", "D", "E")


def zone_claims(records: Sequence[Record], setting: Setting) -> Iterator[Claim]:
    """As far as there are records to tell."""
    found = _Curves(records)
    for claim in (
        *_peaks(found),
        *_joint_scaling(found),
        *_symmetry(found),
        *_layer_norm(found),
        *_parts(found),
        *_saturation(found, setting),
        *_logits(records),
    ):
        if claim is not None:
            yield claim


class _Curves:
    """The curves of figure 1 by network, column and row."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.found = {
            (network.name, column, row): measured
            for network in NETWORKS.values()
            for column in network.columns
            for row in ("alpha", "temperature", "joint", "identity")
            if (measured := curve(records, part="zone", network=network.name, column=column, row=row))
        }

    def cases(
        self, columns: Sequence[Column], rows: Sequence[str], number: Callable[..., Array]
    ) -> list[Case]:
        """`number` of the curves of these rows, of every network that has them in one of these columns."""
        cases = []
        for network in NETWORKS.values():
            for column in columns:
                curves = [self.found.get((network.name, column, row)) for row in rows]
                if all(each is not None for each in curves):
                    cases.append(Case(f"{network.name} {column}", number(*curves)))
        return cases

    def parts_of_peak(
        self, columns: Sequence[Column], rows: Sequence[str], number: Callable[..., Array]
    ) -> list[Case]:
        """The same as a part of A's peak along T in the same network, where that was measured."""
        cases = []
        for network in NETWORKS.values():
            unit = self.peak(network.name, "A")
            for column in columns:
                curves = [self.found.get((network.name, column, row)) for row in rows]
                if unit is not None and all(each and len(each.seeds) == len(unit) for each in curves):
                    cases.append(Case(f"{network.name} {column}", number(*curves) / unit))
        return cases

    def peak(self, network: str, column: Column) -> Array | None:
        """Along T, of each seed."""
        measured = self.found.get((network, column, "temperature"))
        return None if measured is None else _peak(measured)


def _claim(
    claim: str, paper: str, threshold: str, cases: Sequence[Case], *, limit: float, below: bool = True
) -> Claim | None:
    if not cases:
        return None
    return settled(claim, paper, threshold, cases, limit=limit, below=below)


def _peaks(found: _Curves) -> Iterator[Claim | None]:
    for row, axis in (("temperature", "T"), ("alpha", "α")):
        yield _claim(
            f"A–E: a zone along {axis}: the excess falls off to both sides of a peak",
            "in all architectures",
            "both ends < half the peak",
            found.cases(ANY, [row], _ends_over_peak),
            limit=0.5,
        )


def _joint_scaling(found: _Curves) -> Iterator[Claim | None]:
    yield _claim(
        "A: flat under joint scaling, T = α^L",
        "flat",
        f"max/min ≤ {FLAT_RATIO}",
        found.cases(("A",), ["joint"], _largest_over_smallest),
        limit=FLAT_RATIO,
    )
    yield _claim(
        "B–E: flat under joint scaling for large α (T = α^L; D, E: T = α)",
        "flat, at least roughly",
        f"spread over α ≥ 10 ≤ {FLAT_SPREAD} of the peak",
        found.parts_of_peak(("B", "C", "D", "E"), ["joint"], _spread_from(LARGE)),
        limit=FLAT_SPREAD,
    )
    for column in ("B", "E"):
        yield _claim(
            f"{column}: joint scaling fails for small α",
            "breaks down",
            "excess at α = 10⁻³ < half of that at α ≥ 10",
            found.cases((column,), ["joint"], _small_less_half_of_large),
            limit=0.0,
        )
    yield _claim(
        "C: T = α^(L−ℒ) is flat for small α",
        "partial symmetry",
        f"spread over α ≤ 0.1 ≤ {FLAT_SPREAD} of the peak",
        found.parts_of_peak(("C",), ["identity"], _spread_up_to(SMALL)),
        limit=FLAT_SPREAD,
    )
    yield _claim(
        "C: T = α^L is not",
        "the identity path prevails",
        f"spread over α ≤ 0.1 ≥ {OTHER} of the peak",
        found.parts_of_peak(("C",), ["joint"], _spread_up_to(SMALL)),
        limit=OTHER,
        below=False,
    )


def _symmetry(found: _Curves) -> Iterator[Claim | None]:
    yield _claim(
        "A: α does what T = α^-L does",
        "perfect symmetry",
        f"difference ≤ {SAME} of the peak",
        found.parts_of_peak(("A",), ["alpha", "temperature"], _mirror_difference),
        limit=SAME,
    )
    yield _claim(
        "B, C: it does not",
        "symmetry broken",
        f"difference ≥ {OTHER} of the peak",
        found.parts_of_peak(("B", "C"), ["alpha", "temperature"], _mirror_difference),
        limit=OTHER,
        below=False,
    )


def _layer_norm(found: _Curves) -> Iterator[Claim | None]:
    ratios = []
    for network in NETWORKS.values():
        for column in NORMED:
            mine, other = found.peak(network.name, column), found.peak(network.name, "A")
            if mine is not None and other is not None and len(mine) == len(other):
                ratios.append(Case(f"{network.name} {column}", mine / other))
    yield _claim("D, E: the peak along T is lower than A's", "lower", "D/A, E/A < 1", ratios, limit=1.0)
    yield _claim("D, E: much lower", "much lower", "D/A, E/A < 0.5", ratios, limit=0.5)
    yield _claim(
        "D, E: the excess is negative somewhere",
        "can become negative",
        "least excess along α and T < 0",
        found.cases(
            NORMED,
            ["alpha", "temperature"],
            lambda alpha, along: np.minimum(alpha["excess"].min(1), along["excess"].min(1)),
        ),
        limit=0.0,
    )


def _parts(found: _Curves) -> Iterator[Claim | None]:
    yield _claim(
        "A–C: Tr(S) = 0, ReLU networks without norms",
        "– (exact)",
        "|Tr(S)| ≤ 2 standard errors, median along T",
        found.cases(("A", "B", "C"), ["temperature"], lambda along: np.median(np.abs(_scores(along)), 1)),
        limit=2.0,
    )
    yield _claim(
        "D, E: Tr(S) < 0, LayerNorm",
        "–",
        "Tr(S) ≤ −2 standard errors, median along T",
        found.cases(NORMED, ["temperature"], lambda along: np.median(_scores(along), 1)),
        limit=-2.0,
    )
    yield _claim(
        "D, E: where the excess is negative, so is that of S",
        "–",
        "excess of S < 0 wherever the mean excess is",
        found.cases(NORMED, ["temperature"], _residual_where_negative),
        limit=0.0,
    )
    yield _claim(
        "A–E: along T the excess goes with the share of G",
        "– (G carries it in homogeneous nets)",
        "correlation with ‖G‖/(‖G‖+‖S‖) ≥ 0.8",
        found.cases(ANY, ["temperature"], _goes_with_gauss_newton),
        limit=0.8,
        below=False,
    )


def _saturation(found: _Curves, setting: Setting) -> Iterator[Claim | None]:
    def difference(*curves: Curve) -> Array:
        squares = [(each["excess"] - projected_excess(each["t"], setting.directions)) ** 2 for each in curves]
        return np.sqrt(np.nanmean(np.concatenate(squares, 1), 1))

    yield _claim(
        "A–E: the projected excess is √d·t/√(t² + d + 1), which saturates at √d",
        "–",
        "root mean square difference ≤ 0.25",
        found.cases(ANY, ["alpha", "temperature", "joint"], difference),
        limit=0.25,
    )


def projected_excess(t: Array, directions: int) -> Array:
    """What RᵀHR shows of `t = Tr(H)/‖H‖_F`: `√d·t/√(t² + d + 1)`.

    >>> round(float(projected_excess(np.array(1e9), 50)), 2)
    7.07
    """
    result: Array = math.sqrt(directions) * t / np.sqrt(t**2 + directions + 1)
    return result


def _logits(records: Sequence[Record]) -> Iterator[Claim | None]:
    cases: dict[str, list[Case]] = {"kl": [], "error": [], "at the least": []}
    for network in NETWORKS.values():
        for column in NORMED:
            measured = curve(records, part="logits", network=network.name, column=column)
            if measured is None:
                continue
            where, from_tenth = f"{network.name} {column}", measured.at >= SMALL - 1e-9
            for name in ("kl", "error"):
                cases[name].append(Case(where, measured[name][:, from_tenth].max(1)))
            cases["at the least"].append(Case(where, measured["error"][:, 0]))
    yield _claim(
        "D, E: the output is linear in α for α ≥ 0.1",
        "holds but for very small α",
        "KL < 10⁻³",
        cases["kl"],
        limit=1e-3,
    )
    yield _claim(
        "D, E: the same by the logits themselves",
        "–",
        "relative difference < 0.01",
        cases["error"],
        limit=0.01,
    )
    yield _claim(
        "D, E: for α = 10⁻³ it is not",
        "ε prevails",
        "relative difference > 0.1",
        cases["at the least"],
        limit=0.1,
        below=False,
    )


def _peak(measured: Curve) -> Array:
    peak: Array = measured["excess"].max(1)
    return peak


def _ends_over_peak(measured: Curve) -> Array:
    excess = measured["excess"]
    return _ratio(np.maximum(excess[:, 0], excess[:, -1]), _peak(measured))


def _largest_over_smallest(joint: Curve) -> Array:
    return _ratio(joint["excess"].max(1), joint["excess"].min(1))


def _ratio(one: Array, other: Array) -> Array:
    """Infinite where there is nothing positive to divide by."""
    ratio: Array = np.where(other > 0, one / np.where(other > 0, other, 1.0), math.inf)
    return ratio


def _spread_from(exponent: float) -> Callable[[Curve], Array]:
    return lambda joint: _spread(joint, joint.at >= exponent - 1e-9)


def _spread_up_to(exponent: float) -> Callable[[Curve], Array]:
    return lambda joint: _spread(joint, joint.at <= exponent + 1e-9)


def _spread(joint: Curve, where: NDArray[np.bool_]) -> Array:
    part = joint["excess"][:, where]
    spread: Array = part.max(1) - part.min(1)
    return spread


def _small_less_half_of_large(joint: Curve) -> Array:
    large = joint["excess"][:, joint.at >= LARGE - 1e-9].mean(1)
    difference: Array = joint["excess"][:, 0] - 0.5 * large
    return difference


def _mirror_difference(alpha: Curve, along: Curve) -> Array:
    """Both have their points at the same places once T = α^-L, in the other direction."""
    difference: Array = np.abs(alpha["excess"] - along["excess"][:, ::-1]).max(1)
    return difference


def _scores(measured: Curve) -> Array:
    """Tr(S) in its standard errors; where it is exact, 0 if it vanishes beside ‖S‖ and infinity if not."""
    trace, error = measured["trace of S"], measured["trace of S error"]
    vanishes = np.abs(trace) <= 1e-9 * measured["frobenius of S"]
    with np.errstate(divide="ignore", invalid="ignore"):
        scores: Array = np.where(error > 0, trace / error, np.where(vanishes, 0.0, np.sign(trace) * math.inf))
    return scores


def _residual_where_negative(along: Curve) -> Array:
    negative = along.mean() < 0
    if not negative.any():
        return np.full(len(along.seeds), math.nan)
    largest: Array = along["excess of S"][:, negative].max(1)
    return largest


def _goes_with_gauss_newton(along: Curve) -> Array:
    gauss_newton, residual = along["frobenius of G"], along["frobenius of S"]
    pairs = zip(along["excess"], gauss_newton / (gauss_newton + residual), strict=True)
    return np.array([np.corrcoef(excess, share)[0, 1] for excess, share in pairs])
