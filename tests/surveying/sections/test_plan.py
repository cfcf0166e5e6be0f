import pytest
from torch import nn

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.surveying import SurveyContext, survey, trials
from theodolite.surveying.sections.plan import section

examine = section.run


def only(site):
    (finding,) = examine(site)
    return finding


def test_a_network_that_can_be_planned_for(gpt):
    finding = only(SurveyContext(gpt(), Size(64, 2)))
    assert (finding.code, finding.level) == ("TH204", "ok")
    assert finding.sentence == ("A plan covers all 19 tensors (adamw, from 64 × 2 to 256 × 2 and 64 × 8).")
    rows = {row["tensor"]: row for row in finding.evidence.rows}
    # AdamW: hidden weights 1/r_n; what ends a branch absorbs the branch's 1/r_L; a readout its 1/r_n.
    up, out = rows["blocks.*.feed_forward.branch.up.weight"], rows["blocks.*.attention.branch.out.weight"]
    assert (up["lr at 4× width"], up["lr at 4× depth"]) == (0.25, 1.0)
    assert (out["lr at 4× width"], out["lr at 4× depth"]) == (0.25, 0.25)
    assert (rows["readout.weight"]["lr at 4× width"], rows["embed.weight"]["lr at 4× width"]) == (0.25, 1.0)


def test_what_the_planner_refuses_is_a_finding_and_said_once(gpt, monkeypatch):
    def refuse(*args, **options):
        raise UseError("nothing ends branch 0 of block 1, so it cannot be weighed")

    monkeypatch.setattr(trials, "plan", refuse)
    made = survey(gpt(), only=["plan", "coordinates", "spectral"])
    (finding,) = made.findings
    assert (finding.code, finding.level, finding.section) == ("TH204", "fail", "plan")
    assert "nothing ends branch 0 of block 1" in finding.sentence
    assert made.verdict == "small cannot be scaled as it is: tensors that a plan cannot scale (TH204)."


def test_networks_too_large_to_try_are_noted_once(gpt, monkeypatch):
    monkeypatch.setattr(trials, "MOST_PARAMETERS", 1000)
    (finding,) = survey(gpt(), only=["plan", "coordinates", "spectral"]).findings
    assert (finding.code, finding.level) == ("TH204", "note")
    assert "have over 1,000 parameters" in finding.sentence
    assert "--deep" in finding.remedy


@pytest.mark.parametrize("depth", [2, 5])
def test_a_network_without_depth_is_planned_for_in_width(rows, depth):
    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    finding = only(SurveyContext(rows(build), Size(64, depth)))
    assert finding.level == "ok"
    assert "lr at 4× depth" not in finding.evidence.rows[0]
