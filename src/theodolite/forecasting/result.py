"""A `Forecast`: the loss of a run that was not made yet, dated and sealed with a hash."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from theodolite.core.errors import UseError
from theodolite.core.files import plain
from theodolite.core.size import Size, rounded
from theodolite.fits import plots
from theodolite.fits.result import FitEstimate
from theodolite.forecasting.law import LEVEL, Coverage, LossInterval
from theodolite.forecasting.runs import SizedRun
from theodolite.present.figure import ACCENT, Figure, Panel
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted, duration, number

SEALS = ("digest", "digests")


@dataclass(frozen=True)
class Alternative:
    """What else the budget could buy, or another way to train the same network."""

    what: str
    parameters: FitEstimate
    tokens: FitEstimate
    loss: LossInterval


@dataclass(frozen=True)
class CurvePoint:
    """The law between the smallest run and the target."""

    flop: float
    loss: LossInterval


@dataclass(frozen=True)
class Forecast(Result):
    """The loss of a run at a size that was not trained yet. Made by `theodolite.forecast`.

    `save("forecast.json")` before the target is run; `theodolite forecast check` compares afterwards.
    """

    kind: ClassVar[str] = "forecast"
    loads: ClassVar[bool] = True

    workload: str
    target: Size
    lr: float
    """The base learning rate, of the runs and of the target."""
    settings: Mapping[str, Any]
    """What the target has to share with the runs."""
    parameters: int
    """Of the target."""
    tokens: int
    """Targets that it sees in training."""
    loss: LossInterval
    """The held-out loss of one run, with the calibrated interval."""
    raw: LossInterval
    """The same with the interval of the law alone."""
    coverage: Coverage
    form: str
    equation: str
    constants: Mapping[str, FitEstimate]
    flop: float
    """Of the target's training."""
    extrapolation: float
    """The target's FLOP over that of the largest run."""
    tflops: float | None
    """Achieved TFLOP/s, if they were given."""
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]
    runs: tuple[SizedRun, ...] = field(repr=False)
    """The runs that the law goes through."""
    curve: tuple[CurvePoint, ...] = field(repr=False)
    date: str
    """When it was made, in UTC."""
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    """By name of a field, the first digits of the SHA-256 of its content."""
    digest: str = ""
    """SHA-256 of all fields."""

    def sealed(self) -> Forecast:
        """With the digests of its content."""
        digests = digests_of(self.to_dict())
        return replace(self, digests=digests, digest=digest_of(self.to_dict(), digests))

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The forecast from its content, which must match its digests."""
        require_unedited(content)
        return super().from_dict(content)

    @property
    def hours(self) -> float | None:
        """Of training the target at the given speed."""
        return None if self.tflops is None else self.flop / (self.tflops * 1e12) / 3600

    @property
    def verdict(self) -> str:
        """The forecast in a sentence."""
        return (
            f"{self.workload} at {self.target.network}, {rounded(self.tokens)} tokens, base learning rate "
            f"{rate_text(self.lr)}: held-out loss {self.loss}"
        )

    @property
    def title(self) -> str:
        """The verdict."""
        return self.verdict

    def table(self) -> Table:
        """The target beside its alternatives."""
        rows: list[tuple[Any, ...]] = [
            ("the target", self.parameters, self.tokens, self.loss.value, self.loss.low, self.loss.high)
        ]
        for one in self.alternatives:
            loss = one.loss.value, one.loss.low, one.loss.high
            rows.append((one.what, one.parameters.value, one.tokens.value, *loss))
        tail = 100 * (1 - LEVEL) / 2
        heads = Column("", side="left"), Column("parameters", _count), Column("tokens", _count)
        return Table((*heads, "loss", f"{tail:g} %", f"{100 - tail:g} %"), rows)

    def figures(self) -> tuple[Figure, ...]:
        """The runs, the law on the way from the smallest of them to the target, and the target."""
        flop = np.array([one.flop for one in self.curve])
        low, value, high = (
            np.array([getattr(one.loss, name) for one in self.curve]) for name in ("low", "value", "high")
        )
        at, losses = np.array([[run.flop, run.loss] for run in self.runs]).T
        bar = {"type": "data", "symmetric": False, "color": ACCENT, "thickness": 2}
        bar |= {"array": [self.loss.high - self.loss.value], "arrayminus": [self.loss.value - self.loss.low]}
        target = plots.points(np.array([self.flop]), np.array([self.loss.value]), "the target, FLOP")
        target |= {"error_y": bar, "marker": {"color": ACCENT, "size": 10, "symbol": "diamond"}}
        data = (
            plots.band(flop, low, high),
            plots.line(flop, value),
            plots.points(at, losses, "FLOP"),
            target,
        )
        caption = (
            "Finished runs, the law on the way from the smallest of them to the target, its calibrated 95 % "
            "interval, and the target (diamond). Runs off that way lie off the curve."
        )
        alt = f"The loss against FLOP: {len(self.runs)} runs, and the target at {self.flop:.3g} FLOP."
        return (Figure(caption, alt, (Panel("loss", data, plots.axes("FLOP", log_y=True)),)),)

    def blocks(self) -> Iterator[Block]:
        """The verdict, what it costs, where the interval comes from, the alternatives, notes."""
        yield self.verdict
        lines = [
            f"cost: {number(self.flop)} FLOP, {number(self.flop / self.tokens)} for each token"
            + (
                f"; {duration(3600 * self.hours)} at {number(self.tflops)} TFLOP/s"
                if self.hours is not None and self.tflops is not None
                else ""
            ),
            f"extrapolation: {number(self.extrapolation)} times the FLOP of the largest of "
            f"{counted(len(self.runs), 'run')} at {_networks(self.runs)}",
            f"law: {self.equation}",
            f"interval: {coverage_text(self.coverage)}",
        ]
        lines += [
            f"{one.what}: {_spread(one.parameters)} parameters on {_spread(one.tokens)} tokens"
            for one in self.alternatives
            if one.parameters.error > 0
        ]
        yield "\n".join(lines)
        yield self.table()
        for note in self.notes:
            yield f"! {note}"
        yield f"made {self.date}, {counted(len(self.runs), 'run')}, sha256 {self.digest[:16]}"
        yield from self.figures()


def coverage_text(coverage: Coverage) -> str:
    """Where the interval comes from, and how sure that is."""
    if not coverage.num_forecasts:
        return "not checked: too few runs would be left without the largest"
    forecasts = counted(coverage.num_forecasts, "held-out forecast")
    text = f"{coverage.raw:.0%} of {forecasts} of larger runs lay inside "
    text += f"({counted(coverage.num_cells, 'size')}); "
    widened = "it is not widened" if coverage.factor == 1 else f"widened {number(coverage.factor)} times"
    text += f"{widened}, {coverage.calibrated:.0%} do, each size calibrated by the others"
    return text


def rate_text(rate: float) -> str:
    """A learning rate, as a power of two if it is one.

    >>> rate_text(2**-7), rate_text(0.01)
    ('2^-7', '0.01')
    """
    power = math.log2(rate)
    return f"2^{power:g}" if power.is_integer() else f"{rate:.4g}"


def digests_of(content: Mapping[str, Any]) -> dict[str, str]:
    """By field, the first digits of its SHA-256."""
    return {name: _sha(value)[:16] for name, value in content.items() if name not in SEALS}


def digest_of(content: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """SHA-256 of all fields and of their digests."""
    fields = {name: value for name, value in content.items() if name not in SEALS}
    return _sha([fields, dict(digests)])


def require_unedited(content: Mapping[str, Any]) -> None:
    """Compare the content of a forecast with its digests; the error names the fields that differ."""
    kept = content.get("digests")
    if not isinstance(kept, dict) or not isinstance(content.get("digest"), str):
        raise UseError("the forecast has no digests: it was not written by theodolite forecast")
    found = digests_of(content)
    differ = [name for name in {**kept, **found} if kept.get(name) != found.get(name)]
    if differ:
        raise UseError(
            f"the forecast was edited after it was made: {', '.join(differ)} "
            f"{'does' if len(differ) == 1 else 'do'} not match its digest. Use the file as it was written"
        )
    if digest_of(content, kept) != content["digest"]:
        raise UseError("the forecast was edited after it was made: its digest is another. Use the original")


def _sha(value: Any) -> str:
    text = json.dumps(plain(value), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _count(value: Any) -> str:
    return rounded(round(value))


def _spread(one: FitEstimate) -> str:
    return f"{_count(one.value)} ({_count(one.low)} to {_count(one.high)})"


def _networks(runs: tuple[SizedRun, ...]) -> str:
    sizes = sorted({(run.width, run.depth) for run in runs})
    first, last = Size(*sizes[0]), Size(*sizes[-1])
    return f"{first} to {last}" if len(sizes) > 1 else str(first)
