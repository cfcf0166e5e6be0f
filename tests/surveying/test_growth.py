import math

import pytest
from torch import nn

from theodolite.anatomy import Anatomy, Attention, Branch, Part
from theodolite.size import Size
from theodolite.surveying import Site
from theodolite.surveying.sections.growth import depth_followed, head_size, width_followed


def anatomy(*branches, blocks_at_double_depth=None, parts=()):
    return Anatomy({part.name: part for part in parts}, branches, Size(64, 2), blocks_at_double_depth)


def attending(dim, grows, scale, doubled, block=0):
    return Branch(block, 0, "pre", 2, (), (), Attention(dim, grows, scale, doubled))


def matrix(name, width_in, width_out, block=0):
    role = {(True, True): "hidden", (True, False): "output", (False, True): "input"}.get(
        (width_in, width_out)
    )
    return Part(
        name, (64, 64), "linear", role or "hidden", 64, 64, width_in, width_out, (1,), (0,), block=block
    )


def test_a_gpt_follows_width_and_depth(gpt):
    site = Site(gpt(), Size(64, 2))
    assert width_followed(site.anatomy).level == "ok"
    depth = depth_followed(site.anatomy)
    assert depth.level == "ok"
    assert depth.evidence.numbers == {"depth": 2, "blocks": 2, "blocks at twice the depth": 4}


def test_key_value_heads_that_stay_fixed_are_noted_by_name(gpt):
    finding = width_followed(Site(gpt(kv_heads=2), Size(64, 2)).anatomy)
    assert (finding.code, finding.level) == ("TH105", "note")
    assert "4 matrices" in finding.sentence
    by_name = {row["tensor"]: row for row in finding.evidence.rows}
    assert set(by_name) == {"blocks.*.attention.branch.key.weight", "blocks.*.attention.branch.value.weight"}
    row = by_name["blocks.*.attention.branch.key.weight"]
    assert (row["in grows"], row["out grows"], row["out"], row["blocks"]) == (True, False, 32, "0–1")


def test_width_that_reaches_nothing_fails():
    finding = width_followed(anatomy(parts=[matrix("a", False, False), matrix("b", False, False)]))
    assert (finding.code, finding.level) == ("TH105", "fail")
    assert "Of 2 weight matrices none grows" in finding.sentence


def test_a_depth_that_adds_no_block_fails(rows):
    class Fixed(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x):
            x = self.first(x)
            return self.last(x + self.down(self.up(x).relu()))

    finding = depth_followed(Site(rows(Fixed), Size(32, 2)).anatomy)
    assert (finding.code, finding.level) == ("TH105", "fail")
    assert "1 before, 1 after" in finding.sentence


def test_blocks_that_do_not_double_with_depth_are_noted():
    finding = depth_followed(anatomy(attending(16, False, 0.25, 0.25), blocks_at_double_depth=4))
    assert finding.level == "note"
    assert "1 at depth 2, 4 at twice that" in finding.sentence


def test_a_network_without_blocks_is_told_so():
    finding = depth_followed(anatomy(blocks_at_double_depth=0))
    assert finding.level == "note"
    assert "no residual block" in finding.sentence


def test_heads_of_fixed_size_are_in_order(gpt):
    finding = head_size(Site(gpt(), Size(64, 2)).anatomy)
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
        assert f"d to the {exponent}" in finding.sentence
        assert "√d₀/d" in finding.remedy


def test_one_bad_branch_among_good_ones_is_what_is_reported():
    good, bad = attending(16, False, 0.25, 0.25), attending(64, True, 0.125, 0.125 * math.sqrt(0.5), block=1)
    finding = head_size(anatomy(good, bad))
    assert finding.level == "warn"
    assert [row["blocks"] for row in finding.evidence.rows] == ["0", "1"]


def test_a_scale_that_cannot_be_seen_is_a_note_not_a_pass():
    assert head_size(anatomy(attending(64, True, None, None))).level == "note"
