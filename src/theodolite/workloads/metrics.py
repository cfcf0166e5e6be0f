"""Metrics: what a trained network is judged by beside its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from theodolite.core.arguments import is_number, one_of, whole
from theodolite.core.errors import UseError
from theodolite.core.metric_names import EVALUATED, is_free


@dataclass(frozen=True)
class StepsTo:
    """A metric: the number of training steps after which a series reaches a level; infinite if it never does.

    The series is recorded along training, so a `StepsTo` among the metrics of a workload makes its runs
    evaluate the network. Give either `at_least` or `at_most`.

    Args:
        series: `accuracy` or `train accuracy`, of whole-numbered targets, or `held-out loss`.
        at_least: the level of a series that rises.
        at_most: the level of a series that falls.
        every: steps between evaluations; the least counts where a workload has several such metrics, and
            the `evaluate_every` of a run counts before all. The metric is a multiple of it, or the number
            of all steps.

    >>> StepsTo("accuracy", at_least=0.95, every=50)
    StepsTo(series='accuracy', at_least=0.95, at_most=None, every=50)
    >>> StepsTo("accuracy", at_least=0.95, at_most=0.5)
    Traceback (most recent call last):
    theodolite.UseError: StepsTo('accuracy'): at_least is 0.95 and at_most is 0.5: give one of them
    """

    series: str
    _: KW_ONLY
    at_least: float | None = None
    at_most: float | None = None
    every: int = 10

    def __post_init__(self) -> None:
        one_of("series", self.series, EVALUATED)
        check_level(f"StepsTo({self.series!r})", self.at_least, self.at_most)
        whole("every", self.every, least=1)


Metric = Callable[[nn.Module], float] | StepsTo
"""`metric(model) -> float`, or a `StepsTo`."""


def check_level(who: str, at_least: float | None, at_most: float | None) -> None:
    """Refuse both levels, none, and one that is no finite number."""
    levels = {"at_least": at_least, "at_most": at_most}
    given = {name: level for name, level in levels.items() if level is not None}
    if len(given) != 1:
        raise UseError(f"{who}: at_least is {at_least!r} and at_most is {at_most!r}: give one of them")
    ((name, level),) = given.items()
    if not is_number(level):
        raise UseError(f"{who}: {name} is {level!r}: give a finite number")


def check_metrics(workload: str, metrics: Any) -> dict[str, Metric]:
    """The metrics of a workload by name, as a new dict; raises `UseError` for a bad name or value."""
    if not isinstance(metrics, Mapping):
        raise UseError(f"workload {workload!r}: metrics is {metrics!r}. Give a dict of functions by name")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not is_free(name):
            raise UseError(
                f"workload {workload!r}: a metric is named {name!r}, which is empty or means something "
                "else in a ledger. Give it another name, such as 'test error'"
            )
        if not callable(metric) and not isinstance(metric, StepsTo):
            raise UseError(
                f"workload {workload!r}: metric {name!r} is {metric!r}, which cannot be called. Give a "
                "function metric(model) -> float, or a StepsTo"
            )
    return dict(metrics)
