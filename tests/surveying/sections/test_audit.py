"""The findings of the audit in a survey, for workloads that name their optimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.optim import AdamW

from theodolite.core.size import Size
from theodolite.surveying import SurveyContext, survey
from theodolite.surveying.sections.audit import section
from theodolite.workloads import Workload

from ..auditing.hand_made import batch, building, loss, make_optimizer, recipe


def mine(*faults):
    return Workload("mine", building(recipe(*faults)), batch, loss, Size(32, 2), optimizer=make_optimizer)


def levels(workload):
    return [(one.code, one.level) for one in section.run(SurveyContext(workload, workload.size))]


def test_a_workload_without_an_optimizer_has_no_such_findings():
    without = replace(mine(), optimizer=None)
    assert levels(without) == []
    said = "Nothing is known about mine: none of these sections has a check for it."
    assert survey(without, only=["audit"]).verdict == said


def test_a_right_recipe_has_four_findings_that_are_ok():
    assert levels(mine()) == [("TH206", "ok"), ("TH207", "ok"), ("TH208", "ok"), ("TH209", "ok")]


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        ("hidden lr not divided", "TH206"),
        ("constant std", "TH207"),
        ("decay left alone", "TH208"),
        ("readout not multiplied", "TH209"),
    ],
)
def test_a_mistake_is_in_the_survey_s_verdict(mistake, code):
    found = survey(mine(mistake), only=["audit"])
    assert [one.code for one in (*found.at("fail"), *found.at("warn"))] == [code]
    assert f"({code})" in found.verdict


def test_a_factory_that_keeps_state_is_a_note_and_nothing_is_judged_by_it():
    rates = iter(2.0**-place for place in range(9))

    def make(model):
        return AdamW(model.parameters(), lr=next(rates))

    (note,) = section.run(SurveyContext(replace(mine(), optimizer=make), Size(32, 2)))
    assert (note.code, note.level) == ("TH206", "note")
    assert "keeps state between calls" in note.sentence


def test_a_factory_that_fails_is_a_note_and_the_survey_goes_on():
    def make(model):
        return AdamW(model.no_such_thing)

    (note,) = section.run(SurveyContext(replace(mine(), optimizer=make), Size(32, 2)))
    assert (note.code, note.level) == ("TH206", "note")
    assert "no_such_thing" in note.sentence
    assert "TH207 and TH208 and TH209 are missing too" in note.sentence
