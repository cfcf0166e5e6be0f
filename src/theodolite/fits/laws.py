"""Laws of the loss: `log L̂` as a function of free parameters θ, with its derivative.

Sizes enter as logarithms around their mean, so that an intercept and its exponent do not pull at each other:
on the Chinchilla points every start then finds the optimum, where without it a third of them stop early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from theodolite.fits.result import Array

STEEPEST = 10.0
"""Upper bound of an exponent."""
FAINTEST = 12.0
"""A term may fall to e^-12 of the loss, and is then as good as absent."""


@dataclass(frozen=True)
class Law:
    """One law on one set of points; θ is what the search moves."""

    evaluate: Callable[[Array], tuple[Array, Array]]
    """θ (rows, P) -> `log L̂` (rows, n) and its derivative (rows, P, n)."""
    constants: Callable[[Array], dict[str, Array]]
    """θ (…, P) -> the constants one speaks of, each (…)."""
    starts: Array
    """(number of starts, P)."""
    low: Array
    high: Array
    """Bounds of θ."""
    shares: Callable[[Array], dict[str, Array]]
    """θ (P,) -> the share of the loss that each term has at each point."""
    bounded: Mapping[int, str]
    """Exponents, and what it means if one of them ends on a bound."""


def sum_of_powers(inputs: Mapping[str, Array], loss: Array, terms: Mapping[str, tuple[str, str]]) -> Law:
    """`log L̂ = logsumexp_j(a_j − α_j log x_j, e)`, that is `L = Σ_j A_j x_j^−α_j + E`.

    `terms` names, for each input x_j, the constants A_j and α_j; an input "" is the constant term E, whose
    names are ("E", "").

    θ = (a_1, …, a_k, [e], α_1, …, α_k), where a_j belongs to the centred logarithm of x_j.
    """
    variables = [name for name in terms if name]
    offset = "" in terms
    k = len(variables)
    logs = np.stack([np.log(inputs[name]) for name in variables])
    centres = logs.mean(1, keepdims=True)
    logs = logs - centres
    num = k + offset  # terms

    def parts(theta: Array) -> tuple[Array, Array]:
        sizes = np.repeat(theta[:, :num, None], logs.shape[1], axis=2)
        sizes[:, :k] -= theta[:, num:, None] * logs
        return _logsumexp(sizes)

    def evaluate(theta: Array) -> tuple[Array, Array]:
        total, weights = parts(theta)
        return total, np.concatenate([weights, -weights[:, :k] * logs], axis=1)

    def constants(theta: Array) -> dict[str, Array]:
        found = {}
        for j, name in enumerate(variables):
            found[terms[name][0]] = np.exp(theta[..., j] + theta[..., num + j] * centres[j, 0])
        if offset:
            found[terms[""][0]] = np.exp(theta[..., k])
        for j, name in enumerate(variables):
            found[terms[name][1]] = theta[..., num + j]
        return found

    def shares(theta: Array) -> dict[str, Array]:
        names = [terms[name][0] for name in (*variables, *[""] * offset)]
        return dict(zip(names, parts(theta[None])[1][0], strict=True))

    middle, lowest = float(np.log(loss).mean()), float(np.log(loss).min())
    grid = [middle + np.log([0.05, 0.4])] * k + [lowest + np.log([0.4, 0.9])] * offset
    grid += [np.array([0.1, 0.3, 0.8])] * k
    return Law(
        evaluate,
        constants,
        starts=np.array(list(product(*grid))),
        low=np.array([middle - FAINTEST] * k + [lowest - FAINTEST] * offset + [0.0] * k),
        high=np.array([middle + 5.0] * k + [lowest + 0.05] * offset + [STEEPEST] * k),
        shares=shares,
        bounded={num + j: terms[name][1] for j, name in enumerate(variables)},
    )


def depth_recursion(steps: Array, loss: Array) -> Law:
    """`L_k = E + δ_k` where each step of depth takes `aδ^s` from the excess δ (formulas of depth growth).

    `δ_k = [δ_0^{1−s} + (s−1)ak]^{−1/(s−1)}`, written with u = s − 1 and c = aδ_0^u as
    `log δ_k = log δ_0 − log1p(uck)/u`, which has the exponential `δ_0 e^{−ck}` as its limit for u → 0.

    θ = (log δ_0, e, log c, log u).
    """
    middle, lowest = float(np.log(loss).mean()), float(np.log(loss).min())

    def parts(theta: Array) -> tuple[Array, Array, Array, Array]:
        start, e, log_c, log_u = theta.T[:, :, None]
        u = np.exp(log_u)
        grown = u * np.exp(log_c) * steps
        curve = np.log1p(grown) / u
        total, weights = _logsumexp(np.stack([start - curve, np.broadcast_to(e, curve.shape)], axis=1))
        return total, weights, curve, grown / (1 + grown) / u

    def evaluate(theta: Array) -> tuple[Array, Array]:
        total, weights, curve, slope = parts(theta)
        excess, rest = weights[:, 0], weights[:, 1]
        return total, np.stack([excess, rest, -excess * slope, excess * (curve - slope)], axis=1)

    def constants(theta: Array) -> dict[str, Array]:
        u = np.exp(theta[..., 3])
        return {
            "delta_0": np.exp(theta[..., 0]),
            "E": np.exp(theta[..., 1]),
            "a": np.exp(theta[..., 2] - u * theta[..., 0]),
            "s": 1 + u,
        }

    def shares(theta: Array) -> dict[str, Array]:
        return dict(zip(("delta_0", "E"), parts(theta[None])[1][0], strict=True))

    longest = float(np.log(steps.max()))
    grid = (
        middle + np.log([0.1, 0.5, 1.0]),
        lowest + np.log([0.3, 0.9]),
        np.array([-1.0, 1.0, 3.0]) - longest,
        np.log([0.3, 1.0, 3.0]),
    )
    return Law(
        evaluate,
        constants,
        starts=np.array(list(product(*grid))),
        low=np.array([middle - FAINTEST, lowest - FAINTEST, -7.0 - longest, np.log(1e-3)]),
        high=np.array([middle + 7.0, lowest + 0.05, 12.0, np.log(STEEPEST)]),
        shares=shares,
        bounded={3: "s"},
    )


def _logsumexp(terms: Array) -> tuple[Array, Array]:
    """Over the terms, axis 1: the log of the sum of exponentials, and each one's share of that sum."""
    top = terms.max(1, keepdims=True)
    weights = np.exp(terms - top)
    total = weights.sum(1, keepdims=True)
    return (top + np.log(total))[:, 0], weights / total
