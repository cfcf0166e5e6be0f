import math

import pytest
import torch
from torch import nn

from theodolite.core.size import Size
from theodolite.surveying import SurveyContext
from theodolite.surveying.sections import initialisation
from theodolite.surveying.sections.initialisation import BranchEnds, depth_counted, measure, section

examine = section.run


def only(site):
    (finding,) = examine(site)
    return finding


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.0, 0.5])
def test_the_slope_of_a_power_law_is_its_power(power):
    depths = (2, 4, 8, 16)
    assert BranchEnds("w", depths, tuple(0.3 * depth**power for depth in depths)).slope == pytest.approx(
        power
    )


def test_gpt2s_initialisation_counts_depth(gpt):
    workload = gpt(scaled_init=True)
    finding = only(SurveyContext(workload, workload.size))
    assert (finding.code, finding.level) == ("TH104", "warn")
    rows = {row["tensor"]: row for row in finding.evidence.rows}
    assert set(rows) == {
        "blocks.*.attention.branch.out.weight",
        "blocks.*.feed_forward.branch.down.weight",
    }
    out = rows["blocks.*.attention.branch.out.weight"]
    # GPT initialises at 1/√fan_in times 1/√(2L).
    assert out["L = 2"] == pytest.approx(64**-0.5 / 4**0.5, rel=0.03)
    assert out["L = 8"] == pytest.approx(64**-0.5 / 16**0.5, rel=0.03)
    assert out["slope"] == pytest.approx(-0.5, abs=0.03)
    assert "(1/√L)" in finding.sentence
    (figure,) = finding.evidence.figures
    assert len(figure.panels) == 2
    assert "slope −0.5" in figure.alt


def test_an_initialisation_without_depth_is_in_order(gpt):
    finding = only(SurveyContext(gpt(), gpt().size))
    assert finding.level == "ok"
    assert all(abs(row["slope"]) < 0.05 for row in finding.evidence.rows)


def test_gains_that_end_a_branch_are_looked_at_too(gpt):
    finding = only(SurveyContext(gpt(norm_placement="peri"), gpt().size))
    assert finding.level == "ok"
    rows = {row["tensor"]: row for row in finding.evidence.rows}
    assert rows["blocks.*.attention.norm_out.weight"]["L = 2"] == pytest.approx(1.0)


class Stack(nn.Module):
    def __init__(self, width, depth, scale):
        super().__init__()
        self.first, self.last = nn.Linear(8, width, bias=False), nn.Linear(width, 2, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        for layer in self.down:
            nn.init.normal_(layer.weight, std=scale(depth))

    def forward(self, x):
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return self.last(x)


@pytest.mark.parametrize(
    "scale, level, words",
    [
        (lambda depth: 0.1 / depth, "warn", "(1/L)"),
        (lambda depth: 0.1 * depth**0.5, "warn", "grows with depth"),
        (lambda depth: 0.0, "ok", "zero at every depth"),
        (lambda depth: 0.1, "ok", "does not depend on depth, from 2 to 8 blocks"),
    ],
)
def test_other_laws(rows, scale, level, words):
    workload = rows(lambda width, depth: Stack(width, depth, scale))
    finding = only(SurveyContext(workload, workload.size))
    assert finding.level == level
    assert words in finding.sentence


def test_a_width_too_narrow_to_build_is_not_used(rows):
    def build(width, depth):
        if width % 256:
            raise ValueError("256 or nothing")
        return Stack(width, depth, lambda depth: 0.1)

    width, ends = measure(SurveyContext(rows(build), Size(512, 2)))
    assert width == 256
    assert [one.pattern for one in ends] == ["down.*.weight"]


def test_deep_uses_the_full_width_and_one_more_depth(rows):
    workload = rows(lambda width, depth: Stack(width, depth, lambda depth: 0.1))
    width, (ends,) = measure(SurveyContext(workload, Size(128, 2), deep=True))
    assert (width, ends.blocks) == (128, (2, 4, 8, 16))
    width, (ends,) = measure(SurveyContext(workload, Size(128, 2)))
    assert (width, ends.blocks) == (64, (2, 4, 8))


def test_a_finding_without_measurements_has_no_figure():
    finding = depth_counted([BranchEnds("a.*.gain", (2, 4), (0.0, 0.0))], 64)
    assert finding.evidence.figures == ()


@pytest.mark.parametrize(
    "most, expected",
    [(600_000, (128, (2, 4, 8, 16))), (300_000, (64, (2, 4, 8, 16))), (80_000, (64, (2, 4)))],
)
def test_trial_networks_are_bounded_even_when_there_is_time(rows, monkeypatch, most, expected):
    monkeypatch.setattr(initialisation, "MOST_PARAMETERS", most)
    workload = rows(lambda width, depth: Stack(width, depth, lambda depth: 0.1))
    # 16 blocks of width 128 have 526,000 parameters, of width 64 132,000; 4 of width 128 have 132,000.
    width, (ends,) = measure(SurveyContext(workload, Size(128, 4), deep=True))
    assert (width, ends.blocks) == expected


def test_networks_too_large_for_any_trial_are_noted(rows, monkeypatch):
    monkeypatch.setattr(initialisation, "MOST_PARAMETERS", 1000)
    workload = rows(lambda width, depth: Stack(width, depth, lambda depth: 0.1))
    finding = only(SurveyContext(workload, workload.size))
    assert (finding.code, finding.level) == ("TH104", "note")
    assert "parameters, over 1,000" in finding.sentence


class Named(Stack):
    """A stack in which some of the blocks have a gain at their end, and names that depend on the depth."""

    def __init__(self, width, depth, start=1.0):
        super().__init__(width, depth, lambda depth: 0.1)
        self.gain = nn.ParameterDict({str(i): torch.full((width,), start) for i in range(3, depth, 4)})

    def forward(self, x):
        x = self.first(x)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            y = down(up(x).relu())
            x = x + (self.gain[str(i)] * y if str(i) in self.gain else y)
        return self.last(x)


def test_what_only_deep_networks_have_is_compared_where_it_is(rows):
    finding = only(SurveyContext(rows(Named), Size(64, 4)))
    assert finding.level == "ok"
    assert "zero" not in finding.sentence
    table = {row["tensor"]: row for row in finding.evidence.rows}
    gain = table["gain.*"]
    assert (gain["L = 2"], gain["L = 4"], gain["L = 8"]) == (None, 1.0, 1.0)
    assert gain["slope"] == pytest.approx(0.0)
    assert len({tuple(row) for row in finding.evidence.rows}) == 1


def test_what_was_seen_at_one_depth_is_not_called_zero():
    seen_once = BranchEnds("gain.*", (8,), (0.0,))
    both = depth_counted([seen_once, BranchEnds("down.*", (2, 8), (0.1, 0.1))], 64)
    assert both.level == "ok"
    assert "zero" not in both.sentence
    assert both.sentence.endswith("gain.* could be measured at one depth only.")
    alone = depth_counted([seen_once], 64)
    assert alone.level == "note"


def test_zero_at_some_depths_is_not_zero_at_all(rows):
    workload = rows(lambda width, depth: Stack(width, depth, lambda depth: 0.1 * (depth > 4)))
    finding = only(SurveyContext(workload, workload.size))
    assert "zero" not in finding.sentence


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_initial_values_that_are_not_finite_fail(rows, value):
    def build(width, depth):
        model = Stack(width, depth, lambda depth: 0.1)
        if depth == 8:
            nn.init.constant_(model.down[3].weight, value)
        return model

    finding = only(SurveyContext(rows(build), Size(64, 2)))
    assert (finding.code, finding.level) == ("TH104", "fail")
    assert finding.sentence == "The initial values of down.*.weight are not finite."
    (row,) = finding.evidence.rows
    assert row["slope"] is None


def test_a_role_for_what_only_deep_networks_have_is_no_hindrance(rows):
    workload = rows(Named)
    finding = only(SurveyContext(workload, Size(64, 4), roles={"gain.*": "gain"}))
    assert finding.level == "ok"
    assert set(finding.evidence.rows[0]) == {"tensor", "L = 2", "L = 4", "L = 8", "slope"}
