"""TH301: is the start in the Goldilocks zone, along the temperature and along the scale of the weights?

The excess of positive curvature `t = Tr(H)/‖H‖_F` has a peak between logits so small that a softmax is
undecided and logits so large that it is saturated. The zone is where it has at least half of its peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from theodolite.core.calling import require_logits
from theodolite.core.errors import UseError
from theodolite.present.figure import ACCENT, FAINT, Figure, Panel, frame, guide, line
from theodolite.probes.curvature.curvature import Curvature
from theodolite.probes.curvature.rescaling import along_scale, along_temperature, scaled
from theodolite.probes.curvature.sampling import Estimate
from theodolite.surveying.curvature_setup import CurvatureSetup
from theodolite.surveying.finding import Check, Finding, Level, Value, rounded, with_minus

ZONE = Check(
    "TH301",
    "The start in the Goldilocks zone",
    "Between logits so small that the softmax is undecided and logits so large that it is saturated lies a "
    "zone where the loss curves upwards in most directions. Networks without norms train best from there: "
    "outside of it, gradients are noise or vanish. Depth multiplies the error in the scale of every layer, "
    "so the distance to the zone grows with depth.",
)
OUTSIDE, NO_ZONE = "A start outside the Goldilocks zone", "No Goldilocks zone"
SATURATED = 2.0
"""Times the loss of undecided logits: a start with more is confidently wrong."""
AXES = {"T": "the temperature T of the logits", "α": "the scale α of the weights"}
TITLES = {"T": "Logits divided by T", "α": "Weights multiplied by α"}
SCALES = tuple(10 ** (eighth / 8) for eighth in range(-24, 25))
"""Of the weights, at which the size of the logits is measured."""
APART = 0.1
"""Powers of ten: a point closer to the start is not measured; the start itself is."""


@dataclass(frozen=True)
class Zone:
    """Around the peak, in powers of ten. A side may be open (±inf)."""

    low: float
    high: float
    peak: float
    """Where the peak is."""


@dataclass(frozen=True)
class ZoneAxis:
    """The curvature along one axis; the start is at 1."""

    name: str
    places: tuple[float, ...]
    """Ascending."""
    curvatures: tuple[Curvature, ...]

    @property
    def start(self) -> Curvature:
        """At the start."""
        return self.curvatures[self.places.index(1.0)]

    @cached_property
    def excess(self) -> tuple[Estimate, ...]:
        """`t` at each place."""
        return tuple(one.t for one in self.curvatures)

    @cached_property
    def peak(self) -> Estimate:
        """The largest excess."""
        return max(self.excess, key=lambda one: one.value)

    @cached_property
    def zone(self) -> Zone | None:
        """None if the peak is not clearly above zero."""
        if not self.peak.low > 0:
            return None
        return zone_of([math.log10(place) for place in self.places], [one.value for one in self.excess])

    @property
    def is_inside(self) -> bool:
        """Is the start in the zone?"""
        return self.zone is not None and self.zone.low <= 0 <= self.zone.high

    @property
    def is_clearly_outside(self) -> bool:
        """Is there a zone, and is the start outside by more than the noise?"""
        return self.zone is not None and not self.is_inside and self.start.t.high < self.peak.value / 2


def explore(setup: CurvatureSetup) -> tuple[ZoneAxis, ZoneAxis]:
    """Measure along the temperature and the scale. The start, where they cross, is measured once."""
    require_logits(setup.workload.loss, "The zone along a temperature")
    around = round(2 * math.log10(spread_of(setup.logits) or 1.0)) / 2
    temperatures = sorted({1.0, *(float(f"{10 ** (around + one):.3g}") for one in setup.effort.decades)})
    setup.spend(len(temperatures) * setup.directions)
    model, loss, batch = setup.model, setup.workload.loss, setup.batch
    curvatures = along_temperature(model, loss, batch, temperatures, **setup.options)
    temperature = ZoneAxis("T", tuple(temperatures), curvatures)
    at_peak = 0.0 if temperature.zone is None else temperature.zone.peak
    found = {1.0: temperature.start}
    for scale in _scales(setup, [near - at_peak for near in setup.effort.near]):
        setup.spend(setup.directions)
        with suppress(UseError):  # not finite so far out
            (found[scale],) = along_scale(model, loss, batch, [scale], **setup.options)
    places = tuple(sorted(found))
    return temperature, ZoneAxis("α", places, tuple(found[place] for place in places))


def in_zone(setup: CurvatureSetup, temperature: ZoneAxis, scale: ZoneAxis) -> Finding:
    """TH301: is the start in the zone, along both axes?"""
    axes = temperature, scale
    start = with_minus(temperature.start.t)
    said = f"{setup.where} the excess of positive curvature Tr(H)/‖H‖ at the start is {start}"
    clear = [axis for axis in axes if axis.zone is not None]
    outside = [axis for axis in clear if not axis.is_inside]
    level: Level = "note"
    title, remedy = OUTSIDE, ""
    if not clear:
        title = NO_ZONE
        said += (
            f". It is nowhere clearly above zero along {AXES['T']} or {AXES['α']}, so there is no "
            "Goldilocks zone."
        )
    elif not outside:
        level, title = "ok", ""
        said += f", inside the Goldilocks zone: {_zones(clear)}."
    else:
        # Along one axis only, or by less than the noise, it may be inside.
        if not setup.is_normed and all(axis.is_clearly_outside for axis in clear):
            level = "warn"
        said += f", outside the Goldilocks zone: {_zones(outside)}."
        ways = ", or ".join(map(_way, outside))
        remedy = f"{ways[0].upper()}{ways[1:]}."
    if setup.is_normed:  # with norms, rescaling would only spoil the logits
        remedy = ""
    loss, undecided = temperature.start.loss, temperature.curvatures[-1].loss
    if level != "ok" and loss > SATURATED * undecided:
        said += f" The loss starts at {rounded(loss)}; undecided logits would give {rounded(undecided)}."
        size = float(f"{spread_of(setup.logits):.2g}")
        remedy = remedy or f"Start with logits that are smaller by a factor of {size:g}."
    elif level != "ok" and setup.is_normed:
        said += " This is usual with norms, and such networks still train well."
    numbers = setup.setting | {
        "excess of the start": start,
        "excess in the directions alone": temperature.start.excess,
        "loss of the start": loss,
        "loss of undecided logits": undecided,
    }
    rows = [row for axis in axes for row in _rows(axis)]
    figures = [_figure(axes)]
    return ZONE.finding(level, said, title=title, remedy=remedy, numbers=numbers, rows=rows, figures=figures)


def without_softmax(setup: CurvatureSetup, start: Curvature) -> Finding:
    """TH301 of any other loss than a cross-entropy."""
    excess = with_minus(start.t)
    return ZONE.finding(
        "note",
        "The loss is not the cross-entropy of a softmax, so it has neither a temperature nor a Goldilocks "
        f"zone. {setup.where} the excess of positive curvature Tr(H)/‖H‖ at the start is {excess}.",
        title=NO_ZONE,
        numbers=setup.setting | {"excess of the start": excess},
    )


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


def _figure(axes: tuple[ZoneAxis, ...]) -> Figure:
    """Both axes side by side, on one scale."""
    ends = [end for axis in axes for one in axis.excess for end in (one.low, one.high)]
    air = 0.08 * (max(ends) - min(ends)) or 1.0
    y_range = min(0.0, min(ends)) - air, max(ends) + air
    return Figure(
        caption="Excess of positive curvature Tr(H)/‖H‖ against the temperature and against the scale of "
        "the weights, with 95 % intervals. Shaded: the zone, where it has at least half of its peak. "
        "Dotted: this network, at 1.",
        alt=". ".join(
            f"{TITLES[axis.name]}: the excess is {axis.start.t.value:.2g} at 1 and at most "
            f"{axis.peak.value:.2g}, at {axis.name} = {axis.places[axis.excess.index(axis.peak)]:.2g}"
            for axis in axes
        ),
        panels=tuple(_panel(axis, y_range) for axis in axes),
    )


def log_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis between two powers of ten; a short one has ticks at 1, 2 and 5 times them."""
    ticks = "D2" if high - low < 3 else math.ceil((high - low) / 7)
    return {"type": "log", "range": [low, high], "exponentformat": "power", "dtick": ticks}


def _scales(setup: CurvatureSetup, wanted: Sequence[float]) -> list[float]:
    """The scales at which the logits are larger by these powers of ten, except 1.

    Depth multiplies the effect of a scale on the logits, and norms undo it, so it is measured. If the logits
    do not depend on the scale, the powers are its own.
    """
    seen: dict[float, float] = {}
    for scale in SCALES:
        with scaled(setup.model, scale):
            spread = spread_of(setup.forward())
        if 0 < spread < math.inf:
            seen[math.log10(scale)] = math.log10(spread)
    start = math.log10(spread_of(setup.logits) or 1.0)
    # Rounding, or a bias against a weight, can make the logits slightly smaller again.
    larger = np.maximum.accumulate(list(seen.values())) - start if seen else np.zeros(1)
    reached = len(seen) > 1 and larger[-1] - larger[0] > 1
    found = np.interp(wanted, larger, list(seen)) if reached else np.array(wanted)
    return sorted({float(f"{10**one:.3g}") for one in found if abs(one) > APART})


def _crossing(at: Sequence[float], excess: Sequence[float], half: float, *, beyond: float) -> float:
    """Where it falls below half, going outwards from the peak."""
    for (inner, above), (outer, below) in pairwise(zip(at, excess, strict=True)):
        if below < half:
            return inner + (above - half) / (above - below) * (outer - inner)
    return beyond


def _zones(axes: Sequence[ZoneAxis]) -> str:
    """The extent of the zones, and their peaks."""
    return "; ".join(
        f"along {AXES[axis.name]} the zone extends {_extent(axis.zone)}, with a peak of "
        f"{axis.peak.value:.2g} at {_number(axis.zone.peak)}"
        for axis in axes
        if axis.zone is not None
    )


def _extent(zone: Zone) -> str:
    start = "" if math.isinf(zone.low) else f"from {_number(zone.low)} "
    if math.isinf(zone.high):
        return f"{start}upwards" if start else "over all values tried"
    return f"{start}up to {_number(zone.high)}"


def _way(axis: ZoneAxis) -> str:
    """How to get to the peak of a zone."""
    assert axis.zone is not None
    at = axis.zone.peak
    if axis.name == "α":
        return f"multiply the initial weights and biases by α = {_number(at)}"
    return (
        f"divide the logits by T = {_number(at)}"
        if at > 0
        else f"multiply the logits by 1/T = {_number(-at)}"
    )


def _rows(axis: ZoneAxis) -> Iterator[Mapping[str, Value]]:
    for place, found in zip(axis.places, axis.curvatures, strict=True):
        yield {
            "axis": axis.name,
            "at": place,
            "excess": found.t.value,
            "from": found.t.low,
            "to": found.t.high,
            "share of S": found.residual_share,
            "loss": found.loss,
        }


def _number(exponent: float) -> str:
    """Ten to this power, in two digits.

    >>> _number(-1.477), _number(2.5), _number(4.43)
    ('0.033', '320', '27,000')
    """
    value = float(f"{10**exponent:.2g}")
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _panel(axis: ZoneAxis, y_range: tuple[float, float]) -> Panel:
    places, excess = list(axis.places), axis.excess
    band = line(
        [*places, *reversed(places)],
        [*(one.low for one in excess), *(one.high for one in reversed(excess))],
        fill="toself",
        fillcolor=FAINT,
        line={"width": 0, "color": FAINT},
    )
    hover = f"{axis.name} %{{x:.3g}}: %{{y:.3g}}"
    drawn = line(places, [one.value for one in excess], hover=hover, markers=6)
    low, high = math.log10(places[0]), math.log10(places[-1])
    low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)
    layout = frame(height=240, x=axis.name, y="excess")
    layout["xaxis"] |= log_axis(low, high)
    layout["yaxis"] |= {"range": list(y_range), "nticks": 5}
    layout["shapes"] = [guide(y=0.0), guide(x=1.0)]
    if axis.zone is not None:
        ends = {"x0": 10 ** max(axis.zone.low, low), "x1": 10 ** min(axis.zone.high, high)}
        shade = {"fillcolor": ACCENT, "opacity": 0.12, "line": {"width": 0}, "layer": "below"}
        layout["shapes"].append({"type": "rect", "yref": "paper", "y0": 0, "y1": 1, **ends, **shade})
    return Panel(TITLES[axis.name], (band, drawn), layout)
