"""Measure every so many steps of a training loop that knows nothing of it.

The optimizer tells when a step was made (`register_step_post_hook`), so the loop stays as it is, with
`torch.compile` and DistributedDataParallel. What is measured is the model itself, uncompiled, on a batch of
its own; under DDP all ranks measure at the same steps.

With `most_share` p a measurement that is due is left out while it would bring the time spent on measuring
above its share of all time since the start:

    (measured so far + the last measurement) > p·(time so far + the last measurement)

So `every` is stretched as far as it takes, and no further when steps get slower.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from theodolite.core.batches import Batches
from theodolite.core.building import in_one_line
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.files import html_path, plain, replacing, write_whole
from theodolite.probes.curvature.measures import Measure, Moment, find_measures, number
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.replicas import together

TIMED = 5
"""Gradients that are taken at the start, to know what one takes."""


@dataclass(frozen=True)
class Row:
    """What was measured after one step."""

    step: int
    values: Mapping[str, float]
    """nan where a measure failed."""
    errors: Mapping[str, float]
    """One standard error, or a bound, of those that say one."""
    seconds: float
    """That measuring took."""
    at: float
    """Seconds since the start."""
    notes: Mapping[str, str]
    """By measure, why it failed."""


class Tracking:
    """Measurements during training. Made by `track`, and grows while training goes on."""

    def __init__(self, names: Sequence[str], every: int, most_share: float | None) -> None:
        self.names, self.every, self.most_share = tuple(names), every, most_share
        self.rows: tuple[Row, ...] = ()
        self.steps = 0
        """Of the optimizer, so far."""
        self.left_out = 0
        """Measurements that `most_share` did not allow."""
        self.gradient_seconds = math.nan
        """That one gradient of the loss takes on the same batch."""
        self.seconds = 0.0
        """Since the start; at the end, of the whole block."""
        self.measuring = 0.0
        """Of these, spent here."""

    @property
    def share(self) -> float:
        """Of all time, the part that was spent on measuring."""
        return self.measuring / self.seconds if self.seconds else math.nan

    @property
    def gradients(self) -> float:
        """What a measurement costs, in gradients on the same batch: the median."""
        if not self.rows:
            return math.nan
        ordered = sorted(row.seconds for row in self.rows)
        return ordered[len(ordered) // 2] / self.gradient_seconds

    def values(self, name: str) -> tuple[float, ...]:
        """One measure, in the order of the rows."""
        if name not in self.names:
            raise UseError(f"{name!r} was not measured: it is one of {', '.join(self.names)}")
        return tuple(row.values[name] for row in self.rows)

    @property
    def cost(self) -> str:
        """What it cost, in words."""
        said = (
            f"measured {len(self.rows)} times in {self.steps} steps: {self.measuring:.2g} s of "
            f"{self.seconds:.2g} s ({100 * self.share:.1f} %), {self.gradients:.3g} gradients each"
        )
        if self.left_out:
            said += f"; {self.left_out} left out, to stay within {100 * (self.most_share or 0):g} %"
        return said

    def to_csv(self, path: str | Path) -> Path:
        """Write a line for each measurement: step, values, errors, seconds. What is not finite is empty."""
        path = Path(path).expanduser()
        columns = ["step", *self.names, *(f"{name}.error" for name in self.names), "seconds", "at"]
        try:
            with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as stream:
                writer = csv.writer(stream, lineterminator="\n")
                writer.writerow(columns)
                for row in self.rows:
                    numbers = [
                        *(row.values[name] for name in self.names),
                        *(row.errors[name] for name in self.names),
                        *(row.seconds, row.at),
                    ]
                    writer.writerow([row.step, *(plain(one) for one in numbers)])
        except OSError as error:
            raise UseError(f"{path} cannot be written: {error.strerror or error}") from error
        return path

    def save(self, path: str | Path) -> Path:
        """Write one self-contained page with a figure of every measure, and the rows as JSON beside it."""
        from theodolite.probes.curvature.tracking_page import page

        path = html_path(path, kind="tracking")
        write_whole(path, page(self))
        found = {"tracking": {"every": self.every, "steps": self.steps, "cost": self.cost}, "rows": self.rows}
        write_whole(path.with_suffix(".json"), json.dumps(plain(found), indent=1, allow_nan=False))
        return path

    def __str__(self) -> str:
        wide = [max(9, len(name)) for name in self.names]
        lines = [
            "  ".join(["  step", *(f"{name:>{width}}" for name, width in zip(self.names, wide, strict=True))])
        ]
        for row in self.rows:
            cells = [f"{row.values[name]:>{width}.4g}" for name, width in zip(self.names, wide, strict=True)]
            lines.append("  ".join([f"{row.step:>6}", *cells]))
        failed = {f"{name}: {why}": None for row in self.rows for name, why in row.notes.items()}
        return "\n".join([*lines, *failed, self.cost])


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
    """Measure at the start, and after every so many steps of the optimizer, as long as the block lasts.

    Args:
        model: what is trained; compiled, or a DistributedDataParallel, too.
        loss: `loss(logits, targets) -> scalar`.
        batch: what to measure on, the same each time: a pair, or several. Under DDP each rank gives its own.
        optimizer: whose steps are counted.
        measure: names: `loss`, `gradient_norm`, `sharpness` (λ_max), `edge` (lr·λ_max/2 of SGD, with its
            momentum and groups: 1 is the edge of stability), `trace`, `excess` and `t` (in 50 random
            directions); or a dict of such, and of functions `(model, loss, batch) -> number`. They are called
            without gradients, and what they do to modes, buffers and random numbers is undone.
        every: steps between measurements.
        most_share: which part of all time measuring may take, as 0.1; a measurement that would take more is
            left out.

    A measure that fails at the start raises; one that fails later is nan in its row, with a note, and
    training goes on. The hook is gone after the block.

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
    clock = _Clock(objective)
    tracking.gradient_seconds = together(model, lambda: _time_gradient(objective))
    tracking.measuring = clock()
    _measure(tracking, measures, model, optimizer, objective, clock, strict=True)

    def after_step(*_: Any) -> None:
        tracking.steps += 1
        if tracking.steps % every == 0:
            if _affordable(tracking, objective, clock):
                _measure(tracking, measures, model, optimizer, objective, clock, strict=False)
            else:
                tracking.left_out += 1

    hook = optimizer.register_step_post_hook(_uncompiled(after_step))
    try:
        yield tracking
    finally:
        hook.remove()
        tracking.seconds = clock()


class _Clock:
    """Seconds since it was made, when all that a GPU was given is done."""

    def __init__(self, objective: Objective) -> None:
        self._device = objective.device
        self._start = 0.0
        self._start = self()

    def __call__(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._start


@exclusive()
def _measure(
    tracking: Tracking,
    measures: Mapping[str, Callable[[Moment], Any]],
    model: nn.Module,
    optimizer: Optimizer,
    objective: Objective,
    clock: _Clock,
    *,
    strict: bool,
) -> None:
    start = clock()
    moment = Moment(model, objective.given_loss, objective.batches, optimizer)
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, one in measures.items():
        try:
            values[name], errors[name] = together(model, lambda: number(name, one(moment)))  # noqa: B023
        except Exception as error:  # training is worth more than a measurement
            if strict:
                raise
            values[name], errors[name], notes[name] = math.nan, math.nan, in_one_line(error)
    end = clock()
    row = Row(tracking.steps, values, errors, end - start, end, notes)
    tracking.rows, tracking.measuring, tracking.seconds = (
        (*tracking.rows, row),
        tracking.measuring + row.seconds,
        end,
    )


def _affordable(tracking: Tracking, objective: Objective, clock: _Clock) -> bool:
    """Would one more measurement keep within the share? All ranks have to say so."""
    if tracking.most_share is None:
        return True
    expected = tracking.rows[-1].seconds
    fits = tracking.measuring + expected <= tracking.most_share * (clock() + expected)
    told = objective.averaged(lambda: torch.tensor(float(fits), device=objective.device))
    return bool(told > 0.999)


@exclusive()
def _time_gradient(objective: Objective) -> float:
    """Seconds that one gradient takes: the least of a few, as what else a machine does only adds to it."""
    clock = _Clock(objective)
    took = math.inf
    for _ in range(TIMED):
        start = clock()
        chosen = objective.stand_ins(grad=True)
        with objective.conditions():
            for batch, share in objective.draw():
                value = share * objective.loss(objective.forward(chosen, batch), batch[1])
                if not value.requires_grad:
                    raise UseError("the loss does not depend on the model's parameters")
                torch.autograd.grad(value, list(chosen.values()), allow_unused=True)
        took = min(took, clock() - start)
    return took


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook as something that `torch.compile` leaves alone, where a whole training step is compiled."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled; importing it takes seconds
        return hook
    disabled: Callable[..., None] = torch.compiler.disable(hook)
    return disabled


def _checked(
    optimizer: Optimizer,
    measure: str | Sequence[str] | Mapping[str, str | Measure],
    every: int,
    most_share: float | None,
) -> dict[str, Callable[[Moment], Any]]:
    """By name, what is measured, with all other arguments found good."""
    if not hasattr(optimizer, "register_step_post_hook"):
        raise UseError(
            f"optimizer is a {type(optimizer).__name__}, which does not tell when a step was made: give a "
            "torch.optim.Optimizer"
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UseError(f"every is {every!r}: it has to be a whole number of at least 1")
    if most_share is not None and not 0 < most_share < 1:
        raise UseError(f"most_share is {most_share!r}: it is a part of all time, as 0.1")
    return find_measures(measure)
