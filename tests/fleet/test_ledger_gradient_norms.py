"""Gradient norms out of a ledger, against those taken by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from theodolite import Size, fleet
from theodolite.core.errors import UseError
from theodolite.fleet import Ledger, Run, gradient_norms
from theodolite.workloads import workload

FIRST = Run(
    "mlp-mixture",
    Size(8, 1),
    lr=0.05,
    parameterization="standard",
    optimizer="sgd",
    schedule="constant",
    steps=12,
    held_out=1,
    probes=("gradient",),
)
COARSE = dataclasses.replace(FIRST, every=4)
SILENT = dataclasses.replace(FIRST, probes=())
WILD = dataclasses.replace(FIRST, lr=1e9)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("norms")
    with Ledger.open(path, name="norms", spec={}) as opened:
        fleet.conduct([FIRST, COARSE, SILENT, WILD], opened, engine="serial")
    return path


def test_one_norm_for_each_step(ledger: Path) -> None:
    found = gradient_norms(ledger, FIRST.identity)
    data = workload("mlp-mixture")
    from theodolite.fleet.plans import planned

    model = planned(FIRST, data).build(FIRST.seed)
    expected = []
    for step in range(12):
        model.zero_grad()
        data.evaluate(model, data.draw(0, step)).backward()
        expected.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))  # type: ignore[misc]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    assert found == pytest.approx(expected, rel=1e-4)


def test_norms_between_those_recorded_lie_on_lines(ledger: Path) -> None:
    every, some = gradient_norms(ledger, FIRST.identity), gradient_norms(ledger, COARSE.identity[:9])
    recorded = [0, 4, 8, 11]
    assert some == pytest.approx(np.interp(range(12), recorded, [every[step] for step in recorded]))


def test_what_cannot_be_followed_is_refused(ledger: Path) -> None:
    for run, message in (
        (None, "has 3 runs with gradient norms: say which by run="),
        (SILENT.identity, "recorded no gradient norms: make one with"),
        (WILD.identity, "diverged at step"),
        ("no such", "has no run whose identity begins with 'no such'"),
    ):
        with pytest.raises(UseError, match=message):
            gradient_norms(ledger, run)


def test_the_only_run_with_norms_need_not_be_named(tmp_path: Path) -> None:
    with Ledger.open(tmp_path, name="norms", spec={}) as opened:
        fleet.conduct([FIRST, SILENT], opened, engine="serial")
    with Ledger.read(tmp_path) as read:
        assert gradient_norms(read) == gradient_norms(tmp_path, FIRST.identity)
