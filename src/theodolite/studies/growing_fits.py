"""The exponents of the envelope: s from successive growths, and those of the loss against parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from theodolite.fits import depth_expansion, power
from theodolite.fits.result import Estimate
from theodolite.studies.records import Record

GROWTH = 1.0
"""The r of depth = width^r in the networks from scratch."""
DRAWS = 200
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
    depth, loss = ([float(one[name]) for one in grown] for name in ("depth", "loss"))
    law = depth_expansion(depth=depth, loss=loss, growth=GROWTH, draws=DRAWS)
    alpha = power(x=depth, loss=loss, draws=DRAWS)["alpha"]
    scratch = [one for one in known if one["kind"] == "coupled"]
    measured = None
    if len({one["parameters"] for one in scratch}) > 3:
        sizes, ends = ([float(one[name]) for one in scratch] for name in ("parameters", "loss"))
        measured = power(x=sizes, loss=ends, draws=DRAWS)["alpha"]
    return Envelope(law["s"], law["E"], law["gamma"], alpha, measured, _coupling(grown, law["E"].value))


def _coupling(grown: Sequence[Record], floor: float) -> float | None:
    pairs = [
        (one["loss"] - floor, one["gain"])
        for one in grown
        if one.get("gain") and one["gain"] > 0 and one["loss"] > floor
    ]
    if len(pairs) < FEWEST:
        return None
    excess, gain = np.log(np.array(pairs)).T
    return float(np.polyfit(excess, gain, 1)[0])
