"""Claims of the routing study on records whose verdict is known, and its figures and tables."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from theodolite_studies.routing.arms import Arms
from theodolite_studies.routing.report import figures, notes
from theodolite_studies.routing.study import SMALL, STUDY

from .made_up import BRANCHES, TIMES, made_up


@pytest.mark.parametrize(("holds", "verdict"), [(True, "holds"), (False, "fails")])
def test_claims_say_what_records_say(holds, verdict):
    found = STUDY.decide(made_up(holds=holds))
    assert len(found) == 14
    assert {claim.statement: claim.verdict for claim in found if claim.verdict != verdict} == {}


def test_claims_on_arms_that_are_not_there_are_left_out():
    plain = [one for one in made_up() if one["residual"] == "add"]
    assert len(STUDY.decide(plain)) == 8
    assert STUDY.decide(made_up(seeds=1))[-1].verdict == "unclear"


def test_a_rate_is_chosen_by_the_validation_loss_and_judged_by_the_test_loss():
    arms = Arms.of(made_up(), SMALL)
    arm = arms.found["add"]
    assert arm.best_at == -6.0  # its test loss is the higher one
    assert arm.test == dict.fromkeys(range(4), 0.7)
    assert arms.difference("routed", "add") == pytest.approx([-0.01 * (1 + 0.001 * s) for s in range(4)])


def test_an_arm_that_diverged_at_a_rate_is_not_judged_there():
    records = [
        {**one, "validation": None, "test": None, "late": None}
        if one["lr"] == -6.0 and one["seed"] == 0
        else one
        for one in made_up()
    ]
    assert Arms.of(records, SMALL).found["routed"].best_at in (-7.0, -5.0)


@pytest.mark.parametrize("holds", [True, False])
def test_an_arm_whose_best_rate_is_at_an_edge_decides_nothing(holds):
    records = [one for one in made_up(holds=holds) if one["lr"] != -7.0 or one["residual"] != "time-routed"]
    found = {claim.statement: claim for claim in STUDY.decide(records)}
    assert found["routing lowers the loss at equal tokens"].verdict == ("holds" if holds else "fails")
    further = found["routing along time lowers it further"]
    assert further.verdict == "unclear"
    assert "(time-routed, routed: a best rate is at an edge)" in further.here
    cured = found["routing cures inflation"]  # by routed, and perhaps by time-routed
    assert cured.verdict == ("unclear" if holds else "fails")


def test_figures_and_tables_are_drawn():
    arms = Arms.of(made_up(), SMALL)
    drawn = dict(figures(arms))
    assert list(drawn) == ["maps", "losses"]
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    assert drawn["maps"].count("fill-opacity") == 3 * 3 * TIMES * BRANCHES
    said = notes(arms)
    assert "2^-6 0.7000 ± 0.0000*" in said
    assert "time-routed less routed" in said


def test_figures_need_no_readings():
    arms = Arms.of([{**one, "late": None} for one in made_up()], SMALL)
    assert [name for name, _ in figures(arms)] == ["losses"]
    assert "Symptoms" not in notes(arms)
