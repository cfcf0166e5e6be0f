"""Noise and batch size: a batch far below the critical one is a note, and nothing unknown is claimed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.probes.noise.estimates import Interval
from theodolite.probes.noise.result import Noise, tensor_noise
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Finding
from theodolite.surveying.sections import noise as noise_section
from theodolite.surveying.sections.noise import judge, section
from theodolite.surveying.short_training import ShortTraining
from theodolite.workloads import Workload

P = 16


def regression(seed: int, step: int, spread: float = 0.1, examples: int = 64) -> Batch:
    """`y = xᵀ1 + ε` with inputs N(0, I) and noise of a standard deviation."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    inputs = torch.randn(examples, P, generator=generator)
    noise = spread * torch.randn(examples, 1, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) + noise


class Sum(nn.Module):
    """A linear map, as the sum of `width` equal ones, and nothing else that matters."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(P, width, bias=False)
        self.leave = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.enter(x))
        return found


def finding(**changes: Any) -> Finding:
    workload = Workload("regression", Sum, regression, F.mse_loss, Size(8, 1))
    workload = replace(workload, **changes)
    (found,) = section.run(SurveyContext(workload, workload.size))
    assert found.code == "TH801"
    return found


def planted(critical: float, low: float, high: float | None, batch: int = 32) -> Noise:
    whole = tensor_noise("all", 10, Interval(critical, 1.0, 0.9 if high else -0.1, 1.1, low, high))
    return Noise(whole, (whole,), batch, 512, 16, 32, 0, "", (), ())


TRAINED = ShortTraining(nn.Linear(1, 1), Size(8, 1), 2**-8, (2.0, 1.0))


def test_a_regression_has_at_the_start_the_critical_batch_of_its_closed_form() -> None:
    found = finding()
    # Of a linear map with residual d the gradient 2(xᵀd − ε)x has Tr Σ/|g|² = p + 1 for small ε; of a product
    # of two maps nearly so, as the second has one gradient in the same direction.
    numbers = found.evidence.numbers
    assert float(numbers["critical batch at the start"]) == pytest.approx(P + 1, rel=0.5)  # type: ignore[arg-type]
    assert numbers["examples in a step"] == 64
    assert found.level == "ok"
    assert "times the critical batch" in found.sentence
    assert found.sentence.startswith("After 8 steps of AdamW, a step of 64 examples")
    assert [row["tensor"] for row in found.evidence.rows] == ["all", "enter.weight", "leave.weight"]


def test_noise_in_the_targets_makes_small_batches_a_note() -> None:
    found = finding(batch=lambda seed, step: regression(seed, step, spread=10.0, examples=4))
    assert (found.level, found.title) == ("note", "Larger batches save steps")
    assert "a step of 4 examples is 1/" in found.sentence
    assert "NoiseMeter" in found.remedy


@pytest.mark.parametrize(
    "found, level",
    [
        (planted(640, 410, 1100), "note"),
        (planted(200, 120, 300), "ok"),  # it may be less than four times the batch
        (planted(30, 20, 40), "ok"),
        (planted(2, 1, 3), "ok"),
        (planted(900, 300, None), "note"),  # unknown above, but surely far above the batch
        (planted(900, 60, None), "ok"),
    ],
)
def test_it_is_a_note_only_if_the_critical_batch_is_surely_four_times_the_batch(
    found: Noise, level: str
) -> None:
    judged = judge(planted(12, 10, 14), TRAINED, found)
    assert judged.level == level
    assert judged.sentence.endswith(
        "At the start the critical batch is 12. Over a training it usually grows."
    )
    if not found.known:
        assert "cannot be told from 0" in judged.sentence
        if level == "ok":
            assert "--deep" in judged.remedy


def test_the_sentence_of_the_issue() -> None:
    judged = judge(planted(12, 10, 14), TRAINED, planted(640, 410, 1100))
    assert judged.sentence.startswith(
        "After 2 steps of AdamW, a step of 32 examples is 1/20 of the critical batch 640 (410 to 1,100): up "
        "to that, twice the batch nearly halves the steps."
    )


def test_without_the_training_the_start_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise UseError("it would take too long.")

    monkeypatch.setattr(noise_section, "wake", refuse)
    found = finding()
    assert found.sentence.startswith("At the start, a step of 64 examples")
    assert found.evidence.numbers["after a few steps"] == "not measured: it would take too long"


@pytest.mark.parametrize(
    "changes, limits, why",
    [
        ({}, {"parameters": 10}, "136 parameters are too many"),
        ({}, {"work": 1e6}, "16 gradients of one example take too much work"),
        ({"batch": lambda seed, step: regression(0, 0)}, {}, "only 0 examples"),
        (
            {
                "batch": lambda seed, step: ((torch.ones(4, P), torch.ones(3)), torch.ones(4, 1)),
                "build": lambda width, depth: Two(width, depth),
            },
            {},
            "examples in dimension 0",
        ),
    ],
    ids=["large", "slow", "the same batch each time", "unknown examples"],
)
def test_what_cannot_be_measured_says_why(
    monkeypatch: pytest.MonkeyPatch, changes: Any, limits: Any, why: str
) -> None:
    monkeypatch.setattr(noise_section, "QUICK", replace(noise_section.QUICK, **limits))
    found = finding(**changes)
    assert found.level == "ok"
    assert found.sentence.startswith("Not measured: ")
    assert why in found.sentence


class Two(Sum):
    """Reads a second input that has no examples."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * other.mean()
