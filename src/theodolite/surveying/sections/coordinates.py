"""Do the values in the network keep their size when it grows, without a plan and with one?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from theodolite.errors import UseError
from theodolite.figures import Figure, Panel, power_law, signed
from theodolite.planning import Plan
from theodolite.probes.coordinates import Coordinates, Parameterization, with_zero_readout
from theodolite.probes.following import Track, follow
from theodolite.probes.slopes import Slope
from theodolite.size import Size
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.section import Section
from theodolite.surveying.sections.plan import unmeasured, untried
from theodolite.surveying.site import Site
from theodolite.surveying.trials import LR, OPTIMIZER, Trials, Untried
from theodolite.surveying.wording import counted, times

STEPS = 3
SEEDS, DEEP_SEEDS = 1, 3
TOLERANCE, NOISE = 0.4, 1.75
"""On a slope, and on the factor between the smallest size and the largest. At base depth 2 each branch still
weighs as much as the stream, which bends slopes by 0.2 or 0.3 where larger sizes are straight."""
JUDGED = ("stream", "change of stream", "change of logits")
"""What a single branch adds is noisier, and for the table."""
TITLES: Mapping[Level, str] = {
    "ok": "Values that keep their size",
    "note": "Values that change with the network's size",
    "warn": "Values that change with the size under a plan too",
}
WHY = (
    "If the stream, or what one step does to it and to the logits, grows with width or depth, the larger "
    "network trains as if with a larger learning rate, until it diverges; if it shrinks, the larger network "
    "stops learning features. Hyperparameters carry over where all of these stay, and where each of L "
    "branches adds 1/L."
)


@dataclass(frozen=True)
class Check:
    """The same sizes without a plan and with one."""

    standard: Coordinates
    planned: Coordinates


def examine(site: Site) -> Iterator[Finding]:
    """TH201."""
    try:
        trials = site.trials
    except Untried as error:
        yield untried(error)
    else:
        try:
            check = measure(trials)
        except UseError as error:
            yield unmeasured("TH201", TITLES["ok"], WHY, error)
        else:
            yield coordinates_kept(check)


def measure(trials: Trials) -> Check:
    """Train each size for a few steps and look at its values."""
    at_base = _tracks(trials, [trials.standard(trials.base)])  # there the plan changes nothing
    larger = (*trials.widths, *trials.depths)

    def grown(how: Parameterization, make: Callable[[Size], Plan]) -> Coordinates:
        tracks = (*at_base, *_tracks(trials, [make(size) for size in larger]))
        return Coordinates(how, OPTIMIZER, LR, trials.base, STEPS, tracks)

    return Check(grown("standard", trials.standard), grown("plan", trials.planned))


def coordinates_kept(check: Check) -> Finding:
    """TH201: which values grow or shrink with the size."""
    said, axes = [], _axes(check.standard)
    for axis in axes:
        bent = [slope for slope in _bent(check.standard) if slope.axis == axis]
        if bent:
            said.append(_in_words(bent[0], "Without a plan"))
    level: Level = "note" if said else "ok"
    remedy = ""
    left = _bent(check.planned)
    if left:
        level = "warn"
        said.append(_in_words(left[0], "Under a plan"))
        remedy = (
            "Survey again with --deep to rule out noise; then look at what the network does to its stream "
            "that no tensor's learning rate can mend, such as a scale in the forward pass."
        )
    elif said:
        remedy = (
            "Train larger networks under th.plan(build, inputs, size=…, base=…, lr=…): plan.build(), "
            "plan.optimizer(model)."
        )
    if not left:
        who = "The plan keeps" if said else "Without a plan and with one, the network keeps"
        said.append(f"{who} them all (steepest slope off by {signed(_steepest(check.planned))}).")
    numbers: dict[str, Value] = {
        "optimizer": OPTIMIZER,
        "learning rate": LR,
        "steps": STEPS,
        "seeds": len({track.seed for track in check.planned.tracks}),
    }
    evidence = Evidence(numbers, tuple(_rows(check)), tuple(_figure(check, axis) for axis in axes))
    return Finding("TH201", level, TITLES[level], " ".join(said), why=WHY, remedy=remedy, evidence=evidence)


def _tracks(trials: Trials, plans: Sequence[Plan]) -> list[Track]:
    seeds = range(trials.seed, trials.seed + (DEEP_SEEDS if trials.site.deep else SEEDS))
    silent = [with_zero_readout(plan) for plan in plans]
    return [follow(trials.workload, plan, seed=seed, steps=STEPS) for plan in silent for seed in seeds]


def _axes(found: Coordinates) -> list[str]:
    return list(dict.fromkeys(slope.axis for slope in found.slopes))


def _bent(found: Coordinates) -> list[Slope]:
    """The slopes that are wrong beyond noise, the worst first."""
    return [
        slope
        for slope in found.bent(TOLERANCE)
        if slope.quantity in JUDGED
        and not slope.within(max(TOLERANCE, math.log(NOISE) / math.log(_growth(found, slope.axis))))
    ]


def _growth(found: Coordinates, axis: str) -> float:
    sizes, _ = _points(found, "logits", axis)
    return max(sizes) / min(sizes)


def _in_words(slope: Slope, how: str) -> str:
    if not math.isfinite(slope.value):
        return f"{how}, the training diverges as the {slope.axis} grows."
    wanted = f" where {signed(slope.expected)} is wanted" if slope.expected else ""
    return (
        f"{how}, after {counted(STEPS, 'step')} of training the {slope.quantity} goes as the {slope.axis} to "
        f"the {signed(slope.value)}{wanted}: ×{times(slope.at_ten_times)} at 10× the {slope.axis}."
    )


def _steepest(found: Coordinates) -> float:
    judged = (slope.excess for slope in found.slopes if slope.quantity in JUDGED)
    return max((excess for excess in judged if math.isfinite(excess)), key=abs, default=0.0)


def _rows(check: Check) -> Iterator[Mapping[str, Value]]:
    """The slopes of everything, with width and with depth."""
    rows: dict[str, dict[str, Value]] = {}
    columns: list[str] = []
    for how, found in (("", check.standard), (", plan", check.planned)):
        for slope in found.slopes:
            if slope.quantity != "logits":
                row = rows.setdefault(slope.quantity, {})
                known = math.isfinite(slope.value)
                row[f"{slope.axis}{how}"] = round(slope.value, 2) if known else None
                columns.append(f"{slope.axis}{how}")
                if slope.axis == "depth":
                    row["depth, wanted"] = slope.expected
                    columns.append("depth, wanted")
    ordered = sorted(dict.fromkeys(columns), key=lambda column: "depth" in column)
    for quantity, row in rows.items():
        yield {"slope of": quantity, **{column: row[column] for column in ordered}}


def _figure(check: Check, axis: str) -> Figure:
    panels: list[Panel] = []
    words: list[str] = []
    quantity = (
        "stream" if any(slope.quantity == "stream" for slope in check.planned.slopes) else "change of logits"
    )
    lines = {how: _points(found, quantity, axis) for how, found in _by_how(check)}
    values = [value for _, y in lines.values() for value in y if math.isfinite(value) and value > 0]
    bounds = (min(values) / 1.6, max(values) * 1.6) if values else (0.1, 10.0)
    for how, found in _by_how(check):
        slope = next(one for one in found.slopes if (one.quantity, one.axis) == (quantity, axis))
        x, y = lines[how]
        if all(math.isfinite(value) and value > 0 for value in y):
            panels.append(
                power_law(f"{quantity}, {how}", x, y, x_title=axis, slope=slope.value, y_range=bounds)
            )
        words.append(f"{how}: slope {signed(slope.value)}")
    return Figure(
        caption=f"Root mean square of the {quantity} after {counted(STEPS, 'step')} against the {axis}, on "
        "logarithmic axes. Dotted: what it should do.",
        alt=f"{quantity} against {axis}; " + "; ".join(words),
        panels=tuple(panels),
    )


def _by_how(check: Check) -> tuple[tuple[str, Coordinates], ...]:
    return ("without a plan", check.standard), ("under a plan", check.planned)


def _points(found: Coordinates, quantity: str, axis: str) -> tuple[list[float], list[float]]:
    """Sizes along an axis from the base, and the mean over seeds of the quantity after the last step."""
    along: dict[float, list[float]] = {}
    for track in found.tracks:
        width, depth = track.size.width, track.size.depth
        at, other, same = (
            (width, depth, found.base.depth) if axis == "width" else (depth, width, found.base.width)
        )
        if other == same:
            along.setdefault(at, []).append(track.values[quantity][-1])
    return list(along), [sum(values) / len(values) for values in along.values()]


section = Section("Coordinate check", 60, examine, measures=True)
