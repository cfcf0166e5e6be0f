"""Shared gains and their balance with the columns they multiply, on networks that were built to have them."""

from functools import partial

import pytest
import torch
from torch import nn

from theodolite.core.size import Size
from theodolite.models import GPT
from theodolite.surgery.converting import convert
from theodolite.surveying import SurveyContext
from theodolite.surveying.sections.gains import section
from theodolite.workloads import Workload

examine = section.run

SMALL = Size(64, 2)


def found(workload, size=SMALL):
    return {finding.code: finding for finding in examine(SurveyContext(workload, size))}


@pytest.mark.parametrize(
    "options, shared, maps",
    [
        ({}, 2, 6),  # q, k, v; the feed-forward has one map, the head too
        ({"gated": True}, 4, 10),
        ({"gated": True, "tied": True}, 4, 10),
        ({"experts": 2}, 4, 10),  # the router and the experts' stack
        ({"norm_placement": "peri", "gated": True}, 4, 10),
    ],
)
def test_gains_that_several_maps_read_are_counted(gpt, options, shared, maps):
    finding = found(gpt(**options))["TH511"]
    assert finding.level == "note"
    assert finding.sentence.startswith(f"{shared} gains are shared by {maps} linear maps")
    assert "th.surgery.scale_vectors" in finding.remedy


def test_equal_blocks_are_one_row(gpt):
    first, *_ = found(gpt())["TH511"].evidence.rows
    assert first == {
        "gain": "blocks.*.attention.norm_in.weight",
        "gains": 2,
        "maps": 3,
        "read by": "query.weight, key.weight, value.weight",
    }


def test_after_the_surgery_nothing_is_shared(gpt):
    def build(width, depth):
        model = GPT(width, depth, vocab=32, context=8, head_dim=16)
        return convert(model, torch.zeros(1, 8, dtype=torch.long))

    plain = gpt()
    smallest = Size(16, 1)
    findings = found(type(plain)("converted", build, plain.batch, plain.loss, smallest), smallest)
    assert list(findings) == ["TH511"], "the law of the balance is that of plain vectors"
    finding = findings["TH511"]
    assert finding.level == "ok"
    # Query, key, value, the feed-forward's first map and the readout.
    assert finding.sentence == "5 linear maps read a norm, and no two share a scale vector."


def test_a_gain_that_surgery_made_of_magnitude_and_direction_is_one_gain(rows):
    def build(width, depth):
        model = nn.Sequential(nn.Linear(8, width), nn.RMSNorm(width), nn.Linear(width, 2))
        return convert(model, torch.zeros(4, 8), heterogeneous=False, placement="input")

    said = found(rows(build))["TH511"].sentence
    assert said == "1 linear map reads a norm, and no two share a scale vector."


@pytest.mark.parametrize("options", [{"norm_placement": "none"}, {"norm_placement": "none", "qk_norm": True}])
def test_without_an_input_norm_there_is_nothing_to_share(gpt, options):
    findings = found(gpt(**options))
    assert list(findings) == ["TH511"]
    assert findings["TH511"].level == "ok"


@pytest.mark.parametrize("bias", [True, False])
def test_a_network_whose_values_decide_what_it_computes_is_looked_at_too(bias):
    """A mask picks nodes of a graph: what cannot be recorded without values is recorded with them."""

    class Graph(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.first, self.norm = nn.Linear(6, width), nn.LayerNorm(width)
            self.last = nn.Linear(width, 3, bias=bias)

        def forward(self, x, mask):
            return self.last(self.norm(self.first(x))[mask])

    def batch(seed, step):
        x = torch.randn(9, 6, generator=torch.Generator().manual_seed(99 * seed + step))
        return (x, x[:, 0] > 0), (x[:, 1] > 0).long()[x[:, 0] > 0]

    workload = Workload("graph", Graph, batch, nn.functional.cross_entropy, SMALL)
    said = found(workload)["TH511"].sentence
    if bias:
        assert said == "1 linear map reads a norm, and no two share a scale vector."
    else:
        assert said.endswith("because last.weight has no bias that could take up the norm's shift norm.bias.")


@pytest.mark.parametrize("last", [nn.Identity, nn.RMSNorm])
def test_gains_that_cannot_be_moved_are_said_with_their_reason(rows, last):
    """A shift, and no bias to take it up: an Input-Norm all the same."""

    def build(width, depth):
        layers = [nn.LayerNorm(width), nn.Linear(width, width, bias=False), nn.Tanh()]
        return nn.Sequential(nn.Linear(8, width), *layers, last(width), nn.Linear(width, 2))

    said = found(rows(build))["TH511"].sentence
    assert ("1 linear map reads a norm" in said) is (last is nn.RMSNorm)
    assert said.endswith(
        "1 gain that only linear maps read cannot be moved into them: 1.weight, because 2.weight has no "
        "bias that could take up the norm's shift 1.bias."
    )


def lopsided(gain, std, width, depth):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.RMSNorm(width), nn.Linear(width, 2))
    nn.init.constant_(model[1].weight, gain)
    nn.init.normal_(model[2].weight, std=std)
    return model


@pytest.mark.parametrize(
    "gain, std, level, said",
    [
        (1.0, 0.5, "ok", "both learn"),
        (0.01, 1.0, "note", "times γ_j² in 1.weight"),
        (1.0, 1e-3, "note", "times ‖w_j‖² in 1.weight"),
        (1.0, 0.0, "ok", "there is no balance yet"),
    ],
)
def test_a_gain_far_from_its_columns_is_noted(rows, gain, std, level, said):
    finding = found(rows(partial(lopsided, gain, std)))["TH512"]
    assert finding.level == level
    assert said in finding.sentence


def test_the_balance_is_the_median_over_the_columns(rows):
    finding = found(rows(partial(lopsided, 2.0, 1.0)), Size(32, 1))["TH512"]
    weight = lopsided(2.0, 1.0, 32, 1)[2].weight
    numbers = finding.evidence.numbers
    assert numbers["largest ‖w‖²/γ²"] == pytest.approx((weight.square().sum(0) / 4).median().item(), rel=1e-6)
