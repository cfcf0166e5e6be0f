"""The Goldilocks zone of a network at its start, along the temperature and along the scale of the weights.

The excess of positive curvature `t = Tr(H)/‖H‖_F` has a peak between logits that are so small that a softmax
is undecided and logits so large that it is saturated. The zone is where it has at least half of its peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from theodolite.core.calling import require_logits
from theodolite.core.errors import UseError
from theodolite.probes.curvature.curvature import Curvature
from theodolite.probes.curvature.rescaling import along_scale, along_temperature, scaled
from theodolite.probes.curvature.sampling import Estimate
from theodolite.surveying.curvature_setup import Spot

SCALES = tuple(10 ** (eighth / 8) for eighth in range(-24, 25))
"""Of the weights, at which it is seen how large the logits are."""
APART = 0.1
"""Powers of ten: a point this near to the start is not measured, the start itself is."""


@dataclass(frozen=True)
class Zone:
    """Around the peak, in powers of ten. A side may be open (±inf)."""

    low: float
    high: float
    peak: float
    """Where the peak is."""


@dataclass(frozen=True)
class Axis:
    """The curvature along one axis, on which the start is at 1."""

    name: str
    places: tuple[float, ...]
    """Ascending."""
    curvatures: tuple[Curvature, ...]

    @property
    def start(self) -> Curvature:
        """At the start."""
        return self.curvatures[self.places.index(1.0)]

    @property
    def excess(self) -> tuple[Estimate, ...]:
        """`t` at each place."""
        return tuple(one.t for one in self.curvatures)

    @cached_property
    def peak(self) -> Estimate:
        """The largest excess."""
        return max(self.excess, key=lambda one: one.value)

    @cached_property
    def zone(self) -> Zone | None:
        """None where the peak is not clearly above zero."""
        if not self.peak.low > 0:
            return None
        return zone_of([math.log10(place) for place in self.places], [one.value for one in self.excess])

    @property
    def is_inside(self) -> bool:
        """Is the start in the zone?"""
        return self.zone is not None and self.zone.low <= 0 <= self.zone.high

    @property
    def is_clearly_outside(self) -> bool:
        """Is there a zone, and is the start farther from it than the noise can tell?"""
        return self.zone is not None and not self.is_inside and self.start.t.high < self.peak.value / 2


@dataclass(frozen=True)
class Zones:
    """Both axes."""

    temperature: Axis
    scale: Axis


def explore(spot: Spot) -> Zones:
    """Measure along both axes. The start, where they cross, is measured once."""
    require_logits(spot.workload.loss, "The zone along a temperature")
    around = round(2 * math.log10(spread_of(spot.logits) or 1.0)) / 2
    temperatures = sorted({1.0, *(float(f"{10 ** (around + one):.3g}") for one in spot.effort.decades)})
    spot.spend(len(temperatures) * spot.directions)
    temperature = Axis("T", tuple(temperatures), _along_temperature(spot, temperatures))
    at_peak = 0.0 if temperature.zone is None else temperature.zone.peak
    places = [1.0]
    found = [temperature.start]
    for scale in _scales(spot, [near - at_peak for near in spot.effort.near]):
        spot.spend(spot.directions)
        try:
            found += along_scale(
                spot.model,
                spot.workload.loss,
                spot.batch,
                [scale],
                directions=spot.directions,
                parameters=spot.parameters,
                seed=spot.site.seed,
            )
        except UseError:  # what is not finite so far out is no place to begin
            continue
        places.append(scale)
    order = sorted(range(len(places)), key=lambda index: places[index])
    return Zones(temperature, Axis("α", tuple(places[i] for i in order), tuple(found[i] for i in order)))


def zone_of(at: Sequence[float], excess: Sequence[float]) -> Zone:
    """Where the excess is at least half of its peak; its ends are interpolated.

    >>> zone_of([-2, -1, 0, 1, 2], [0.0, 2.0, 4.0, 3.0, 0.5])
    Zone(low=-1.0, high=1.4, peak=0)
    """
    top = int(np.argmax(excess))
    half = excess[top] / 2
    return Zone(
        _crossing(at[top::-1], excess[top::-1], half, beyond=-math.inf),
        _crossing(at[top:], excess[top:], half, beyond=math.inf),
        at[top],
    )


def spread_of(logits: Tensor) -> float:
    """Root mean square of the logits around the mean of each target.

    >>> import torch
    >>> spread_of(torch.tensor([[1.0, 3.0], [5.0, 7.0]]))
    1.0
    """
    found = logits.double()
    return float((found - found.mean(-1, keepdim=True)).square().mean().sqrt()) if logits.ndim else 0.0


def _along_temperature(spot: Spot, temperatures: Sequence[float]) -> tuple[Curvature, ...]:
    return along_temperature(
        spot.model,
        spot.workload.loss,
        spot.batch,
        temperatures,
        directions=spot.directions,
        parameters=spot.parameters,
        seed=spot.site.seed,
    )


def _scales(spot: Spot, wanted: Sequence[float]) -> list[float]:
    """The scales at which the logits are larger by these powers of ten, but the one that is 1.

    Depth multiplies what a scale does to the logits, and norms undo it: so it is looked up. Where the logits
    do not depend on the scale, the powers are its own.
    """
    seen: dict[float, float] = {}
    for scale in SCALES:
        with scaled(spot.model, scale):
            spread = spread_of(spot.forward())
        if 0 < spread < math.inf:
            seen[math.log10(scale)] = math.log10(spread)
    start = math.log10(spread_of(spot.logits) or 1.0)
    # Rounding, or a bias against a weight, can turn the logits back a little.
    larger = np.maximum.accumulate(list(seen.values())) - start if seen else np.zeros(1)
    reached = len(seen) > 1 and larger[-1] - larger[0] > 1
    found = np.interp(wanted, larger, list(seen)) if reached else np.array(wanted)
    near = {float(f"{10**one:.3g}") for one in found if abs(one) > APART}
    return sorted(near)


def _crossing(at: Sequence[float], excess: Sequence[float], half: float, *, beyond: float) -> float:
    """Where it falls below half, going outwards from the peak."""
    for index in range(1, len(at)):
        if excess[index] < half:
            share = (excess[index - 1] - half) / (excess[index - 1] - excess[index])
            return at[index - 1] + share * (at[index] - at[index - 1])
    return beyond
