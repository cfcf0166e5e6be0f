"""TH108: what is not finite at the start is named, and nothing is said of what would be measured on it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from theodolite import Size, survey
from theodolite.surveying import not_finite
from theodolite.surveying.section import find_sections

MEASURING = [name for name, section in find_sections().items() if section.measures]


class Plain(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, rows):
        return self.last(self.bent(self.middle(self.first(rows).relu())))

    def bent(self, hidden):
        return hidden.relu()


class Rooted(Plain):
    """0·√x is 0, and its derivative at 0 is 0·inf."""

    def bent(self, hidden):
        return hidden + (0 * hidden).sqrt()


class Logarithmic(Plain):
    def bent(self, hidden):
        return (0 * hidden).log()


class Masked(Plain):
    """Minus infinity, as attention has it, is no fault."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.softmax = nn.Softmax(-1)

    def bent(self, hidden):
        return self.softmax(torch.where(torch.arange(hidden.shape[-1]) > 3, -math.inf, hidden))


def found(workload, **options):
    return [finding for finding in survey(workload, **options).findings if finding.code == "TH108"]


def test_gradients_that_are_not_finite_are_named(rows):
    made = survey(rows(Rooted))
    (finding,) = made.at("fail")
    assert finding.code == "TH108"
    assert (
        "Gradients are not finite in 4 of 6 tensors (first.weight, first.bias, middle.weight, …)"
        in finding.sentence
    )
    assert "The last of them in the forward pass is middle.bias." in finding.sentence
    assert [row["tensor"] for row in finding.evidence.rows] == [
        "first.weight", "first.bias", "middle.weight", "middle.bias"
    ]  # fmt: skip
    measured = {"TH201", "TH202", "TH301", "TH302", "TH303", "TH401", "TH701", "TH702", "TH703"}
    assert not measured & {one.code for one in made.findings}
    assert made.verdict.startswith("mine cannot be scaled as it is: numbers that are not finite")


@pytest.mark.parametrize("section", MEASURING)
def test_every_section_that_measures_says_it_and_nothing_else(rows, section):
    (finding,) = survey(rows(Rooted), only=[section]).findings
    assert (finding.code, finding.level) == ("TH108", "fail")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_of_by_any_section(rows, value):
    workload = rows(Plain, loss=lambda logits, targets: logits.sum() * 0 + value)
    for section in ("norms", "curvature"):
        (finding,) = found(workload, only=[section])
        assert f"the first batch is {value}" in finding.sentence


def test_the_first_module_is_named_where_the_loss_is_not_finite(rows):
    (finding,) = found(rows(Logarithmic), only=["curvature"])
    assert "In the forward pass the input of last is the first that is not finite" in finding.sentence


def test_weights_that_are_not_finite_are_named(rows):
    def build(width, depth):
        model = Plain(width, depth)
        nn.init.constant_(model.middle.bias, math.nan)
        return model

    (finding,) = found(rows(build), only=["curvature"])
    assert "Weights are not finite in 1 of 6 tensors (middle.bias)" in finding.sentence
    assert "the output of middle is the first" in finding.sentence
    assert "initialisation" in finding.remedy


def test_a_mask_of_minus_infinity_is_no_fault(rows):
    assert not found(rows(Masked), only=["gains"])


def test_what_is_too_large_is_looked_at_in_small(rows, monkeypatch):
    monkeypatch.setattr(not_finite, "MOST_PARAMETERS", 1)
    (finding,) = found(rows(Rooted, size=Size(128, 2)), only=["curvature"])
    assert finding.sentence.startswith("At 64 × 2, a smaller network of the trials,")


def test_a_later_batch_that_is_not_finite_is_named_and_the_network_is_not(rows):
    sound = rows(Plain).batch

    def batch(seed, step):
        inputs, targets = sound(seed, step)
        return (inputs * math.nan if step >= 3 else inputs), targets

    made = survey(rows(Plain, batch=batch), only=["coordinates", "steps"])
    (finding,) = made.findings
    assert (finding.code, finding.level) == ("TH108", "fail")
    assert "batch(0, 3) has inputs that are not finite" in finding.sentence
    assert finding.remedy.startswith("Repair the data")


def test_a_later_batch_with_a_mask_or_for_a_network_that_takes_nan_is_no_fault(rows):
    class Filling(Plain):
        def forward(self, rows):
            return super().forward(rows.nan_to_num(neginf=0.0))

    sound = rows(Plain).batch

    def batch(seed, step):
        inputs, targets = sound(seed, step)
        inputs[0, 0] = (0.0, math.nan, -math.inf)[step % 3]
        return inputs, targets

    assert not found(rows(Filling, batch=batch), only=["gains"])


def test_data_that_end_do_not_end_the_survey(rows):
    sound = rows(Plain).batch

    def batch(seed, step):
        if step > 2:
            raise IndexError("no more data")
        return sound(seed, step)

    made = survey(rows(Plain, batch=batch), only=["norms", "gains", "steps"])
    assert {finding.code for finding in made.findings} >= {"TH102", "TH511", "TH702"}
    assert "TH108" not in {finding.code for finding in made.findings}
