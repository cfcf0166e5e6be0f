"""Metrics of a workload: what is none is refused when the workload is made."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite import UseError, Workload
from theodolite.workloads import StepsTo


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)


def judged(metrics: Any) -> Workload:
    return Workload(
        "mine", lambda width, depth: nn.Linear(2, 2), batch, nn.functional.cross_entropy, metrics=metrics
    )


@pytest.mark.parametrize(
    "metrics, said",
    [
        ([len], r"workload 'mine': metrics is \[<built-in function len>\]. Give a dict of functions by name"),
        ({"lr": len}, "a metric is named 'lr', which is empty or means something else in a ledger"),
        ({"held_out": len}, "is named 'held_out'"),
        ({"accuracy": len}, "is named 'accuracy'"),
        ({"held-out loss": len}, "is named 'held-out loss'"),
        ({"options.betas": len}, "is named 'options.betas'"),
        ({"": len}, "is named ''"),
        ({"error ": len}, "is named 'error '"),
        ({"a\0b": len}, "is named 'a"),
        ({3: len}, "is named 3"),
        ({"iterations": 3.0}, "metric 'iterations' is 3.0, which cannot be called. Give a function"),
    ],
)
def test_what_is_no_metric_is_refused(metrics: Any, said: str) -> None:
    with pytest.raises(UseError, match=said):
        judged(metrics)


def test_metrics_are_those_of_when_the_workload_was_made() -> None:
    given = {"iterations": lambda model: 3.0}
    workload = judged(given)
    given["lr"] = lambda model: 4.0
    assert list(workload.metrics) == ["iterations"]
    assert isinstance(hash(workload), int)  # plans are kept by workload


@pytest.mark.parametrize(
    "given, said",
    [
        ({"series": "loss", "at_most": 0.1}, "series is 'loss'"),
        ({"series": "accuracy"}, r"StepsTo\('accuracy'\): at_least is None and at_most is None: give one"),
        ({"series": "accuracy", "at_least": math.nan}, r"at_least is nan: give a finite number"),
        ({"series": "accuracy", "at_least": "95 %"}, r"at_least is '95 %': give a finite number"),
        ({"series": "accuracy", "at_least": True}, r"at_least is True: give a finite number"),
        ({"series": "accuracy", "at_least": 0.9, "every": 0}, "every is 0"),
    ],
)
def test_steps_to_no_level_are_refused(given: Any, said: str) -> None:
    with pytest.raises(UseError, match=said):
        StepsTo(**given)
