"""What a run is judged by: evaluations along training, the metrics of its workload, steps to a level."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.core.building import evaluated, in_one_line, untouched_randomness
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.core.metric_names import EVALUATED, HELD_OUT_LOSS
from theodolite.fleet.run import Outcome, Run
from theodolite.planning import Plan
from theodolite.workloads import StepsTo, Workload
from theodolite.workloads.metrics import check_level

Steps = Mapping[str, Sequence[tuple[int, float]]]
"""By name of a series, its (step, value) pairs."""
AFTER = "evaluated after"
"""The series of steps at which there were evaluations, beside their values."""


@dataclass(frozen=True)
class Evaluations:
    """When a run evaluates its network, and whether for more than the held-out loss.

    Evaluations are made after 0, `every`, 2·`every`, … steps of training, and after all.

    >>> from theodolite import Size, workload
    >>> run = Run("mlp-mixture", Size(32, 2), 0.1, parameterization="standard", steps=25, evaluate_every=10)
    >>> found = Evaluations.of(run, workload("mlp-mixture"))
    >>> found.steps, found.names
    ((0, 10, 20, 25), ('held-out loss',))
    """

    every: int
    """0: after training alone."""
    num_steps: int
    """Of training."""
    accuracy: bool

    @staticmethod
    def of(run: Run, workload: Workload, *, metrics: bool = True) -> Evaluations:
        """Those that the run asks for, and with `metrics` those that the metrics of its workload need."""
        needing = [each for each in workload.metrics.values() if isinstance(each, StepsTo)] if metrics else []
        every = run.evaluate_every or min((each.every for each in needing), default=0)
        accuracy = "accuracy" in run.probes or any(each.series != HELD_OUT_LOSS for each in needing)
        return Evaluations(every, run.steps, accuracy)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the series that are recorded along training."""
        return () if not self.every else EVALUATED if self.accuracy else (HELD_OUT_LOSS,)

    @property
    def steps(self) -> tuple[int, ...]:
        """How many steps of training precede each evaluation."""
        return (*range(0, self.num_steps, self.every), self.num_steps) if self.every else (self.num_steps,)

    def due(self, step: int) -> bool:
        """Is there one along training after so many steps?"""
        return self.every > 0 and step % self.every == 0

    def fit(self, values: Mapping[str, Sequence[float]]) -> bool:
        """Are the values of a run that was stopped those of these evaluations, and of no others?"""
        made = [step for step in self.steps if step < len(values.get("loss", ()))] if self.every else []
        names = tuple(name for name in EVALUATED if name in values)
        return list(values.get(AFTER, [])) == made and names == (self.names if made else ())

    def series(self, values: Mapping[str, Sequence[float]], *, before: int) -> dict[str, Any]:
        """By name the (step, value) pairs of the evaluations before a step."""
        return {
            name: tuple(
                (step, value) for step, value in zip(self.steps, values[name], strict=False) if step < before
            )
            for name in self.names
        }


def first_step(
    series: Outcome | Steps, name: str, *, at_least: float | None = None, at_most: float | None = None
) -> int | None:
    """The first recorded step at which a series reaches a level; None if it never does.

    Args:
        series: an outcome, its `metrics`, or what `Ledger.metrics` gives.
        name: of the series, such as `accuracy`.
        at_least: the level of a series that rises.
        at_most: the level of a series that falls. Give one of the two.

    >>> series = {"accuracy": [(0, 0.1), (50, 0.4), (100, 0.97), (150, 0.93)]}
    >>> first_step(series, "accuracy", at_least=0.95)
    100
    >>> first_step(series, "accuracy", at_least=0.99) is None
    True
    """
    recorded = series.metrics if isinstance(series, Outcome) else series
    check_level(f"the level of {name!r}", at_least, at_most)
    if name not in recorded:
        raise UseError(
            f"no series {name!r} was recorded: there is {', '.join(recorded) or 'none'}. Evaluations along "
            "training are recorded by Run(…, evaluate_every=…), accuracy by probes=('accuracy',)"
        )
    for step, value in sorted(recorded[name]):
        if value >= at_least if at_least is not None else at_most is not None and value <= at_most:
            return step
    return None


def metrics_of(model: nn.Module, workload: Workload, outcome: Outcome) -> dict[str, float]:
    """The values of the metrics of a workload for a trained network."""
    found = {}
    for name, metric in workload.metrics.items():
        if isinstance(metric, StepsTo):
            step = first_step(outcome, metric.series, at_least=metric.at_least, at_most=metric.at_most)
            found[name] = math.inf if step is None else float(step)
        else:
            with aside(model, outcome.run.seed), _same_parameters(model):
                model.zero_grad()
                found[name] = _measured(model, workload, name, metric)
    return found


def _measured(model: nn.Module, workload: Workload, name: str, metric: Callable[[nn.Module], float]) -> float:
    """The value of one metric; whatever is wrong with it becomes a `UseError` with its name."""
    who = f"workload {workload.name!r}: metric {name!r}"
    try:
        found: Any = metric(model)
    except torch.OutOfMemoryError:
        raise  # an engine tries again with fewer models
    except (Exception, SystemExit) as error:
        raise UseError(
            f"{who} raised {in_one_line(error)}. Repair it: a run needs all its metrics"
        ) from error
    value = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UseError(f"{who} returned {described(found)}, which is no real number. Return a float")
    try:
        value = float(value)
    except OverflowError:
        value = math.nan
    if math.isnan(value) or value == -math.inf:
        raise UseError(
            f"{who} returned {found}, by which runs cannot be compared. Return a finite number, or inf for "
            "the worst there is"
        )
    return value


@contextlib.contextmanager
def aside(model: nn.Module, seed: int) -> Iterator[None]:
    """Eval mode without gradients, random numbers from a seed; modes, buffers and generators are restored."""
    held = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with untouched_randomness(seed), torch.no_grad(), evaluated(model):
        try:
            yield
        finally:
            for module, name, buffer, values in held:
                buffer.copy_(values)
                module._buffers[name] = buffer


@contextlib.contextmanager
def averaged(plan: Plan, model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Within, the averages of parameters, if the optimizer evaluates those; then exactly the ones before."""
    if not averages(plan):
        yield
        return
    with _same_parameters(model):
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()


def averages(plan: Plan) -> bool:
    """Does its optimizer evaluate averages of the parameters?"""
    return any(spec.averages for spec in plan.specs)


@contextlib.contextmanager
def _same_parameters(model: nn.Module) -> Iterator[None]:
    """Restore the values of all parameters at the end."""
    held = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in held:
                parameter.copy_(values)


def with_readings(outcome: Outcome, readings: Mapping[str, Any]) -> Outcome:
    """The outcome with further readings."""
    return dataclasses.replace(outcome, readings={**outcome.readings, **readings})


def share_right(output: Tensor, targets: Any) -> Tensor:
    """The fraction of targets whose logit is the largest.

    >>> share_right(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """
    whole = isinstance(targets, Tensor) and not (targets.is_floating_point() or targets.is_complex())
    if not whole or targets.shape != output.shape[:-1]:
        raise UseError(
            f"accuracy is of whole numbers, one for each row of logits {tuple(output.shape)}, and the "
            f"workload's targets are {described(targets)}: leave out the probe 'accuracy' and "
            "metrics of it"
        )
    return (output.argmax(-1) == targets).float().mean()
