"""The exponents of the envelope: s from successive growths, and those of the loss against parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from theodolite.fits import depth_expansion, power
from theodolite.fits.result import Estimate
from theodolite.studies.records import Record

GROWTH = 1.0
"""The r of depth = width^r in the networks from scratch."""
DRAWS = 100
"""Of the bootstrap."""
FEWEST = 5
"""Depths that a law of four constants takes at least."""


@dataclass(frozen=True)
class Envelope:
    """Exponents with their intervals."""

    s: Estimate
    """Of `δ_{k+1} = δ_k − aδ_k^s`, from successive growths."""
    floor: Estimate
    """The loss E that is left at any depth, from the same fit."""
    foretold: Estimate
    """`r/((2+r)(s−1))`."""
    in_depth: Estimate
    """α of `L = E + A·k^−α` through the same growths; 1/(s−1) where depth is large."""
    measured: Estimate | None
    """α of `L = E + A·N^−α` through the networks from scratch, if there are enough."""
    coupling: float | None
    """The slope of log gain against log δ over the growths: Assumption G says it is s."""


def envelope(records: Sequence[Record]) -> Envelope | None:
    """Fit what there is; None if too few depths were grown."""
    known = [one for one in records if one["loss"] is not None]
    grown = [one for one in known if one["kind"] == "grown"]
    if len({one["depth"] for one in grown}) < FEWEST:
        return None
    scratch = [one for one in known if one["kind"] == "coupled"]
    return _fitted(
        tuple((float(one["depth"]), one["loss"], one.get("gain") or 0.0) for one in grown),
        tuple((float(one["parameters"]), one["loss"]) for one in scratch),
    )


@functools.cache
def _fitted(
    grown: tuple[tuple[float, float, float], ...], scratch: tuple[tuple[float, float], ...]
) -> Envelope:
    depth, loss, gain = np.array(grown).T
    law = depth_expansion(depth=depth, loss=loss, growth=GROWTH, draws=DRAWS)
    alpha = power(x=depth, loss=loss, draws=DRAWS)["alpha"]
    measured = None
    if len({size for size, _ in scratch}) > 3:
        sizes, ends = np.array(scratch).T
        measured = power(x=sizes, loss=ends, draws=DRAWS)["alpha"]
    left = loss - law["E"].value
    good = (left > 0) & (gain > 0)
    coupling = None
    if good.sum() >= FEWEST:
        coupling = float(np.polyfit(np.log(left[good]), np.log(gain[good]), 1)[0])
    return Envelope(law["s"], law["E"], law["gamma"], alpha, measured, coupling)
