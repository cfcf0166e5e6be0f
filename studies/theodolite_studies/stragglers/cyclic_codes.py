"""Random cyclic gradient codes: how much they amplify rounding, beside fractional repetition.

Worker i sends a combination of the gradients of parts i, …, i + s, such that a combination a of the answers
of any n − s workers is the sum of all parts. The coefficients B follow from a random s × n matrix H, the rows
of which sum to zero: H Bᵀ = 0.

References:
    Tandon et al., Gradient coding: avoiding stragglers in distributed learning, 2017.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from theodolite.fleet import GradientCoding
from theodolite_studies.framework.claims import Array

CODES = {"n = 20, s = 4": (20, 4), "n = 64, s = 8": (64, 8), "n = 128, s = 15": (128, 15)}
LENGTH = 256
"""Entries of a gradient."""


def cyclic_code(n: int, s: int, luck: np.random.Generator) -> Array:
    """B, workers × parts."""
    H: Array = luck.standard_normal((s, n))
    H[:, -1] = -H[:, :-1].sum(1)
    B: Array = np.zeros((n, n))
    for worker in range(n):
        others = (worker + 1 + np.arange(s)) % n
        B[worker, worker] = 1.0
        B[worker, others] = -np.linalg.solve(H[:, others], H[:, worker])
    return B


def decoded(B: Array, answered: NDArray[np.int64]) -> Array:
    """Coefficients a of the answers with `aᵀ B = 1`; of least norm."""
    return np.asarray(np.linalg.lstsq(B[answered].T, np.ones(B.shape[1]), rcond=None)[0], dtype=float)


def rounding(n: int, s: int, seed: int, patterns: int) -> dict[str, float]:
    """Of one random code: the median and the largest over patterns of s late workers.

    Half of the patterns are random; in the others the late workers are neighbours. `amplification` is
    `max|a|·max|B|`. `double` and `single` are the relative errors of the sum of all parts' gradients in
    float64 and in float32. `repetition` is that of fractional repetition in float32. The gradients of the
    parts have independent random entries.
    """
    luck = np.random.default_rng([n, s, seed])
    B = cyclic_code(n, s, luck)
    parts = luck.standard_normal((n, LENGTH))
    right = parts.sum(0)
    seen = []
    for place in range(patterns):
        order = luck.permutation(n) if place % 2 else (place + np.arange(n)) % n
        answered = order[s:]
        a = decoded(B, answered)
        errors = [
            _error(a.astype(kind) @ (B.astype(kind) @ parts.astype(kind))[answered], right)
            for kind in (np.float64, np.float32)
        ]
        seen.append((np.abs(a).max() * np.abs(B).max(), *errors))
    found = {"repetition": _error(_repetition(n, s, parts.astype(np.float32)), right)}
    for name, values in zip(("amplification", "double", "single"), np.array(seen).T, strict=True):
        found |= {f"median {name}": float(np.median(values)), f"largest {name}": float(values.max())}
    return found


def _repetition(n: int, s: int, parts: Array) -> Array:
    """The sum over groups of the one answer that is taken of each: which one does not matter."""
    groups = np.array_split(parts, GradientCoding(n, s).groups)
    total = np.zeros_like(parts[0])
    for own in groups:
        total += own.sum(0)
    return total


def _error(found: Array, right: Array) -> float:
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))
