"""Do activations keep their size when the network grows, without a plan and with one?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from theodolite.core.size import Size
from theodolite.planning import Plan
from theodolite.planning.parameterization import Parameterization
from theodolite.present.figure import Figure, Panel, power_law
from theodolite.present.text import counted, signed
from theodolite.probes.scaling.coordinates import Coordinates, Slope, worst_first
from theodolite.probes.scaling.first_steps import LAYER, Track, follow_from_zero
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Level, Value, times
from theodolite.surveying.section import Section, measuring
from theodolite.surveying.trials import LR, OPTIMIZER, TRAINED, Trials, trials_of

STEPS = 3
SEEDS, DEEP_SEEDS = 1, 3
"""No network is said to be wrong on one seed: where one finds a fault, the others are measured too."""
SURE, TOLERANCE, NOISE = 0.3, 0.4, 1.75
"""A slope is right up to `SURE` and wrong beyond `TOLERANCE`, or beyond the factor `NOISE` between the
smallest size and the largest, whichever is more. Between the two it is not known: at base depth 2 each branch
still has as much weight as the stream, which changes slopes by 0.2 or 0.3."""
WHOLE = ("stream", "change of stream", "change of logits")
"""The quantities that a sentence names first; branches and layers are parts of the network."""
Verdict = Literal["kept", "bent", "not known"]
SIZES = Check(
    "TH201",
    "Activations that keep their size",
    "If the stream, or the change that one step makes in it or in the logits, grows with width or depth, the "
    "larger network trains as if with a larger learning rate, until it diverges. If it shrinks, the larger "
    "network stops learning features. Hyperparameters carry over if all of these stay constant and each of L "
    "branches adds 1/L.",
)
TITLES: Mapping[Level, str] = {
    "note": "Activations that change with the network's size",
    "warn": "Activations that change with the size even under a plan",
}
REMEDIES: Mapping[Verdict, str] = {
    "kept": "Train larger networks under th.plan(build, inputs, size=…, base=…, lr=…): plan.build(), "
    "plan.optimizer(model).",
    "bent": "Survey again with --deep to rule out noise. Then look for an operation on the stream that no "
    "learning rate can correct, such as a scale in the forward pass.",
    "not known": "Survey again with --deep, which uses three seeds and larger sizes, or run "
    "th.probes.coordinates with more seeds on sizes that are further apart.",
}
"""By what is true under a plan."""


@dataclass(frozen=True)
class CoordinatePair:
    """The same sizes without a plan and with one."""

    standard: Coordinates
    planned: Coordinates


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH201."""
    trials = trials_of(context)
    seeds = DEEP_SEEDS if context.deep else SEEDS
    with measuring(SIZES):
        pair = measure(trials, range(trials.seed, trials.seed + seeds))
        if seeds < DEEP_SEEDS and any(math.isfinite(slope.value) for slope in _with(pair.planned, "bent")):
            more = measure(trials, range(trials.seed + seeds, trials.seed + DEEP_SEEDS))
            pair = CoordinatePair(_joined(pair.standard, more.standard), _joined(pair.planned, more.planned))
    yield trials.noted(coordinates_kept(pair))


def measure(trials: Trials, seeds: Sequence[int]) -> CoordinatePair:
    """Train each size for a few steps and measure its activations."""
    at_base = _tracks(trials, [trials.standard(trials.base)], seeds)  # there the plan changes nothing

    def grown(how: Parameterization, make: Callable[[Size], Plan]) -> Coordinates:
        tracks = (*at_base, *_tracks(trials, [make(size) for size in trials.larger], seeds))
        return Coordinates(how, OPTIMIZER, LR, trials.base, STEPS, tracks)

    return CoordinatePair(grown("standard", trials.standard), grown("plan", trials.planned))


def _joined(one: Coordinates, other: Coordinates) -> Coordinates:
    return dataclasses.replace(one, tracks=(*one.tracks, *other.tracks))


def coordinates_kept(pair: CoordinatePair) -> Finding:
    """TH201: which values grow or shrink with the size."""
    axes = list(dict.fromkeys(slope.axis for slope in pair.standard.slopes))
    bent = [slope for axis in axes for slope in _with(pair.standard, "bent", axis)[:1]]
    doubts = [slope for axis in axes for slope in _with(pair.standard, "not known", axis)[:1]]
    left, unsure = _with(pair.planned, "bent"), _with(pair.planned, "not known")
    level: Level = "warn" if left else "note" if bent or doubts or unsure else "ok"
    said = [_in_words(slope, "Without a plan", pair.standard) for slope in bent]
    if not bent:
        said += [_in_doubt(slope, "without a plan", pair.standard) for slope in doubts[:1]]
    if left:
        said.append(_in_words(left[0], "Under a plan", pair.planned))
    elif unsure:
        said.append(_in_doubt(unsure[0], "under a plan", pair.planned))
    else:
        who = "Under a plan" if level == "note" else "Without a plan and with one"
        excesses = (slope.excess for slope in _judged(pair.planned))
        steepest = max((excess for excess in excesses if math.isfinite(excess)), key=abs, default=0.0)
        said.append(f"{who}, all activations keep their size (largest error of a slope {signed(steepest)}).")
    if left:
        remedy = REMEDIES["bent"]
    elif unsure or (doubts and not bent):
        remedy = REMEDIES["not known"]
    else:
        remedy = REMEDIES["kept"] if bent else ""
    return SIZES.finding(
        level,
        " ".join(said),
        title=TITLES.get(level, ""),
        remedy=remedy,
        numbers=TRAINED | {"steps": STEPS, "seeds": _seeds(pair.planned)},
        rows=_rows(pair),
        figures=[_figure(pair, axis) for axis in axes],
    )


def verdict(slope: Slope, growth: float) -> Verdict:
    """Does a value keep its size, over sizes that differ by a factor? A wide interval leaves that open.

    >>> verdict(Slope("stream", "width", 0.1, 0.05, 0.15, expected=0.0), growth=4.0)
    'kept'
    >>> verdict(Slope("stream", "width", 0.1, -0.5, 0.7, expected=0.0), growth=4.0)
    'not known'
    """
    if not math.isfinite(slope.value):
        return "bent"
    limit = max(TOLERANCE, math.log(NOISE) / math.log(growth))
    low, high = (end - slope.expected for end in (slope.low, slope.high))
    has_interval = math.isfinite(low) and math.isfinite(high)
    if not slope.within(limit):
        return "not known" if has_interval and low <= 0 <= high else "bent"
    wide = has_interval and not -limit <= low <= high <= limit
    return "kept" if slope.within(SURE) and not wide else "not known"


def _tracks(trials: Trials, plans: Sequence[Plan], seeds: Sequence[int]) -> list[Track]:
    return [
        follow_from_zero(trials.workload, plan, seed=seed, steps=STEPS, lone=trials.lone(plan.size))
        for plan in plans
        for seed in seeds
    ]


def _judged(found: Coordinates) -> list[Slope]:
    return [slope for slope in found.slopes if slope.judged]


def _with(found: Coordinates, wanted: Verdict, axis: str | None = None) -> list[Slope]:
    """The slopes of a verdict: those of the whole network first, the worst first."""
    slopes = (slope for slope in _judged(found) if axis in (None, slope.axis))
    chosen = worst_first(one for one in slopes if verdict(one, _growth(found, one.axis)) == wanted)
    return sorted(chosen, key=lambda slope: slope.quantity not in WHOLE)


def _seeds(found: Coordinates) -> int:
    return len({track.seed for track in found.tracks})


def _growth(found: Coordinates, axis: str) -> float:
    sizes, _ = _points(found, "logits", axis)
    return max(sizes) / min(sizes)


def _in_words(slope: Slope, how: str, found: Coordinates) -> str:
    if not math.isfinite(slope.value):
        return f"{how}, training diverges as the {slope.axis} grows."
    growth = _growth(found, slope.axis)
    return (
        f"{how}, after {counted(STEPS, 'training step')} the {_named(slope)} {_verb(slope)} as the "
        f"{slope.axis} to the power {signed(slope.value)}{_wanted(slope)}: ×{times(growth**slope.excess)} at "
        f"{growth:g}× the {slope.axis}."
    )


def _in_doubt(slope: Slope, how: str, found: Coordinates) -> str:
    interval = f" ({signed(slope.low)} to {signed(slope.high)})" if math.isfinite(slope.low) else ""
    return (
        f"It is not known whether the {_named(slope)} keeps its size {how}: it {_verb(slope)} as the "
        f"{slope.axis} to the power {signed(slope.value)}{interval}{_wanted(slope)}, and "
        f"{counted(_seeds(found), 'seed')} on sizes up to {_growth(found, slope.axis):g}× the {slope.axis} "
        "cannot tell this from the right value."
    )


def _wanted(slope: Slope) -> str:
    return f" instead of {signed(slope.expected)}" if slope.expected else ""


def _verb(slope: Slope) -> str:
    return "grows" if slope.value > 0 else "falls"


def _named(slope: Slope) -> str:
    return slope.quantity.replace(LAYER, "output of ")


def _rows(pair: CoordinatePair) -> list[dict[str, Value]]:
    """The slopes of everything that is judged, with width and then with depth."""
    rows: dict[str, dict[str, Value]] = {}
    for axis in ("width", "depth"):
        for how, found in (("", pair.standard), (", plan", pair.planned)):
            for slope in (one for one in _judged(found) if one.axis == axis):
                row = rows.setdefault(slope.quantity, {"slope of": slope.quantity})
                row[f"{axis}{how}"] = round(slope.value, 2) if math.isfinite(slope.value) else None
                if axis == "depth":
                    row["depth, wanted"] = slope.expected
    return list(rows.values())


def _figure(pair: CoordinatePair, axis: str) -> Figure:
    panels: list[Panel] = []
    words: list[str] = []
    has_stream = any(slope.quantity == "stream" for slope in pair.planned.slopes)
    quantity = "stream" if has_stream else "change of logits"
    both = (("without a plan", pair.standard), ("under a plan", pair.planned))
    lines = {how: _points(found, quantity, axis) for how, found in both}
    values = [value for _, y in lines.values() for value in y if math.isfinite(value) and value > 0]
    bounds = (min(values) / 1.6, max(values) * 1.6) if values else (0.1, 10.0)
    for how, found in both:
        slope = next(one for one in found.slopes if (one.quantity, one.axis) == (quantity, axis))
        x, y = lines[how]
        if all(math.isfinite(value) and value > 0 for value in y):
            panels.append(
                power_law(f"{quantity}, {how}", x, y, x_title=axis, slope=slope.value, y_range=bounds)
            )
        words.append(f"{how}: slope {signed(slope.value)}")
    return Figure(
        caption=f"Root mean square of the {quantity} after {counted(STEPS, 'step')} against the {axis}, on "
        "logarithmic axes. Dotted: what it should be.",
        alt=f"{quantity} against {axis}; " + "; ".join(words),
        panels=tuple(panels),
    )


def _points(found: Coordinates, quantity: str, axis: str) -> tuple[list[float], list[float]]:
    """Sizes along an axis from the base, and the mean over seeds of the quantity after the last step."""
    along: dict[float, list[float]] = {}
    other = "depth" if axis == "width" else "width"
    for track in found.tracks:
        if getattr(track.size, other) == getattr(found.base, other):
            along.setdefault(getattr(track.size, axis), []).append(track.values[quantity][-1])
    return list(along), [sum(values) / len(values) for values in along.values()]


section = Section("Coordinate check", 60, examine, measures=True)
