"""TH301: where the start of a network lies in its Goldilocks zone, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from theodolite.probes.curvature.curvature import Curvature
from theodolite.surveying.curvature_setup import Spot
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.sections.curvature.curves import zone_figure
from theodolite.surveying.sections.curvature.zones import Axis, Zone, Zones, spread_of
from theodolite.surveying.wording import plain, with_minus

INSIDE = "The start in the Goldilocks zone"
WHY_ZONE = (
    "Between logits so small that the softmax is undecided and logits so large that it is saturated "
    "lies a zone where the loss curves upwards in most directions. Networks without norms train best from "
    "there: outside of it gradients are noise or nothing. How far a start is off grows with depth, which "
    "multiplies what is wrong with the scale of every layer."
)
SATURATED = 2.0
"""Times the loss of logits that decide nothing: a start with more is sure of what is wrong."""
AXES = {"T": "the temperature T of the logits", "α": "the scale α of the weights"}


def in_zone(spot: Spot, zones: Zones) -> Finding:
    """TH301: is the start in the zone, along both axes?"""
    axes = zones.temperature, zones.scale
    start = with_minus(zones.temperature.start.t)
    said = f"At {spot.where} the start has an excess of positive curvature Tr(H)/‖H‖ of {start}"
    clear = [axis for axis in axes if axis.zone is not None]
    outside = [axis for axis in clear if not axis.is_inside]
    level: Level = "note"
    title, remedy = "A start outside the Goldilocks zone", ""
    if not clear:
        title = "No Goldilocks zone"
        said += (
            f", which is nowhere clearly above zero along {AXES['T']} or {AXES['α']}: there is no Goldilocks "
            "zone."
        )
    elif not outside:
        level, title = "ok", INSIDE
        said += f", inside the Goldilocks zone: {_zones(clear)}."
    else:
        # Along one axis only, or by less than the noise, it may as well be inside.
        if not spot.is_normed and all(axis.is_clearly_outside for axis in clear):
            level = "warn"
        said += f", outside the Goldilocks zone: {_zones(outside)}."
        remedy = f"{_ways(outside)}."
    if spot.is_normed:  # what brings another network into its zone would only spoil the logits of this one
        remedy = ""
    loss, undecided = zones.temperature.start.loss, zones.temperature.curvatures[-1].loss
    if level != "ok" and loss > SATURATED * undecided:
        said += (
            f" The loss starts at {plain(loss)}; logits that decide nothing would have {plain(undecided)}."
        )
        size = float(f"{spread_of(spot.logits):.2g}")
        remedy = remedy or f"Start with logits that are smaller by a factor of {size:g}."
    elif level != "ok" and spot.is_normed:
        said += " With norms that is usual, and such networks train well all the same."
    numbers = spot.ground | {
        "excess of the start": start,
        "excess in the directions alone": zones.temperature.start.excess,
        "loss of the start": loss,
        "loss of undecided logits": undecided,
    }
    rows = tuple(row for axis in axes for row in _rows(axis))
    evidence = Evidence(numbers, rows, (zone_figure(zones),))
    return Finding("TH301", level, title, said, why=WHY_ZONE, remedy=remedy, evidence=evidence)


def without_softmax(spot: Spot, start: Curvature) -> Finding:
    """TH301 of any other loss than a cross-entropy."""
    excess = with_minus(start.t)
    return Finding(
        "TH301",
        "note",
        "No Goldilocks zone",
        f"The loss is not the cross-entropy of a softmax, so that a temperature has no meaning for it, nor "
        f"the Goldilocks zone. At {spot.where} the excess of positive curvature Tr(H)/‖H‖ of the start is "
        f"{excess}.",
        why=WHY_ZONE,
        evidence=Evidence(spot.ground | {"excess of the start": excess}),
    )


def _zones(axes: Sequence[Axis]) -> str:
    """Where the zones reach, and where their peaks are."""
    return "; ".join(
        f"along {AXES[axis.name]} it reaches {_reach(axis.zone)}, with a peak of {axis.peak.value:.2g} at "
        f"{_number(axis.zone.peak)}"
        for axis in axes
        if axis.zone is not None
    )


def _reach(zone: Zone) -> str:
    if math.isinf(zone.low) and math.isinf(zone.high):
        return "over all that was tried"
    if math.isinf(zone.low):
        return f"up to {_number(zone.high)}"
    if math.isinf(zone.high):
        return f"from {_number(zone.low)} on"
    return f"from {_number(zone.low)} to {_number(zone.high)}"


def _ways(axes: Sequence[Axis]) -> str:
    """How to get to the peak of each zone."""
    ways = []
    for axis in axes:
        assert axis.zone is not None
        at = axis.zone.peak
        if axis.name == "α":
            ways.append(f"multiply the initial weights and biases by α = {_number(at)}")
        elif at > 0:
            ways.append(f"divide the logits by T = {_number(at)}")
        else:
            ways.append(f"multiply the logits by 1/T = {_number(-at)}")
    said = ", or ".join(ways)
    return said[0].upper() + said[1:]


def _rows(axis: Axis) -> Iterator[Mapping[str, Value]]:
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
    """Ten to this, in two digits.

    >>> _number(-1.477), _number(2.5), _number(4.43)
    ('0.033', '320', '27,000')
    """
    value = float(f"{10**exponent:.2g}")
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
