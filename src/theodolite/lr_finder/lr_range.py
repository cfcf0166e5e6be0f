"""The result of `find_lr`: an interval, a best value with its spread, and the curves behind them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from theodolite.present.figure import ACCENT, QUIET, Figure, Panel, frame, guide, line
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Column, Table, counted

SHARE = 0.1
"""The fraction of the greatest progress that a rate in the interval must make."""


@dataclass(frozen=True)
class LrTrial:
    """A short training at one learning rate."""

    rate: float
    loss: float
    """After it, on the batches that judge; infinite if it diverged."""
    falls: bool
    """Is that below the start by more than the noise of these batches?"""

    def __post_init__(self) -> None:
        if math.isnan(self.loss):  # JSON has no infinity
            object.__setattr__(self, "loss", math.inf)


@dataclass(frozen=True)
class LrCurve:
    """The trials of one seed, in order of their rates."""

    seed: int
    start: float
    """The loss before any step, on the batches that judge."""
    trials: tuple[LrTrial, ...]
    high: float | None
    """The highest rate below the first that raised the loss; None if the lowest rate raised it."""
    risen: bool
    """Did any rate raise the loss?"""

    @property
    def falls(self) -> bool:
        """Does any rate lower the loss by more than its noise?"""
        return any(trial.falls for trial in self.trials)

    def lowest(self, share: float) -> float:
        """The lowest rate with this share of the greatest progress, interpolated by a power law.

        >>> trials = [LrTrial(rate, 1 - 0.1 * rate, falls=True) for rate in (1.0, 4.0, 10.0)]
        >>> round(LrCurve(0, 1.0, tuple(trials), 10.0, risen=False).lowest(0.2), 6)
        2.0
        """
        reached = [(trial.rate, self.start - trial.loss) for trial in self.trials]
        enough = share * max(progress for _, progress in reached)
        at = next(index for index, (_, progress) in enumerate(reached) if progress >= enough)
        rate, progress = reached[at]
        before, less = reached[at - 1] if at else (rate, progress)
        if not 0 < less < progress:
            return rate
        return float(before * (rate / before) ** (math.log(enough / less) / math.log(progress / less)))

    @property
    def best(self) -> float:
        """Where the loss is lowest: the vertex of the parabola through the lowest trial and its neighbours.

        >>> trials = [LrTrial(2.0**k, (k - 0.25) ** 2, falls=True) for k in (-1, 0, 1)]
        >>> round(LrCurve(0, 9.0, tuple(trials), 2.0, risen=False).best, 6) == round(2**0.25, 6)
        True
        """
        at = min(range(len(self.trials)), key=lambda index: self.trials[index].loss)
        near = self.trials[max(at - 1, 0) : at + 2]
        if len(near) < 3 or not all(math.isfinite(trial.loss) for trial in near):
            return self.trials[at].rate
        (x0, y0), (x1, y1), (x2, y2) = ((math.log2(trial.rate), trial.loss) for trial in near)
        left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
        if right <= left:
            return float(self.trials[at].rate)
        vertex = (x0 + x1) / 2 - left * (x2 - x0) / 2 / (right - left)
        return float(2.0 ** min(max(vertex, x0), x2))


@dataclass(frozen=True)
class LrRange(Result):
    """Learning rates at which training makes progress. Made by `find_lr`.

    A rate stands for those of all groups, whose ratios are kept: it is `factor` times the given ones.
    """

    kind: ClassVar[str] = "learning-rate range"
    loads: ClassVar[bool] = True
    name: str
    """What was trained."""
    optimizer: str
    steps: int
    """At each rate."""
    curves: tuple[LrCurve, ...]
    """One for each seed."""
    base: float
    """The rate that the groups' own rates stand for: the plan's, or the highest of them."""
    groups: Mapping[str, float]
    """The given learning rates, by group."""
    low: float | None = None
    """The lowest rate that makes a tenth of the greatest progress, for every seed; None if none does."""
    high: float | None = None
    """The highest rate below the first that raises the loss, the lowest of all seeds."""
    best: float | None = None
    """Where the loss after these steps is lowest: the geometric mean over seeds."""
    spread: tuple[float, float] | None = None
    """The lowest and the highest best rate of a seed."""
    found: bool = False
    """Are both ends inside the rates that were tried?"""
    status: str = ""
    """If not, why, and what to do."""

    @property
    def title(self) -> str:
        """The heading of its page."""
        return f"Learning rate of {self.name}"

    @property
    def factor(self) -> float | None:
        """What to multiply the given learning rates by to get the best ones."""
        return None if self.best is None else self.best / self.base

    @property
    def rates(self) -> dict[str, float]:
        """The best learning rate of each group; empty if there is none."""
        factor = self.factor
        return {} if factor is None else {group: lr * factor for group, lr in self.groups.items()}

    def holds(self, rate: float) -> bool:
        """Is a rate in the interval?"""
        return self.low is not None and self.high is not None and self.low <= rate <= self.high

    def to_dict(self) -> dict[str, Any]:
        """As values that JSON knows, with `factor` and `rates`."""
        return {**super().to_dict(), "factor": self.factor, "rates": self.rates}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The result from what `to_dict` gave."""
        derived = ("factor", "rates")
        return super().from_dict({key: value for key, value in content.items() if key not in derived})

    @property
    def sentence(self) -> str:
        """The interval in words."""
        if self.low is None or self.high is None or self.best is None or self.spread is None:
            return f"No learning rate for {self.name} with {self.optimizer}: {self.status}"
        seeds = len(self.curves)
        said = f" ({self.spread[0]:.2g} to {self.spread[1]:.2g} over {seeds} seeds)" if seeds > 1 else ""
        return (
            f"{self.name} with {self.optimizer}: learning rates from {self.low:.2g} to {self.high:.2g}, "
            f"best {self.best:.2g}{said}"
        )

    def blocks(self) -> Iterator[Block]:
        """The interval, the mean loss at each rate, and the best rate of each group."""
        yield self.sentence
        yield self.figure()
        start = statistics.fmean(curve.start for curve in self.curves)
        yield f"Loss after {counted(self.steps, 'step')} at each rate, from {start:.4g} at the start:"
        yield self.table()
        if self.low is not None:
            yield self.status
        if len(self.rates) > 1:
            yield Heading("The best rate of each group")
            yield Table(("group", "lr"), list(self.rates.items()))

    def table(self) -> Table:
        """For every rate that all seeds tried: the mean loss after it, and whether it is in the interval."""
        by_seed = [{trial.rate: trial.loss for trial in curve.trials} for curve in self.curves]
        shared = sorted(set.intersection(*(set(losses) for losses in by_seed)))
        return Table(
            (
                Column("lr", lambda rate: f"{rate:.2e}"),
                Column("loss", lambda loss: "diverges" if math.isinf(loss) else f"{loss:.4g}"),
                "in the interval",
            ),
            [
                (
                    rate,
                    statistics.fmean(losses[rate] for losses in by_seed),
                    "yes" if self.holds(rate) else "",
                )
                for rate in shared
            ],
        )

    def figure(self, planned: float | None = None) -> Figure:
        """The loss after each trial, one line per seed; the interval is shaded, a planned rate dotted."""
        dotted = "" if planned is None else f" Dotted: the planned rate, {planned:.2g}."
        interval = " Shaded: the interval; dashed: the best rate." if self.best is not None else ""
        return Figure(
            caption=f"Loss after {self.steps} steps at one learning rate, from the same start; one line per "
            f"seed, up to where it diverges. The horizontal line is the loss at the start.{interval}{dotted}",
            alt=self.sentence + ("" if planned is None else f"; planned {planned:.2g}"),
            panels=(self._panel(planned),),
        )

    def _panel(self, planned: float | None) -> Panel:
        data = []
        for curve in self.curves:
            trials = [trial for trial in curve.trials if math.isfinite(trial.loss)]
            hover = f"seed {curve.seed}, lr %{{x:.2e}}: %{{y:.4g}}"
            x, y = [trial.rate for trial in trials], [trial.loss for trial in trials]
            data.append(line(x, y, markers=5, hover=hover, name=f"seed {curve.seed}"))
        layout = frame(height=280, x="learning rate", y="loss")
        rates = [trial.rate for curve in self.curves for trial in curve.trials]
        rates += [planned] if planned else []
        low, high = math.log10(min(rates)), math.log10(max(rates))
        air = 0.03 * (high - low)
        layout["xaxis"] |= {
            "type": "log",
            "range": [low - air, high + air],
            "exponentformat": "power",
            "dtick": max(1, round((high - low) / 6)),
        }
        layout["yaxis"] |= {"nticks": 6}
        start = statistics.fmean(curve.start for curve in self.curves)
        layout["shapes"] = [guide(y=start)]
        if self.low is not None and self.high is not None:
            shaded = {"fillcolor": ACCENT, "opacity": 0.12, "line": {"width": 0}, "layer": "below"}
            sides = {"x0": self.low, "x1": self.high, "yref": "paper", "y0": 0, "y1": 1}
            layout["shapes"].append({"type": "rect", **sides, **shaded})
        if self.best is not None:
            dashed = {"color": QUIET, "width": 1, "dash": "dash"}
            layout["shapes"].append(guide(x=self.best) | {"line": dashed})
        if planned is not None:
            layout["shapes"].append(guide(x=planned))
        return Panel("Loss after each trial", tuple(data), layout)


def read_off(
    name: str,
    optimizer: str,
    steps: int,
    curves: Sequence[LrCurve],
    base: float,
    groups: Mapping[str, float],
) -> LrRange:
    """The interval that all seeds agree on, or the reason why there is none."""

    def none(status: str) -> LrRange:
        return LrRange(name, optimizer, steps, tuple(curves), base, dict(groups), status=status)

    first, last = (sorted({trial.rate for trial in curves[0].trials})[at] for at in (0, -1))
    highs = [curve.high for curve in curves if curve.high is not None]
    if len(highs) < len(curves):
        return none(f"the lowest rate, {first:.2g}, already raises the loss. Try lower ones (low=…)")
    if not all(curve.falls for curve in curves):
        num = sum(not curve.falls for curve in curves)
        whom = "" if num == len(curves) == 1 else f" for {num} of {len(curves)} seeds"
        return none(
            f"the loss never falls by more than its noise{whom}. Take more steps (steps=…) or larger "
            "batches, or check the data and the loss"
        )
    bests = [curve.best for curve in curves]
    low, high = max(curve.lowest(SHARE) for curve in curves), min(highs)
    if low > high:
        return none(
            f"the seeds do not agree: one needs at least {low:.2g}, another at most {high:.2g}. Take more "
            "steps (steps=…)"
        )
    open_below, open_above = low == first, not all(curve.risen for curve in curves)
    status = "both ends found"
    if open_above:
        status = f"open above: even {last:.2g} does not raise the loss. Try higher rates (high=…)"
    elif open_below:
        status = f"open below: even {first:.2g} makes a tenth of the progress. Try lower rates (low=…)"
    return dataclasses.replace(
        none(status),
        low=low,
        high=high,
        best=min(max(statistics.geometric_mean(bests), low), high),
        spread=(min(bests), max(bests)),
        found=not open_below and not open_above,
    )
