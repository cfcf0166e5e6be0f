"""The result of `signal`: the numbers at every point, as a table and as figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scipy.special import ndtr, stdtrit
from torch import Tensor

from theodolite.core import arguments
from theodolite.core.errors import UseError
from theodolite.core.files import plain
from theodolite.present.figure import FAINT, QUIET, Figure, Panel, bars, frame, heat_map, line
from theodolite.present.result import Block, Result
from theodolite.present.text import Table
from theodolite.probes.signal.gradient_statistics import BINS, Covariance
from theodolite.surgery import InsertionPoint


@dataclass(frozen=True)
class PointSignal(Result):
    """What a block at a point could do at first."""

    kind: ClassVar[str] = "signal at a point"
    loads: ClassVar[bool] = True
    point: InsertionPoint
    norm: float
    """‖M̄‖, over all output tensors of the block."""
    gain: float
    """The slope of the loss along −M̄ on held-out examples: the mean of ⟨M̄, M_i⟩."""
    error: float
    """Its standard error, over examples."""
    shares: tuple[float, ...]
    """The parts of the gain due to the block's branches, in order."""
    preconditioned: float
    """The slope of the loss along −M̄ (S + ρI)⁻¹."""
    preconditioned_error: float
    gradient: float
    """‖v̄‖, the mean gradient with respect to a shift of the stream in all positions of an example."""
    alignment: float
    """⟨v̄, v̄'⟩ of the examples of both samples: an unbiased estimate of ‖E v‖²."""
    alignment_interval: tuple[float, float]
    """Of the alignment, for this v̄, at 95 % by Student's t."""
    alignment_bound: float
    """Bound on the probability that v̄ and v̄' do not align (Theorem 5), with estimates in place of the true
    values: a diagnostic. 1 says nothing."""
    covariance: Covariance
    unsure: bool = False
    """Are the held-out products too few or too skewed for Student's t? Then the point is never `above`."""
    directions: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """M̄ by output tensor."""
    preconditioned_directions: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Of the point."""
        return self.point.name

    @property
    def significance(self) -> float:
        """The gain over its standard error; 0 if no example has a gain at all."""
        if self.error == 0:
            return math.copysign(math.inf, self.gain) if self.gain else 0.0
        return self.gain / self.error

    @property
    def noise(self) -> float:
        """How much of ‖M̄‖² is noise: ‖M̄‖² minus the gain."""
        return self.norm**2 - self.gain

    def blocks(self) -> Iterator[Block]:
        """The gain and the covariance."""
        yield (
            f"{self.name}: gain {self.gain:.4g} ± {self.error:.2g}, preconditioned {self.preconditioned:.4g} "
            f"± {self.preconditioned_error:.2g}\n{self.covariance}"
        )


SILENT = (
    "no gradient reaches any point: what comes after them starts at zero, such as a gate or the readout. "
    "Train a few steps and measure again"
)


@dataclass(frozen=True)
class Signal(Result):
    """The signal at all points of a network. Made by `signal`."""

    kind: ClassVar[str] = "signal"
    loads: ClassVar[bool] = True
    points: tuple[PointSignal, ...]
    loss: float
    """Mean over all examples."""
    estimated_on: int
    """The number of examples that the directions are means over."""
    judged_on: int
    """The number of examples that the gains are means over."""
    delta: float
    left: Mapping[str, str]
    """By name of a place where no block can be inserted: why."""
    notes: tuple[str, ...]
    """What could not be measured, or not exactly."""
    doubt: str = "the held-out examples are too few or too skewed"
    """Why the gain of a point that is `unsure` is not known."""

    @property
    def threshold(self) -> float:
        """How many standard errors a gain must be above zero: Student's t, δ divided among all points."""
        return float(stdtrit(self.judged_on - 1, 1 - self.delta / len(self.points)))

    @property
    def above(self) -> tuple[PointSignal, ...]:
        """The points whose gain is significantly above zero, in order."""
        return tuple(one for one in self.points if one.significance > self.threshold and not one.unsure)

    @property
    def seeming(self) -> tuple[PointSignal, ...]:
        """The points whose gain seems to be above zero but is `unsure`, in order."""
        return tuple(one for one in self.points if one.significance > self.threshold and one.unsure)

    @property
    def deepest(self) -> bool:
        """Is no gain significantly above zero? Then to first order no block is seen to help.

        Where some are `seeming`, that is undecided.
        """
        return not self.above

    @property
    def silent(self) -> bool:
        """Is the gradient zero at every point, as where a gate or the readout after it starts at zero?"""
        return all(one.norm == 0 for one in self.points)

    @property
    def best(self) -> PointSignal:
        """The point with the largest gain, significant or not."""
        return self.ranked()[0]

    def ranked(self, by: Literal["gain", "preconditioned"] = "gain") -> tuple[PointSignal, ...]:
        """The points, from the largest gain to the smallest."""
        arguments.one_of("by", by, ("gain", "preconditioned"))
        return tuple(sorted(self.points, key=lambda one: -getattr(one, by)))

    def at(self, name: str | InsertionPoint) -> PointSignal:
        """The signal at one point."""
        wanted = name.name if isinstance(name, InsertionPoint) else name
        for one in self.points:
            if one.name == wanted:
                return one
        raise UseError(f"{wanted!r} is not among the points: {', '.join(one.name for one in self.points)}")

    def blocks(self) -> Iterator[Block]:
        """A row for each point, then a summary."""
        yield (
            f"loss {self.loss:.4f}; directions from {self.estimated_on} examples, judged by {self.judged_on}"
        )
        yield self.table()
        yield "\n".join(self._summary())
        yield self.figure()

    def table(self) -> Table:
        """One row for each point; * marks a gain above the noise, ? one that is unsure."""
        columns = ["point", "‖M‖²", "gain", "±", "gain/±", "precond.", "precond. ±"]
        columns += ["‖v‖", "aligned", "C", "chance", "above"]
        rows = [
            (
                *(one.name, one.norm**2, one.gain, one.error, one.significance),
                *(one.preconditioned, one.preconditioned_error, one.gradient, one.alignment),
                *(one.covariance.effective, one.covariance.chance),
                "" if one.significance <= self.threshold else "?" if one.unsure else "*",
            )
            for one in self.points
        ]
        return Table(columns, rows)

    def figure(self) -> Figure:
        """Gain, gradient and covariance against depth."""
        names, best, bar = [one.name for one in self.points], self.best, self.threshold
        panels = [
            _dots("Gain along −M", names, [(one.gain, bar * one.error) for one in self.points]),
            _dots(
                "Gain, preconditioned",
                names,
                [(one.preconditioned, bar * one.preconditioned_error) for one in self.points],
            ),
            _dots("Mean gradient of the stream, ‖v‖", names, [(one.gradient, None) for one in self.points]),
            _histogram(f"Correlations of channels at {best.name}", best.covariance),
        ]
        if best.covariance.matrix is not None:
            panels.append(_heat_map(f"Covariance of channels at {best.name}", best.covariance.matrix))
        said = f"The largest gain is at {best.name}"
        if self.deepest:
            said = f"No point {'is known to have' if self.seeming else 'has'} a gain above its noise"
        return Figure(
            caption="The slope of the loss along the best direction of a block at each point, on held-out "
            f"examples; bars are {bar:.2f} standard errors. Then the gradient of the stream, and the "
            "correlations of its channels over examples; the line is what chance alone gives.",
            alt=f"{said}. Gains from the first point to the last: "
            + ", ".join(f"{one.gain:.3g}" for one in self.points),
            panels=tuple(panels),
        )

    def _summary(self) -> Iterator[str]:
        best = self.best
        needed = f"{self.threshold:.2f} standard errors (δ = {self.delta:g} over {len(self.points)} points)"
        if self.silent:
            yield f"undecided {SILENT}"
        elif self.deepest and self.seeming:
            yield (
                f"undecided no point is known to have a gain above {needed}; {len(self.seeming)} of "
                f"{len(self.points)} (?) seem to, but {self.doubt}"
            )
        elif self.deepest:
            yield (
                f"deepest   no point has a gain above its noise, {needed}: to first order no block helps, as "
                f"far as {self.judged_on} examples can tell"
            )
        else:
            yield (
                f"signal    {len(self.above)} of {len(self.points)} points (*) have a gain above {needed}; "
                f"the largest is at {best.name}"
            )
        if not self.silent:
            shares = " and ".join(
                f"{_share(one, best.gain)} by branch {at}" for at, one in enumerate(best.shares)
            )
            yield f"branches  at {best.name} the gain is {shares}"
            bounds = [one.alignment_bound for one in self.points]
            yield (
                "aligned   two samples' mean gradients fail to align with a probability of at most "
                f"{min(bounds):.2g} to {max(bounds):.2g} (Theorem 5 with estimates: a diagnostic; 1 says "
                "nothing)"
            )
        yield from (f"left      {name}: {reason}" for name, reason in self.left.items())
        yield from (f"note      {note}" for note in self.notes)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 and math.isfinite(part / whole) else f"{part:.3g}"


def _dots(title: str, names: Sequence[str], points: Sequence[tuple[float, float | None]]) -> Panel:
    """Values with error bars, or a line if they have none."""
    errors = plain([error for _, error in points if error is not None])
    mode = "markers" if errors else "lines+markers"
    drawn = line(names, [y for y, _ in points], mode=mode, markers=7, hover="%{x}: %{y:.3g}")
    if errors:
        drawn["error_y"] = {"type": "data", "array": errors, "color": QUIET, "thickness": 1}
    layout = frame(height=220)
    layout["xaxis"] |= {"type": "category", "nticks": 8}
    layout["yaxis"] |= {"rangemode": "tozero", "nticks": 5, "exponentformat": "power"}
    layout["yaxis"] |= {"zeroline": True, "zerolinecolor": FAINT}
    return Panel(title, (drawn,), layout)


def _histogram(title: str, covariance: Covariance) -> Panel:
    """The distribution of correlations, beside that of uncorrelated channels."""
    edge, noise = 1 / BINS, covariance.examples**-0.5
    middles = [2 * (at + 0.5) / BINS - 1 for at in range(BINS)]
    total = max(sum(covariance.counts), 1)
    reached = max((abs(x) for x, count in zip(middles, covariance.counts, strict=True) if count), default=0.0)
    found = bars(middles, [count / total for count in covariance.counts], hover="%{x:.3f}: %{y:.3f}")
    by_chance = [float(ndtr((x + edge) / noise) - ndtr((x - edge) / noise)) for x in middles]
    chance = line(middles, by_chance)
    layout = frame(height=220, x="correlation") | {"bargap": 0}
    end = min(1.0, max(reached, 3 * noise) + 4 * edge)
    layout["xaxis"] |= {"range": [-end, end]}
    layout["yaxis"] |= {"rangemode": "tozero", "nticks": 4, "tickformat": ".0%"}
    return Panel(title, (found, chance), layout)


def _heat_map(title: str, matrix: Tensor) -> Panel:
    largest = float(matrix.abs().max()) or 1.0
    drawn = heat_map(matrix.tolist(), colors="RdBu", hover="channels %{x} and %{y}: %{z:.3g}")
    drawn |= {"zmin": -largest, "zmax": largest}
    drawn["colorbar"] |= {"exponentformat": "power", "nticks": 3}
    layout = frame(height=260, x="channel")
    layout["yaxis"] |= {"autorange": "reversed"}
    return Panel(title, (drawn,), layout)
