import math

import pytest
import torch
from torch import nn

from theodolite.anatomy import Anatomy, AttentionHeads, Branch, Part
from theodolite.core.size import Size
from theodolite.surveying import SurveyContext
from theodolite.surveying.sections.growth import (
    added_tensors,
    depth_followed,
    head_size,
    section,
    width_followed,
)

examine = section.run


def anatomy(*branches, blocks_at_double_depth=None, parts=()):
    return Anatomy({part.name: part for part in parts}, branches, Size(64, 2), blocks_at_double_depth)


def attending(dim, grows, scale, doubled, block=0):
    return Branch(block, 0, "pre", 2, (), (), AttentionHeads(dim, grows, scale, doubled))


def matrix(name, width_in, width_out, block=0):
    role = {(True, True): "hidden", (True, False): "output", (False, True): "input"}.get(
        (width_in, width_out)
    )
    return Part(
        name, (64, 64), "linear", role or "hidden", 64, 64, width_in, width_out, (1,), (0,), block=block
    )


def test_a_gpt_follows_width_and_depth(gpt):
    site = SurveyContext(gpt(), Size(64, 2))
    assert width_followed(site.anatomy).level == "ok"
    depth = depth_followed(site.anatomy)
    assert depth.level == "ok"
    assert depth.evidence.numbers == {"depth": 2, "blocks": 2, "blocks at twice the depth": 4}


def test_key_value_heads_that_stay_fixed_are_noted_by_name(gpt):
    finding = width_followed(SurveyContext(gpt(kv_heads=2), Size(64, 2)).anatomy)
    assert (finding.code, finding.level) == ("TH105", "note")
    assert "4 matrices" in finding.sentence
    by_name = {row["tensor"]: row for row in finding.evidence.rows}
    assert set(by_name) == {"blocks.*.attention.branch.key.weight", "blocks.*.attention.branch.value.weight"}
    row = by_name["blocks.*.attention.branch.key.weight"]
    assert (row["in grows"], row["out grows"], row["out"], row["blocks"]) == (True, False, 32, "0–1")


def test_width_that_reaches_nothing_fails():
    finding = width_followed(anatomy(parts=[matrix("a", False, False), matrix("b", False, False)]))
    assert (finding.code, finding.level) == ("TH105", "fail")
    assert "None of 2 weight matrices grows" in finding.sentence


def test_a_depth_that_changes_nothing_is_noted(rows):
    class Fixed(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x):
            x = self.first(x)
            return self.last(x + self.down(self.up(x).relu()))

    site = SurveyContext(rows(Fixed), Size(32, 2))
    assert added_tensors(site) == 0
    finding = depth_followed(site.anatomy, 0)
    assert (finding.code, finding.level) == ("TH105", "note")
    assert "1 before, 1 after" in finding.sentence


@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize(("added", "level"), [(0, "note"), (4, "warn")])
def test_the_level_does_not_depend_on_there_being_blocks(blocks, added, level):
    branches = [attending(16, False, 0.25, 0.25)][:blocks]
    finding = depth_followed(anatomy(*branches, blocks_at_double_depth=blocks), added)
    assert (finding.code, finding.level) == ("TH105", level)
    assert f"({blocks} before, {blocks} after)" in finding.sentence


def test_a_plain_stack_that_gets_deeper_is_a_warning(rows):
    def build(width, depth):
        layers = [nn.Linear(width, width) for _ in range(depth)]
        return nn.Sequential(nn.Linear(8, width), *layers, nn.Linear(width, 2))

    _, depth, _ = examine(SurveyContext(rows(build), Size(32, 2)))
    assert (depth.level, depth.title) == ("warn", "Depth that adds layers but no blocks")
    assert depth.sentence.startswith(
        "Twice the depth adds 4 tensors but no residual block (0 before, 0 after)"
    )


def test_blocks_that_do_not_double_with_depth_are_noted():
    finding = depth_followed(anatomy(attending(16, False, 0.25, 0.25), blocks_at_double_depth=4))
    assert finding.level == "note"
    assert "1 at depth 2, 4 at twice that" in finding.sentence


def test_a_network_without_blocks_is_told_so():
    finding = depth_followed(anatomy(blocks_at_double_depth=0))
    assert finding.level == "note"
    assert "no residual block" in finding.sentence


def test_heads_of_fixed_size_are_in_order(gpt):
    finding = head_size(SurveyContext(gpt(), Size(64, 2)).anatomy)
    assert finding.level == "ok"
    (row,) = finding.evidence.rows
    assert row["head dimension"] == 16
    assert row["scale"] == pytest.approx(16**-0.5)
    assert row["scale × √d"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "grows, power, level",
    [
        (False, 0.0, "ok"),
        (False, -0.5, "warn"),
        (True, -1.0, "ok"),
        (True, -0.5, "warn"),
        (True, 0.0, "warn"),
    ],
)
def test_the_scale_must_follow_the_heads(grows, power, level):
    finding = head_size(anatomy(attending(64, grows, 0.125, 0.125 * 2**power)))
    assert (finding.code, finding.level) == ("TH106", level)
    if grows and level == "warn":
        exponent = "−0.50" if power else "0.00"
        assert f"d to the power {exponent}" in finding.sentence
        assert "√d₀/d" in finding.remedy


def test_one_bad_branch_among_good_ones_is_what_is_reported():
    good, bad = attending(16, False, 0.25, 0.25), attending(64, True, 0.125, 0.125 * math.sqrt(0.5), block=1)
    finding = head_size(anatomy(good, bad))
    assert finding.level == "warn"
    assert [row["blocks"] for row in finding.evidence.rows] == ["0", "1"]


def test_a_scale_that_cannot_be_seen_is_a_note_not_a_pass():
    assert head_size(anatomy(attending(64, True, None, None))).level == "note"


class PoolingByAttention(nn.Module):
    """A learned seed attends to the set, as in a Set Transformer, and the skip begins at its query."""

    def __init__(self, width, depth):
        super().__init__()
        self.embed, self.seed = nn.Linear(8, width), nn.Parameter(torch.randn(1, 1, width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        x, seed = self.embed(x).unsqueeze(1), self.seed.repeat(len(x), 1, 1)
        parts = (self.query(seed), self.key(x), self.value(x))
        q, k, v = (torch.cat(part.chunk(4, -1)) for part in parts)
        mixed = q + (q @ k.mT / self.query.out_features**0.5).softmax(-1) @ v
        return self.last(torch.cat(mixed.chunk(4), -1).squeeze(1))


def test_attention_outside_of_branches_is_seen(rows):
    finding = head_size(SurveyContext(rows(PoolingByAttention), Size(64, 1)).anatomy)
    assert (finding.code, finding.level) == ("TH106", "warn")
    (row,) = finding.evidence.rows
    assert (row["head dimension"], row["grows"]) == (16, True)
    assert row["scale"] == pytest.approx(64**-0.5)
    assert row["scale at twice the width"] == pytest.approx(128**-0.5)
    assert "scale the logits by 2/d (at d = 16 nothing changes)" in finding.remedy
