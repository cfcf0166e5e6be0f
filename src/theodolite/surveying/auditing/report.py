"""`Audit`: what was read, how it goes with size, what is wrong, and what a few steps of training say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from theodolite.core.errors import UseError
from theodolite.core.files import plain, read_dataclass
from theodolite.core.size import Size
from theodolite.present.figure import Figure, Panel, frame, line
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Column, Table, counted
from theodolite.probes.scaling.coordinates import Coordinates, Slope
from theodolite.probes.scaling.small_gradients import NEAR_EPS
from theodolite.probes.scaling.spectral import Condition, Spectral, SpectralRow
from theodolite.surveying.auditing.exponents import ATOL, Axis, Exponent, TensorScaling
from theodolite.surveying.auditing.faults import lone_decay_excess, start_excess, step_excess, steps_limited
from theodolite.surveying.auditing.phrases import brief, power_of
from theodolite.surveying.auditing.verdicts import UNTRAINED
from theodolite.surveying.finding import LEVELS, Finding, Level, times

BENT, BROKEN = 0.35, 0.4
"""Exponents of activations, and of tensors and their steps, from which training says that something is off:
after a few steps, small networks are a few tenths away from the limit of large ones."""
CLEAR = {"width": 0.45, "depth": 0.7}
"""By axis: the exponent from which one of the two checks suffices to say that reading and training disagree.
Depths of a few blocks are further from the limit of many."""
FEWEST_ENTRIES = 100
"""The start of a smaller tensor is chance."""
MOST_PANELS = 12
WORST: tuple[Level, ...] = ("fail", "warn")


@dataclass(frozen=True)
class Audit(Result):
    """A parameterization that somebody wrote by hand, beside the rules. Made by `audit`."""

    kind: ClassVar[str] = "audit"
    loads: ClassVar[bool] = True

    workload: str
    base: Size
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    width: tuple[TensorScaling, ...]
    """How each kind of tensor goes with width; empty if one width was read."""
    depth: tuple[TensorScaling, ...]
    """The same with depth."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    coordinates: Coordinates | None = None
    """Of a few steps of training in this parameterization; None without training."""
    spectral: tuple[Spectral, ...] = ()
    """The widest and the deepest network against the one of base size."""

    def at(self, level: Level) -> tuple[Finding, ...]:
        """The findings of one level."""
        return tuple(finding for finding in self.findings if finding.level == level)

    @property
    def ranked(self) -> tuple[Finding, ...]:
        """The findings, most serious first."""
        return tuple(sorted(self.findings, key=lambda finding: -LEVELS.index(finding.level)))

    @property
    def right(self) -> bool:
        """Was something judged by reading, and nothing wrong?"""
        return bool(self.width or self.depth) and not (self.at("warn") or self.at("fail"))

    @property
    def verdict(self) -> str:
        """One sentence."""
        wrong = [*self.at("fail"), *self.at("warn")]
        along = " and ".join(self._axes)
        if wrong:
            codes = ", ".join(dict.fromkeys(finding.code for finding in wrong))
            count = counted(len(wrong), "mistake")
            return f"{self.workload}: {count} in the parameterization ({codes})."
        if not (self.width or self.depth):
            still = any(finding.title == UNTRAINED for finding in self.at("note"))
            why = "it has no learning rate" if still else "no rule is known for its optimizer"
            return f"{self.workload}: nothing could be judged, as {why}."
        notes = f" Read {counted(len(self.at('note')), 'note')} first." if self.at("note") else ""
        return f"{self.workload}: the parameterization is right along {along}.{notes}"

    @property
    def title(self) -> str:
        """The heading of its page."""
        return self.verdict

    @property
    def facts(self) -> str:
        """What was compared, in one line."""
        said = []
        if self.width:
            said.append(f"widths {', '.join(map(str, self.widths))}")
        if self.depth:
            said.append(f"depths {', '.join(map(str, self.depths))}")
        rules = dict.fromkeys(one.rule for one in self.width or self.depth)
        against = f", held against the {'rule' if len(rules) == 1 else 'rules'} of {' and '.join(rules)}"
        return "; ".join([f"base {self.base}", *said]) + (against if rules else "")

    @property
    def trained(self) -> tuple[str, ...]:
        """What a few steps of training say, one sentence each; empty without training."""
        said = []
        if self.coordinates is not None:
            said.append(_of_coordinates(self.coordinates))
        passed = _passed_starts([*self.width, *self.depth])
        conditions = [_without(one, self.width) for one in self.spectral]
        said += [_of_spectral(one, passed) for one in conditions]
        if not said:
            return ()
        mistakes = [one for one in (*self.at("fail"), *self.at("warn")) if one.code != "TH208"]
        by_values, by_tensors = doubts = _doubts(self.coordinates, conditions, passed)
        clear = any(excess >= CLEAR[axis] for axis, excess in (*by_values, *by_tensors))
        if self.right and (clear or all(doubts)):
            said.append(
                "Reading and training disagree: every number that was read is right, and yet values or "
                "steps change with size. Something else depends on it: a norm that is missing, a number in "
                "the forward pass that the trace does not show, eps, or a learning rate that is too large."
            )
        if mistakes and not any(doubts):
            said.append(
                "What is wrong by its exponents does not show in these few steps at these sizes. It grows "
                "with size."
            )
        return tuple(said)

    @property
    def _axes(self) -> tuple[Axis, ...]:
        held: tuple[tuple[Axis, Sequence[TensorScaling]], ...] = (
            ("width", self.width),
            ("depth", self.depth),
        )
        return tuple(axis for axis, scalings in held if scalings)

    def blocks(self) -> Iterator[Block]:
        """The verdict, the findings, the tensors along each axis, and what training says."""
        yield f"{self.verdict}\n{self.facts}"
        rows: list[tuple[str, str, str]] = []
        for finding in self.ranked:
            rows.append((finding.level, finding.code, finding.sentence))
            if finding.remedy and finding.level != "ok":
                rows.append(("", "", f"→ {finding.remedy}"))
        yield Table(("level", "code", "finding"), rows)
        for axis in self._axes:
            yield Heading(f"Along the {axis}")
            yield axis_table(getattr(self, axis), axis)
            figure = _figure(getattr(self, axis), axis)
            if figure.panels:
                yield figure
        if self.trained:
            yield Heading("A few steps of training")
            yield "\n".join(self.trained)
        yield from self.notes

    def table(self) -> Table:
        """A row for each kind of tensor and axis, numbers in full."""
        columns = (
            *("axis", "tensor", "role", "optimizer", "rule", "lr goes as", "lr by the rule"),
            *("init goes as", "init by the rule", "lr × decay goes as", "lr × decay by the rule"),
            *("eps goes as", "eps by the rule", "multiplier goes as", "steps at 10×", "start at 10×"),
        )
        rows = []
        for axis in self._axes:
            for one in getattr(self, axis):
                powers = [one.exponent(name) for name in ("lr", "init", "decay", "eps")]
                numbers = [value for power in powers for value in (power.own, power.rule)]
                off = (10.0 ** step_excess(one), 10.0 ** start_excess(one))
                rows.append(
                    (axis, one.name, one.role, one.class_name, one.rule, *numbers, one.multiplied, *off)
                )
        return Table(columns, rows)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values, and the verdict."""
        return plain(dataclasses.replace(self, findings=(), coordinates=None, spectral=())) | {
            "verdict": self.verdict,
            "trained": list(self.trained),
            "findings": [finding.to_dict() for finding in self.findings],
            "coordinates": None if self.coordinates is None else self.coordinates.to_dict(),
            "spectral": [one.to_dict() for one in self.spectral],
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The audit from what `to_dict` gave."""
        facts = {key: value for key, value in content.items() if key not in ("verdict", "trained")}
        inner = {key: facts.get(key) for key in ("findings", "coordinates", "spectral")}
        if not isinstance(inner["findings"], list) or not isinstance(inner["spectral"], list):
            raise UseError("the audit has no list of findings, or none of spectral conditions")
        bare: Self = read_dataclass(
            cls, {**facts, "findings": [], "coordinates": None, "spectral": []}, "the audit"
        )
        found = inner["coordinates"]
        return dataclasses.replace(
            bare,
            findings=tuple(map(Finding.from_dict, inner["findings"])),
            coordinates=None if found is None else Coordinates.from_dict(found),
            spectral=tuple(map(Spectral.from_dict, inner["spectral"])),
        )


def axis_table(scalings: Sequence[TensorScaling], axis: Axis) -> Table:
    """The table of one axis: own exponents, those of the rule where they differ, and the effect."""
    several = len({one.class_name for one in scalings}) > 1
    rows = []
    for one in scalings:
        lr = one.exponent("lr")
        rows.append(
            (
                one.name,
                one.class_name if several else None,
                brief(lr.own),
                brief(lr.rule),
                _beside(one.exponent("init")) if all(one.init.own) else "zeros",
                _beside(one.exponent("decay")) if one.decay is not None else None,
                _beside(one.exponent("eps")) if one.eps is not None else None,
                _multiplier(one),
                _effect(one),
            )
        )
    names = (f"lr as {axis}^", "rule says", "init", "lr·decay", "eps", "forward")
    numbers = [Column(name, side="right") for name in names]
    return Table(("tensor", "optimizer", *numbers, f"at 10× {axis}"), rows)


def _beside(exponent: Exponent) -> str:
    """An exponent, and that of the rule if it is another."""
    if math.isnan(exponent.own):
        return "?"
    if abs(exponent.excess) <= ATOL:
        return brief(exponent.own)
    return f"{brief(exponent.own)} ({brief(exponent.rule)})"


def _multiplier(one: TensorScaling) -> str | None:
    said = [brief(one.multiplied)] if abs(one.multiplied) > ATOL else []
    if one.readout is not None:
        said.append(f"readout {_beside(one.exponent('readout'))}")
    return ", ".join(said) or None


def _effect(one: TensorScaling) -> str:
    """`steps 10× too large`; of the decay only what the learning rate does not bring right with it."""
    by_factor: dict[str, list[str]] = {}
    for what, excess, noise in (
        ("start", start_excess(one), one.noise),
        ("steps", step_excess(one), 0.0),
        ("decay", lone_decay_excess(one, one.exponent("lr").excess), 0.0),
        ("logits", one.exponent("readout").excess, 0.0),
    ):
        if abs(excess) > ATOL + noise:
            size = "large" if excess > 0 else "small"
            by_factor.setdefault(f"{times(10 ** abs(excess))}× too {size}", []).append(what)
    said = [f"{' and '.join(what)} {factor}" for factor, what in by_factor.items()]
    if steps_limited(one, NEAR_EPS, 10.0):
        said.append("limited by eps")
    return ", ".join(said) or "right"


def _bent(checked: Coordinates) -> tuple[Slope, ...]:
    """Slopes that say that something grows with size, or that changes vanish with width.

    The stream falls with depth in right networks too, while the branches of the start are a part of it.
    """

    def counts(slope: Slope) -> bool:
        vanishes = slope.axis == "width" and slope.quantity.startswith("change")
        return not math.isfinite(slope.value) or slope.excess > 0 or vanishes

    return tuple(slope for slope in checked.bent(BENT) if counts(slope))


Doubts = tuple[tuple[Axis, float], ...]
"""Axes and exponents that are off along them."""


def _doubts(
    checked: Coordinates | None, conditions: Sequence[Spectral], passed: frozenset[str]
) -> tuple[Doubts, Doubts]:
    """What is off by the coordinate check, and by the spectral condition."""
    bent = _bent(checked) if checked is not None else ()
    slopes = [(one.axis, abs(one.excess) if math.isfinite(one.excess) else math.inf) for one in bent]
    powers: list[tuple[Axis, float]] = []
    for one in conditions:
        axis: Axis = "width" if one.size.width != one.base.width else "depth"
        powers += [(axis, math.inf)] * (not one.finite)
        powers += [(axis, abs(one.exponent(off))) for _, _, off in _broken(one, passed)]
    return tuple(slopes), tuple(powers)


def _of_coordinates(checked: Coordinates) -> str:
    """The coordinate check in a sentence."""
    after = f"After {counted(checked.steps, 'step')}"
    bent = _bent(checked)
    if not bent:
        return f"{after}, activations keep their size (coordinate check: no slope is off by {BENT:g})."
    worst = bent[0]
    if not math.isfinite(worst.value):
        return f"{after}, a run diverged: {worst.quantity} against {worst.axis} (coordinate check)."
    return (
        f"{after}, {worst.quantity} goes as {power_of(worst.axis, worst.value)} instead of "
        f"{power_of(worst.axis, worst.expected)}: × {times(worst.at_ten_times)} at ten times the "
        f"{worst.axis} (coordinate check; {len(bent)} of {len(checked.slopes)} slopes "
        f"{'is' if len(bent) == 1 else 'are'} off)."
    )


def _without(checked: Spectral, scalings: Sequence[TensorScaling]) -> Spectral:
    """The spectral condition without queries and keys whose multipliers it has not seen."""
    names = {name for one in scalings if one.is_query_or_key for name in one.tensors}
    unseen = {row.pattern for row in checked.rows if row.name in names}
    return dataclasses.replace(checked, rows=tuple(row for row in checked.rows if row.pattern not in unseen))


def _passed_starts(scalings: Sequence[TensorScaling]) -> frozenset[str]:
    """Tensors that start at another size than the rule's, which reading lets pass as harmless."""
    return frozenset(
        name
        for one in scalings
        if abs(one.exponent("init").excess) > ATOL and not abs(start_excess(one)) > ATOL + one.noise
        for name in one.tensors
    )


def _broken(checked: Spectral, passed: frozenset[str]) -> list[tuple[str, SpectralRow, float]]:
    """What breaks the spectral condition, and by which factor: of the start and of the steps the worst.

    Not the start of tensors that reading let pass.
    """
    found = []
    harmless = {row.pattern for row in checked.rows if row.name in passed}
    conditions: tuple[tuple[Condition, str], ...] = (("start", "the start"), ("step", "the steps"))
    for condition, what in conditions:
        rows = [row for row in checked.broken(condition, BROKEN) if row.entries >= FEWEST_ENTRIES]
        if condition == "start":
            rows = [row for row in rows if row.pattern not in harmless]
        if rows:
            worst = max(rows, key=lambda row: abs(math.log(row.off(condition))))
            found.append((what, worst, worst.off(condition)))
    return found


def _of_spectral(checked: Spectral, passed: frozenset[str]) -> str:
    """The spectral condition in a sentence."""
    which = f"From {checked.base} to {checked.size}"
    if not checked.finite:
        return f"{which}, training diverges."
    found = _broken(checked, passed)
    if not found:
        return (
            f"{which}, tensors and steps keep their size (spectral condition: no exponent is off by "
            f"{BROKEN:g})."
        )
    said = [
        f"{what} of {row.name} {'is' if what == 'the start' else 'are'} {times(max(off, 1 / off))} times too "
        f"{'large' if off > 1 else 'small'}"
        for what, row, off in found
    ]
    return f"{which}, {' and '.join(said)} (spectral condition)."


def _figure(scalings: Sequence[TensorScaling], axis: Axis) -> Figure:
    """Learning rate, or initial size, against the rule: a panel for each tensor that is off."""
    panels, words = [], []
    for one in scalings:
        for name, wrong, series in (
            ("learning rate", abs(step_excess(one)) > ATOL, one.lr),
            ("initial size", abs(start_excess(one)) > ATOL + one.noise, one.init),
        ):
            if wrong:
                panels.append(_panel(f"{one.name}: {name}", one.sizes, series.own, series.rule, axis))
                power = series.exponent(one.growth)
                words.append(
                    f"{name} of {one.name} as {power_of(axis, power.own)}, rule {power_of(axis, power.rule)}"
                )
    return Figure(
        caption=f"What is off, against {axis}, on logarithmic axes. Dotted: what the rule makes of the value "
        f"at base size.{'' if len(panels) <= MOST_PANELS else f' The first {MOST_PANELS} of {len(panels)}.'}",
        alt="; ".join(words),
        panels=tuple(panels[:MOST_PANELS]),
    )


def _panel(title: str, x: Sequence[int], own: Sequence[float], rule: Sequence[float], axis: Axis) -> Panel:
    """Own values and those of the rule on two logarithmic axes."""
    layout = frame(height=190, x=axis)
    pad = 0.08 * (math.log10(max(x)) - math.log10(min(x)))
    layout["xaxis"] |= {
        "type": "log",
        "tickvals": list(x),
        "ticktext": [f"{value:g}" for value in x],
        "range": [math.log10(min(x)) - pad, math.log10(max(x)) + pad],
    }
    values = [value for value in (*own, *rule) if value > 0 and math.isfinite(value)]
    low, high = (math.log10(bound) for bound in (min(values) / 1.3, max(values) * 1.3))
    ends = sorted({float(f"{value:.2g}") for value in (min(values), max(values))})
    layout["yaxis"] |= {
        "type": "log",
        "range": [low, high],
        "tickvals": ends,
        "ticktext": [f"{tick:g}" for tick in ends],
    }
    points = line(x, own, hover=f"{axis} %{{x}}: %{{y:.4g}}", markers=7)
    return Panel(title, (line(x, rule), points), layout)
