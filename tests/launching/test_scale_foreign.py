"""`scale` measures what will be launched: the plan's optimizer, and the batch of the target."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import theodolite as th
from theodolite import Size, UseError
from theodolite.launching import prepare, scale

RATES = (2.0**-8, 2.0**-7, 2.0**-6)


@pytest.mark.parametrize(
    ("ratio", "tried"), [(1, {1}), (1.5, {1, 1.5}), (3, {1, 2, 3}), (4, {1, 2, 4}), (16, {1, 2, 4})]
)
def test_batches_are_tried_up_to_that_of_the_target_whatever_its_ratio(
    ratio: float, tried: set[float]
) -> None:
    workload = th.workload("mlp-mixture")
    target = Size(128, 2, batch=int(ratio * workload.usual_batch), tokens=10**7)
    stage = prepare(workload, target, budget=1.0, base=Size(64, 2), rates=RATES).stage("rate")
    assert {size.batch for size in stage.sizes} == {one * workload.usual_batch for one in tried}


def test_a_device_that_is_not_there_is_refused_before_anything_is_timed() -> None:
    with pytest.raises(UseError, match="device is 'gpu'"):
        prepare(th.workload("mlp-mixture"), Size(128, 2, tokens=10**7), budget=1.0, rates=RATES, device="gpu")


def test_the_survey_leaves_the_users_optimizer_aside_as_the_plans_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain AdamW fails the audit of its parameterization, which the plan mends."""

    class Surveyed(Exception):
        pass

    def survey(workload: th.Workload, **_: object) -> None:
        assert workload.optimizer is None
        assert workload.schedule is None
        raise Surveyed

    monkeypatch.setattr(importlib.import_module("theodolite.launching.scale"), "survey", survey)
    own = replace(
        th.workload("mlp-mixture"), optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    with pytest.raises(Surveyed):
        scale(own, Size(128, 2, tokens=10**7), budget=1.0, out=tmp_path)
