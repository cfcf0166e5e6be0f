"""What an audit says of training, beside what it read."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from theodolite.core.size import Size
from theodolite.probes.scaling.coordinates import Slope
from theodolite.surveying import Audit, audit
from theodolite.surveying.auditing import report
from theodolite.surveying.auditing.exponents import Series
from theodolite.workloads import Workload

from .hand_made import batch as gpt_batch
from .hand_made import building, loss, recipe
from .hand_made import make_optimizer as gpt_optimizer
from .test_faults import FLAT, as_power, weight


class Rows(nn.Module):
    """muP by hand, with the initial values of `nn.Linear`: biases and the readout start at 1/√width."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(8, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).relu()).relu()
        return self.last(x) * 64 / x.shape[-1]


def make_optimizer(model: nn.Module) -> AdamW:
    middle = model.middle.weight
    others = [tensor for tensor in model.parameters() if tensor is not middle]
    hidden = {"params": [middle], "lr": 0.01 * 64 / len(middle)}
    return AdamW([hidden, {"params": others}], lr=0.01, weight_decay=0.0)


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def test_biases_and_readouts_that_start_small_do_not_contradict_the_reading() -> None:
    workload = Workload("rows", Rows, batch, functional.cross_entropy, Size(64, 1))
    found = audit(workload, optimizer=make_optimizer, seeds=1)
    assert found.right
    assert all("keep their size" in said for said in found.trained), found.trained


@pytest.fixture(scope="module")
def right() -> Audit:
    """A right parameterization, trained for one step."""
    workload = Workload("rows", Rows, batch, functional.cross_entropy, Size(64, 1))
    return audit(workload, optimizer=make_optimizer, widths=[64, 128], seeds=1, steps=1)


@pytest.mark.parametrize(
    ("by_values", "by_tensors", "disagree"),
    [
        ((), (), False),
        ((("width", 0.4),), (), False),  # a few steps of small networks
        ((), (("width", 0.42),), False),
        ((("width", 0.4),), (("width", 0.42),), True),  # both checks
        ((("width", 0.5),), (), True),
        ((("depth", 0.5),), (), False),  # depths of a few blocks are further from the limit
        ((), (("depth", 0.8),), True),
        ((("width", math.inf),), (), True),
    ],
)
def test_one_check_alone_contradicts_the_reading_only_if_it_is_far_off(
    right: Audit, monkeypatch: pytest.MonkeyPatch, by_values: Any, by_tensors: Any, disagree: bool
) -> None:
    assert right.right
    monkeypatch.setattr(report, "_doubts", lambda *_: (by_values, by_tensors))
    assert any("Reading and training disagree" in said for said in right.trained) is disagree


def test_what_grows_counts_along_both_axes_and_what_vanishes_only_as_a_change_along_the_width() -> None:
    def slope(quantity: str, axis: Any, value: float) -> Slope:
        return Slope(quantity, axis, value, low=value, high=value, expected=0.0)

    counted = [
        slope("stream", "width", 0.5),
        slope("stream", "depth", 0.5),
        slope("change of logits", "width", -0.5),
        slope("stream", "width", math.nan),
    ]
    passed = [slope("stream", "depth", -0.5), slope("change of logits", "depth", -0.5)]
    checked: Any = SimpleNamespace(bent=lambda tolerance: tuple(counted + passed))
    assert list(map(str, report._bent(checked))) == list(map(str, counted))


def test_the_start_of_a_few_entries_is_chance() -> None:
    def row(name: str, entries: int, off: float) -> Any:
        return SimpleNamespace(name=name, pattern=name, entries=entries, off=lambda _: off)

    def broken(*rows: Any) -> list[tuple[str, str]]:
        checked: Any = SimpleNamespace(
            rows=rows, broken=lambda condition, _: rows if condition == "start" else ()
        )
        return [(what, worst.name) for what, worst, _ in report._broken(checked, frozenset())]

    assert broken(row("bias", 32, 100.0), row("weight", 4096, 1 / 3), row("other", 4096, 2.0)) == [
        ("the start", "weight")
    ]
    assert broken(row("bias", 32, 100.0)) == []


def test_a_start_that_is_off_within_its_noise_is_let_pass() -> None:
    off = weight(init=as_power(0.08))
    assert report._passed_starts([off]) == frozenset()
    assert report._passed_starts([replace(off, noise=0.05)]) == {"w"}


@pytest.mark.parametrize(
    ("mistake", "options", "tensor", "said"),
    [
        ("readout not multiplied", {}, "head.weight", "start and steps 10× too large"),
        ("readout not multiplied", {"tied": True}, "wte.weight", "logits 10× too large"),
        ("decay times lr twice", {}, "blocks.*.mlp.up.weight", "decay 100× too small"),
        ("decay left alone", {}, "blocks.*.mlp.up.weight", "decay 10× too small"),
        ("hidden lr not divided", {}, "blocks.*.mlp.up.weight", "steps 10× too large"),
        (None, {}, "blocks.*.mlp.up.weight", "right"),
    ],
)
def test_the_last_column_says_what_is_off_at_ten_times_the_size(
    mistake: str | None, options: dict[str, Any], tensor: str, said: str
) -> None:
    made = recipe(*([mistake] if mistake else []), **options)
    workload = Workload("mine", building(made), gpt_batch, loss, Size(32, 2))
    found = audit(workload, optimizer=gpt_optimizer, widths=[32, 64], depths=[2], train=False)
    assert {row[0]: row[-1] for row in report.axis_table(found.width, "width").rows}[tensor] == said


def test_the_last_column_says_what_eps_limits_at_ten_times_the_size() -> None:
    held = weight(eps=Series(FLAT, (1.0, 0.5, 0.25)), over_eps=50.0)
    said = {times: report._effect(replace(held, over_eps=times)) for times in (math.nan, 200.0, 50.0)}
    assert said == {math.nan: "right", 200.0: "right", 50.0: "limited by eps"}
