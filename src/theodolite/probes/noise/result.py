"""`Noise`: the critical batch of a network and of its tensors, and what larger batches are worth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import ClassVar

from theodolite.core.arguments import positive
from theodolite.core.errors import UseError
from theodolite.core.files import plain
from theodolite.present.figure import ACCENT, Figure, Panel, frame, guide, line
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted, number
from theodolite.probes.noise.estimates import Interval

MOST_ROWS = 24
"""Tensors in the text and in the figure: those with the most noise. The CSV has all."""
ABOUT = 1.5
"""A batch is about the critical one if it differs by less than this factor."""
FEW = 8
"""With fewer independent units, a bootstrap gives too short intervals."""


@dataclass(frozen=True)
class TensorNoise:
    """Noise and signal of the gradient of one tensor, or of the whole network."""

    name: str
    parameters: int
    noise: float
    """Tr Σ, or Tr(PΣ) in the coordinates of an optimizer."""
    signal: float
    """|g|², or gᵀPg. An unbiased estimate, which can be below 0 if the true value is small."""
    signal_low: float
    signal_high: float
    """The 95 % interval of the signal."""
    critical: float | None
    """noise/signal, in examples; None if the estimate of the signal is not above 0."""
    low: float | None
    """The lower end of the 95 % interval of the critical batch; None if nothing is known."""
    high: float | None
    """The upper end; None if the signal cannot be told from 0, so that there is none."""

    @property
    def known(self) -> bool:
        """Is the signal distinguishable from 0, so that the critical batch has an upper bound?"""
        return self.critical is not None and self.high is not None

    @property
    def interval(self) -> str:
        """The 95 % interval in words."""
        if self.low is None:
            return "unknown"
        if self.high is None:
            return f"at least {batch_text(self.low)}"
        return f"{batch_text(self.low)} to {batch_text(self.high)}"


def tensor_noise(name: str, parameters: int, found: Interval) -> TensorNoise:
    """A row of the result. A tensor without any gradient has neither noise nor signal."""
    still = found.noise == 0 and found.signal == 0
    return TensorNoise(
        name,
        parameters,
        found.noise,
        found.signal,
        found.signal_low,
        found.signal_high,
        None if still else found.ratio,
        found.low if math.isfinite(found.low) and not still else None,
        None if still else found.high,
    )


@dataclass(frozen=True)
class NoiseAlong:
    """The noise over some consecutive steps of training."""

    step: int
    """The last of them."""
    noise: float
    signal: float

    @property
    def critical(self) -> float | None:
        """noise/signal; None if the signal is not above 0."""
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else None


@dataclass(frozen=True)
class Noise(Result):
    """How large a batch is worth it. Made by `noise` and by `NoiseMeter`."""

    kind: ClassVar[str] = "gradient noise"
    loads: ClassVar[bool] = True

    whole: TensorNoise
    """The network; `critical`, `low`, `high` and `known` are its."""
    tensors: tuple[TensorNoise, ...]
    batch: int
    """Examples of one step, which the critical batch is compared with."""
    examples: int
    """On which it was measured."""
    microbatch: int
    """Examples of one gradient at most; 1 if each example had its own."""
    units: int
    """The number of these gradients."""
    steps: int
    """Steps of training that were measured by a `NoiseMeter`; 0 for `noise`."""
    optimizer: str
    """In whose coordinates it was measured; empty for the plain gradient."""
    along: tuple[NoiseAlong, ...]
    """By a `NoiseMeter`: consecutive stretches of the training."""
    notes: tuple[str, ...]

    @property
    def critical(self) -> float | None:
        """The critical batch in examples; None if the signal is not above 0, see `status`."""
        return self.whole.critical

    @property
    def low(self) -> float | None:
        """The lower end of its 95 % interval."""
        return self.whole.low

    @property
    def high(self) -> float | None:
        """The upper end; None if there is none, see `status`."""
        return self.whole.high

    @property
    def known(self) -> bool:
        """Does the critical batch have an upper bound?"""
        return self.whole.known

    @property
    def of(self) -> str:
        """What had a gradient of its own: `examples` or `microbatches`."""
        return "examples" if self.microbatch == 1 else "microbatches"

    def more_steps(self, batch: float) -> float:
        """`1 + critical/batch`: steps to the same loss, over those of a very large batch."""
        return 1 + self._required() / positive("batch", batch)

    def more_examples(self, batch: float) -> float:
        """`1 + batch/critical`: examples to the same loss, over those of a very small batch."""
        return 1 + positive("batch", batch) / max(self._required(), 1e-300)

    @property
    def status(self) -> str:
        """Whether the critical batch is known, and if not, why, and what to do."""
        if self.known:
            return "the mean gradient is distinguishable from 0, so the critical batch has both bounds"
        if self.units == 2 and not self.steps:
            return "two gradients have no interval: give more examples, or a smaller microbatch"
        more = "measure more steps" if self.steps else "give more examples"
        return (
            f"the mean gradient cannot be told from 0 with {counted(self.examples, 'example')} (the 95 % "
            f"interval of its square is {number(self.whole.signal_low)} to {number(self.whole.signal_high)}),"
            f" so the critical batch has no upper bound: {more}"
        )

    @property
    def sentence(self) -> str:
        """The answer in one or two sentences."""
        step = f"A step of {counted(self.batch, 'example')}"
        if not self.known:
            least = f"is at least {batch_text(self.low)}" if self.low else "is not known"
            return f"The critical batch {least}: {self.status}."
        critical = self._required()
        about = f"{batch_text(critical)} ({self.whole.interval})"
        if critical > ABOUT * self.batch:
            return (
                f"{step} is 1/{_ratio(critical / self.batch)} of the critical batch {about}: up to that, "
                "twice the batch nearly halves the steps."
            )
        if self.batch > ABOUT * critical:
            less = f"{_ratio(self.batch / critical)} times" if critical else "more than"
            return (
                f"{step} is {less} the critical batch {about}: more examples hardly save steps, and half the "
                "batch takes few more."
            )
        return (
            f"{step} is about the critical batch {about}: it takes twice the steps, and twice the examples, "
            "that are least possible."
        )

    def blocks(self) -> Iterator[Block]:
        """The answer, what it was measured on, the tensors, and the trade-off between steps and examples."""
        said = [self.sentence, f"measured  {self._measured()}"]
        yield "\n".join([*said, *(f"note      {note}" for note in self.notes)])
        yield self._table(self._noisiest())
        if len(self.tensors) > MOST_ROWS:
            yield f"the {MOST_ROWS} of {len(self.tensors)} tensors with the most noise"
        yield self.figure()

    def table(self) -> Table:
        """The whole network, and a row for each tensor."""
        return self._table(self.tensors)

    def figure(self) -> Figure:
        """Steps and examples against the batch; the critical batch of tensors, and along training."""
        panels = [self._trade_off()] if self.known and self._required() > 0 else []
        if by_tensor := [one for one in self._noisiest() if one.known and one.critical]:
            panels.append(_by_tensor(by_tensor))
        if len([one for one in self.along if one.critical]) > 1:
            panels.append(self._along())
        return Figure(
            caption="Steps and examples to the same loss, over the least possible, by the size of a step; "
            "the critical batch of each tensor, with 95 % intervals.",
            alt=self.sentence,
            panels=tuple(panels),
        )

    def to_dict(self) -> dict[str, object]:
        """All fields, and the answer in words."""
        return {**plain(self), "sentence": self.sentence, "status": self.status}

    @classmethod
    def from_dict(cls, content: dict[str, object]) -> Noise:
        """The result from what `to_dict` gave."""
        if isinstance(content, dict):
            said = ("sentence", "status")
            content = {name: value for name, value in content.items() if name not in said}
        return super().from_dict(content)

    def _required(self) -> float:
        if self.critical is None:
            raise UseError(f"the critical batch is not known: {self.status}")
        return self.critical

    def _measured(self) -> str:
        over = f" in {counted(self.steps, 'step')}" if self.steps else ""
        units = f"{counted(self.examples, 'example')}{over}, "
        units += (
            "a gradient of each"
            if self.microbatch == 1
            else f"{self.units:,} gradients of {counted(self.microbatch, 'example')}"
        )
        return f"{units}, in the coordinates of {self.optimizer}" if self.optimizer else units

    def _noisiest(self) -> tuple[TensorNoise, ...]:
        if len(self.tensors) <= MOST_ROWS:
            return self.tensors
        least = sorted((one.noise for one in self.tensors), reverse=True)[MOST_ROWS - 1]
        return tuple(one for one in self.tensors if one.noise >= least)[:MOST_ROWS]

    def _table(self, tensors: tuple[TensorNoise, ...]) -> Table:
        names = ("tensor", "parameters", "critical", "low", "high", "noise", "signal")
        shown = [Column(name, _cell) for name in names[2:5]]
        rest = [Column(name, lambda value: number(value)) for name in names[5:]]
        rows = [
            (one.name, one.parameters, one.critical, one.low, one.high, one.noise, one.signal)
            for one in (self.whole, *tensors)
        ]
        return Table((*names[:2], *shown, *rest), rows)

    def _trade_off(self) -> Panel:
        critical = self._required()
        ends = sorted((critical, self.batch))
        first, last = math.log2(ends[0]) - 4, math.log2(ends[1]) + 4
        batches = [2 ** (first + (last - first) * at / 48) for at in range(49)]
        steps = line(
            batches, [self.more_steps(one) for one in batches], hover="batch %{x:.3g}: %{y:.3g} × steps"
        )
        most = line(batches, [self.more_examples(one) for one in batches])
        here = {
            **line([self.batch], [self.more_steps(self.batch)], hover=f"{self.batch} examples a step"),
            "mode": "markers",
            "marker": {"color": ACCENT, "size": 8},
        }
        layout = frame(height=240, x="examples in a step")
        layout["xaxis"] |= {"type": "log", "exponentformat": "power"}
        layout["yaxis"] |= {"type": "log", "exponentformat": "power"}
        layout["shapes"] = [guide(x=critical)]
        return Panel("Steps (line) and examples (dots), over the least possible", (steps, most, here), layout)

    def _along(self) -> Panel:
        known = [one for one in self.along if one.critical]
        drawn = line(
            [one.step for one in known],
            [one.critical for one in known],
            hover="step %{x}: %{y:.3g}",
            markers=4,
        )
        layout = frame(height=220, x="step")
        layout["yaxis"] |= {"type": "log", "exponentformat": "power"}
        return Panel("The critical batch along training", (drawn,), layout)


def _by_tensor(tensors: list[TensorNoise]) -> Panel:
    names = [escape(one.name) for one in tensors][::-1]
    values = [one.critical or 0.0 for one in tensors][::-1]
    above = [(one.high or 0.0) - (one.critical or 0.0) for one in tensors][::-1]
    below = [(one.critical or 0.0) - (one.low or 0.0) for one in tensors][::-1]
    drawn = line(values, [], hover="%{y}: %{x:.3g}") | {
        "y": names,
        "mode": "markers",
        "marker": {"color": ACCENT, "size": 6},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, one) for one in above],
            "arrayminus": [max(0.0, one) for one in below],
            "color": ACCENT,
            "thickness": 1,
            "width": 0,
        },
    }
    layout = frame(height=60 + 18 * len(tensors), x="critical batch")
    layout["xaxis"] |= {"type": "log", "exponentformat": "power"}
    return Panel("Critical batch by tensor", (drawn,), layout)


def batch_text(value: float) -> str:
    """A number of examples, in three digits.

    >>> [batch_text(value) for value in (0.21, 41.7, 640.2, 12345.0)]
    ['0.21', '41.7', '640', '12,300']
    """
    if value < 1000:
        return number(float(f"{value:.3g}"))
    return f"{float(f'{value:.3g}'):,.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2g}" if value < 100 else batch_text(value)


def _cell(value: float | None) -> str:
    return "" if value is None else batch_text(value)
