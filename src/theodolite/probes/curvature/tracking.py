"""Measure every so many steps of a training loop that is not changed.

The optimizer reports its steps (`register_step_post_hook`), so the loop stays as it is, with `torch.compile`
and DistributedDataParallel. The model itself is measured, uncompiled, on a batch of its own; under DDP all
ranks measure at the same steps.

With `most_share` p a measurement is skipped if it would bring the time spent on measuring above this share of
all time since the start:

    (measured so far + the last measurement) > p·(time so far + the last measurement)
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.core.arguments import whole
from theodolite.core.batches import Batches
from theodolite.core.building import in_one_line, untouched_randomness
from theodolite.core.calling import Loss, described
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.files import plain
from theodolite.core.replicas import together
from theodolite.present.figure import ACCENT, Figure, Panel, frame, line
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, number
from theodolite.probes.curvature.curvature import Curvature, curvature
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, hessian
from theodolite.probes.curvature.rescaling import uncompiled
from theodolite.probes.curvature.sampling import NORMAL_95
from theodolite.probes.curvature.sharpness import edge, sharpness

Measure = Callable[[nn.Module, Loss, Batches], Any]
"""`measure(model, loss, batch)`: a number, or an object with `.value` and perhaps `.error`."""

TIMED = 5
"""Gradients at the start, to time one."""
FAR_APART = 30.0
"""Positive values whose ratio is greater are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Measurement:
    """The values measured after one step."""

    step: int
    values: Mapping[str, float]
    """By measure; nan if it failed."""
    errors: Mapping[str, float]
    """By measure: one standard error, or a bound; nan if none is known."""
    seconds: float
    """The time that measuring took."""
    at: float
    """Seconds since the start."""
    notes: Mapping[str, str]
    """By measure, why it failed."""


@dataclass
class Tracking(Result):
    """Measurements during training. Made by `track`, and grows while training goes on."""

    kind: ClassVar[str] = "tracking"
    loads: ClassVar[bool] = True

    names: tuple[str, ...]
    """What is measured."""
    every: int
    """Steps between measurements."""
    most_share: float | None
    rows: tuple[Measurement, ...] = ()
    steps: int = 0
    """Steps of the optimizer so far."""
    left_out: int = 0
    """Measurements skipped because of `most_share`."""
    gradient_seconds: float = math.nan
    """The time of one gradient of the loss on the same batch."""
    seconds: float = 0.0
    """Seconds since the start; at the end, of the whole block."""
    measuring: float = 0.0
    """Seconds of these spent on measuring."""

    @property
    def share(self) -> float:
        """The share of all time spent on measuring."""
        return self.measuring / self.seconds if self.seconds else math.nan

    @property
    def gradients(self) -> float:
        """The median cost of a measurement, in gradients on the same batch."""
        if not self.rows:
            return math.nan
        return statistics.median_high(row.seconds for row in self.rows) / self.gradient_seconds

    def values(self, name: str) -> tuple[float, ...]:
        """One measure, in the order of the rows."""
        if name not in self.names:
            raise UseError(f"{name!r} was not measured: it is one of {', '.join(self.names)}")
        return tuple(row.values[name] for row in self.rows)

    @property
    def cost(self) -> str:
        """What measuring cost, in words."""
        said = (
            f"measured {len(self.rows)} times in {self.steps} steps: {self.measuring:.2g} s of "
            f"{self.seconds:.2g} s ({100 * self.share:.1f} %), {self.gradients:.3g} gradients each"
        )
        if self.left_out:
            said += f"; {self.left_out} skipped to stay within {100 * (self.most_share or 0):g} %"
        return said

    @property
    def title(self) -> str:
        """What was measured, and for how long."""
        return f"{', '.join(self.names)} over {self.steps} steps"

    def blocks(self) -> Iterator[Block]:
        """A figure of every measure, a row for each measurement, failures, and the cost."""
        if self.rows:
            yield self._figure()
        columns = [Column(name, show=lambda value: number(value, 4)) for name in self.names]
        yield Table(
            ["step", *columns], [(row.step, *(row.values[name] for name in self.names)) for row in self.rows]
        )
        failed = {f"{name}: {why}": None for row in self.rows for name, why in row.notes.items()}
        yield "\n".join([*failed, self.cost])

    def table(self) -> Table:
        """Step, values, errors and times of each measurement; empty where a value is not finite."""
        columns = ("step", *self.names, *(f"{name}.error" for name in self.names), "seconds", "at")
        rows = []
        for row in self.rows:
            numbers = [one[name] for one in (row.values, row.errors) for name in self.names]
            rows.append((row.step, *map(plain, numbers), row.seconds, row.at))
        return Table(columns, rows)

    def _figure(self) -> Figure:
        ends = [(name, *(self.values(name)[at] for at in (0, -1))) for name in self.names]
        return Figure(
            caption=f"Measured every {self.every} steps. Bars: 95 % intervals, if an error is known.",
            alt=". ".join(f"{name} goes from {first:.4g} to {last:.4g}" for name, first, last in ends),
            panels=tuple(self._panel(name) for name in self.names),
        )

    def _panel(self, name: str) -> Panel:
        values = self.values(name)
        errors = [row.errors[name] for row in self.rows]
        bars = [NORMAL_95 * error if error > 0 else 0.0 for error in errors]
        drawn = line(
            [row.step for row in self.rows],
            values,
            hover=f"step %{{x}}: {escape(name)} %{{y:.4g}}",
            markers=5,
        )
        if any(bars):
            style = {"color": ACCENT, "thickness": 1, "width": 0}
            drawn["error_y"] = {"type": "data", "array": plain(bars), **style}
        layout = frame(height=230, x="step")
        finite = [value for value in values if math.isfinite(value)]
        if finite and min(finite) > 0 and max(finite) > FAR_APART * min(finite):
            layout["yaxis"] |= {"type": "log", "exponentformat": "power"}
        return Panel(name, (drawn,), layout)


@contextmanager
def track(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    optimizer: Optimizer,
    *,
    measure: str | Sequence[str] | Mapping[str, str | Measure] = ("loss", "sharpness"),
    every: int = 50,
    most_share: float | None = None,
) -> Iterator[Tracking]:
    """Measure at the start, and after every so many steps of the optimizer, inside the block.

    Args:
        model: the model in training; it may be compiled, or a DistributedDataParallel.
        loss: `loss(logits, targets) -> scalar`.
        batch: what to measure on, the same each time: a pair, or several. Under DDP each rank gives its own.
        optimizer: the optimizer whose steps are counted.
        measure: names: `loss`, `gradient_norm`, `sharpness` (λ_max), `edge` (lr·λ_max/2 of SGD, with its
            momentum and groups: 1 is the edge of stability), `trace`, `excess` and `t` (in 50 random
            directions); or a dict of such names and of functions `(model, loss, batch) -> number`. Functions
            are called without gradients, and changes to modes, buffers and random numbers are undone.
        every: steps between measurements.
        most_share: the share of all time that measuring may take, such as 0.1; a measurement that would take
            more is skipped.

    A measure that fails at the start raises; one that fails later is nan in its row, with a note, and
    training goes on. The hook is removed at the end of the block.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batch = torch.ones(1, 1), torch.zeros(1, 1)
    >>> with track(model, nn.functional.mse_loss, batch, optimizer, every=2, measure="sharpness") as tracking:
    ...     for _ in range(4):
    ...         optimizer.zero_grad()
    ...         model(batch[0]).square().mean().backward()
    ...         optimizer.step()
    >>> [row.step for row in tracking.rows], [round(value, 4) for value in tracking.values("sharpness")]
    ([0, 2, 4], [2.0, 2.0, 2.0])
    """
    measures = together(model, lambda: _checked(optimizer, measure, every, most_share))
    objective = together(model, lambda: Objective(model, loss, batch))
    tracking = Tracking(tuple(measures), every, most_share)
    clock = _clock(objective)
    tracking.gradient_seconds = together(model, lambda: _time_gradient(objective))
    tracking.measuring = clock()
    _measure(tracking, measures, optimizer, objective, clock, strict=True)

    def after_step(*_: Any) -> None:
        tracking.steps += 1
        if tracking.steps % every == 0:
            if _affordable(tracking, objective, clock):
                _measure(tracking, measures, optimizer, objective, clock, strict=False)
            else:
                tracking.left_out += 1

    hook = optimizer.register_step_post_hook(_uncompiled(after_step))
    try:
        yield tracking
    finally:
        hook.remove()
        tracking.seconds = clock()


class _Moment:
    """The model at one step. What several measures need is computed once."""

    def __init__(self, objective: Objective, optimizer: Optimizer) -> None:
        self.model, self.loss, self.batch = objective.given, objective.given_loss, objective.batches
        self.optimizer = optimizer

    @cached_property
    def hessian(self) -> Hessian:
        return hessian(self.model, self.loss, self.batch)

    @cached_property
    def curvature(self) -> Curvature:
        return curvature(self.model, self.loss, self.batch, directions=min(50, self.hessian.size))


NAMED: dict[str, Callable[[_Moment], Any]] = {
    "loss": lambda now: now.hessian.loss,
    "gradient_norm": lambda now: now.hessian.gradient.norm(),
    "sharpness": lambda now: sharpness(now.hessian),
    "edge": lambda now: edge(now.hessian, now.model, now.optimizer),
    "trace": lambda now: now.curvature.trace,
    "excess": lambda now: now.curvature.excess,
    "t": lambda now: now.curvature.t,
}


def _checked(
    optimizer: Optimizer,
    measure: str | Sequence[str] | Mapping[str, str | Measure],
    every: int,
    most_share: float | None,
) -> dict[str, Callable[[_Moment], Any]]:
    """Check all arguments; returns what is measured, by name."""
    if not hasattr(optimizer, "register_step_post_hook"):
        raise UseError(
            f"optimizer is a {type(optimizer).__name__}, which does not report its steps: give a "
            "torch.optim.Optimizer"
        )
    whole("every", every, least=1)
    if most_share is not None and not 0 < most_share < 1:
        raise UseError(f"most_share is {most_share!r}: give a share of all time between 0 and 1, such as 0.1")
    if isinstance(measure, str):
        measure = [measure]
    pairs = measure.items() if isinstance(measure, Mapping) else [(name, name) for name in measure]
    found: dict[str, Callable[[_Moment], Any]] = {}
    for name, one in pairs:
        if callable(one):
            found[name] = partial(_own, one)
        elif one in NAMED:
            found[name] = NAMED[one]
        else:
            raise UseError(
                f"measure {name!r} is {one!r}: give one of {', '.join(NAMED)}, or a function "
                "(model, loss, batch) -> number"
            )
    if not found:
        raise UseError(f"measure is empty: give some of {', '.join(NAMED)}")
    return found


def _own(measure: Measure, now: _Moment) -> Any:
    with _undisturbed(now.model):
        return measure(now.model, now.loss, now.batch)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore modes, gradients, buffers and random numbers at the end; no compiled code inside."""
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # A DDP replica that is called with gradients waits for the backward pass of the others.
    with untouched_randomness(), uncompiled(model), torch.no_grad():
        try:
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, grad in grads:
                parameter.grad = grad
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _clock(objective: Objective) -> Callable[[], float]:
    """A clock that starts at 0, with the GPU synchronised."""

    def now() -> float:
        if objective.device.type == "cuda":
            torch.cuda.synchronize(objective.device)
        return time.perf_counter()

    start = now()
    return lambda: now() - start


@exclusive()
def _measure(
    tracking: Tracking,
    measures: Mapping[str, Callable[[_Moment], Any]],
    optimizer: Optimizer,
    objective: Objective,
    clock: Callable[[], float],
    *,
    strict: bool,
) -> None:
    start = clock()
    moment = _Moment(objective, optimizer)
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, one in measures.items():
        try:
            values[name], errors[name] = objective.together(lambda: _number(name, one(moment)))  # noqa: B023
        except Exception as error:  # a failed measurement must not end training
            if strict:
                raise
            values[name], errors[name], notes[name] = math.nan, math.nan, in_one_line(error)
    end = clock()
    row = Measurement(tracking.steps, values, errors, end - start, end, notes)
    tracking.rows = (*tracking.rows, row)
    tracking.measuring += row.seconds
    tracking.seconds = end


def _number(name: str, found: Any) -> tuple[float, float]:
    """The value and the error, nan if there is none, of what a measure returned."""
    value = getattr(found, "value", found)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return float(value), float(getattr(found, "error", math.nan))
    except (TypeError, ValueError):
        raise UseError(
            f"measure {name!r} returned {described(found)}: return a number, or an object with .value"
        ) from None


def _affordable(tracking: Tracking, objective: Objective, clock: Callable[[], float]) -> bool:
    """Would one more measurement stay within the share, on all ranks?"""
    if tracking.most_share is None:
        return True
    expected = tracking.rows[-1].seconds
    fits = tracking.measuring + expected <= tracking.most_share * (clock() + expected)
    told = objective.averaged(lambda: torch.tensor(float(fits), device=objective.device))
    return bool(told > 0.999)


@exclusive()
def _time_gradient(objective: Objective) -> float:
    """Seconds for one gradient: the least of a few."""
    took = []
    for _ in range(TIMED):
        clock = _clock(objective)
        objective.gradient()
        took.append(clock())
    return min(took)


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, not compiled if a whole training step is."""
    # Without dynamo nothing can be compiled, and importing it takes seconds.
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook
