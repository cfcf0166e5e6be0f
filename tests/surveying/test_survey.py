import dataclasses
import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from theodolite import Size, UseError, survey
from theodolite.models import ResidualMLP
from theodolite.surveying import find_sections, sections
from theodolite.surveying.page import page
from theodolite.surveying.sections import transfer
from theodolite.surveying.survey import Survey

STILL = ["anatomy", "growth", "norms", "decay", "initialisation"]
"""Sections that train nothing, and are done at once."""


def test_sections_come_in_their_order():
    found = find_sections()
    orders = [section.order for section in found.values()]
    assert orders == sorted(orders)
    assert {*STILL, "curvature", "transfer", "schedule"} < {*found}
    assert next(iter(found)) == "anatomy"


NEW = """
from theodolite.surveying.finding import Finding
from theodolite.surveying.section import Section

def examine(site):
    yield Finding("TH900", "warn", "Novelty", f"At {site.size} something new.", why="w")
    raise RuntimeError("out of\\nluck")

section = Section("Novelties", 15, examine)
"""


@pytest.fixture
def novelty(tmp_path, monkeypatch):
    """A section is one new file in the folder of sections, and nothing else."""
    (tmp_path / "novelty.py").write_text(NEW)
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])
    yield
    import sys

    sys.modules.pop("theodolite.surveying.sections.novelty", None)


@pytest.mark.usefixtures("novelty")
def test_a_new_file_is_a_new_section_and_its_crash_loses_nothing(gpt):
    made = survey(gpt(), only=[*STILL, "novelty"])
    assert list(made.seconds) == ["anatomy", "novelty", "growth", "norms", "decay", "initialisation"]
    found, crashed = [finding for finding in made.findings if finding.section == "novelty"]
    assert (found.code, found.sentence) == ("TH900", "At 64 × 2 something new.")
    assert (crashed.code, crashed.level) == ("TH001", "error")
    assert "“Novelties”" in crashed.sentence
    assert "RuntimeError: out of luck" in crashed.sentence
    assert "novelty (TH900)" in made.verdict
    assert made.verdict.endswith(" 1 check could not be made.")
    assert {"TH101", "TH102", "TH104", "TH105", "TH106", "TH107", "TH501"} < {f.code for f in made.findings}


def test_a_check_that_crashes_is_no_verdict_about_the_network(gpt, monkeypatch):
    def examine(site):
        raise AssertionError("Expected gradient function to be set")

    made = survey(gpt(), only=["growth"])
    monkeypatch.setitem(vars(find_sections()["norms"]), "examine", examine)
    crashed = survey(gpt(), only=["growth", "norms"])
    assert crashed.verdict == f"{made.verdict} 1 check could not be made."
    assert crashed.at("fail") == crashed.at("warn") == ()
    assert "1 check not made" in page(crashed)
    alone = survey(gpt(), only=["norms"])
    assert alone.verdict == f"Nothing is known about {alone.workload}: 1 check could not be made."


@pytest.mark.usefixtures("novelty")
def test_an_error_of_use_inside_a_section_is_the_callers_to_see(gpt, monkeypatch):
    section = find_sections()["novelty"]

    def examine(site):
        raise UseError("the labels are upside down")

    monkeypatch.setitem(vars(section), "examine", examine)
    with pytest.raises(UseError, match="upside down"):
        survey(gpt(), only=["novelty"])


def test_only_and_skip_choose(gpt):
    assert list(survey(gpt(), only=["norms", "anatomy"]).seconds) == ["anatomy", "norms"]
    assert list(survey(gpt(), only="norms").seconds) == ["norms"]
    kept = ["anatomy", "growth", "plan", "schedule"]
    skipped = [name for name in find_sections() if name not in kept]
    assert list(survey(gpt(), skip=skipped).seconds) == kept


@pytest.mark.parametrize("choice", [{"only": ["weather"]}, {"skip": ["weather"]}])
def test_an_unknown_section_is_refused_with_the_known_ones(gpt, choice):
    with pytest.raises(UseError, match="no section 'weather'; the sections are anatomy, growth, norms"):
        survey(gpt(), **choice)


def test_nothing_left_to_examine_is_refused(gpt):
    with pytest.raises(UseError, match="no section is left"):
        survey(gpt(), only=["norms"], skip=["norms"])


def _seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def test_a_survey_takes_one_thread_unless_there_is_time(rows):
    seen = []

    def build(width, depth):
        seen.append(torch.get_num_threads())
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))

    torch.set_num_threads(2)
    survey(rows(build), only=["anatomy"])
    assert {*seen} == {1}
    assert torch.get_num_threads() == 2
    seen.clear()
    survey(rows(build), only=["anatomy"], deep=True)
    assert {*seen} == {2}


def test_no_generator_is_moved_and_the_seed_decides_not_the_sections_that_ran(rows, monkeypatch):
    monkeypatch.setattr(transfer, "QUICK", dataclasses.replace(transfer.QUICK, steps=3))
    _seed_all(5)
    expected = torch.rand(3), random.random(), np.random.rand()
    _seed_all(5)
    plain = rows(partial(ResidualMLP, inputs=8, outputs=2))

    def build(width, depth):
        random.random(), np.random.rand()
        return plain.build(width, depth)

    first = survey(dataclasses.replace(plain, build=build))
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    again, other = survey(plain, only=STILL), survey(plain, only=STILL, seed=1)
    assert again.findings == tuple(f for f in first.findings if f.section in STILL)
    assert other.findings != again.findings
    for name in ("initialisation", "spectral"):
        part = survey(plain, only=[name])
        assert part.findings == tuple(f for f in first.findings if f.section == name)


def test_the_size_asked_for_is_the_size_surveyed(gpt):
    made = survey(gpt(), size=Size(96, 3), only=["growth"])
    assert made.size == Size(96, 3)
    assert made.anatomy is not None
    assert made.anatomy["readout.weight"].shape == (32, 96)
    assert made.anatomy.num_blocks == 3


def test_progress_starts_at_nothing_and_ends_at_all(gpt):
    told = []
    survey(gpt(), only=["anatomy", "norms"], progress=lambda title, done: told.append((title, done)))
    assert told == [("Workload", 0.0), ("Anatomy", 1 / 3), ("Norms", 2 / 3), ("Done", 1.0)]


@pytest.mark.parametrize(
    "options, verdict",
    [
        ({}, "small can be scaled: 8 checks found no problem; read 1 note first."),
        (
            {"scaled_init": True},
            "small should be fixed before it is scaled: depth counted twice in the initialisation (TH104).",
        ),
    ],
)
def test_the_verdict_is_one_sentence_about_the_gravest(gpt, options, verdict):
    assert survey(gpt(**options), only=STILL).verdict == verdict


def test_one_check_is_one_check(gpt):
    made = survey(gpt(), only=["initialisation"])
    assert made.verdict == "small can be scaled: 1 check found no problem."


def test_the_terminal_says_the_verdict_first_and_the_gravest_next(gpt):
    lines = str(survey(gpt(scaled_init=True), only=STILL)).splitlines()
    assert lines[0].startswith("small should be fixed before it is scaled")
    levels = [line.split()[0] for line in lines if line.strip() and line.split()[1:2] and line[7:9] == "TH"]
    assert levels == ["warn", "note", *["ok"] * 6]


def test_saving_writes_the_page_or_the_data_and_nothing_else(gpt, tmp_path):
    made = survey(gpt(), only=STILL[:3])
    for name in ("mine.html", "mine.json", "mine.csv"):
        assert made.save(tmp_path / name) == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.csv", "mine.html", "mine.json"]
    saved = json.loads((tmp_path / "mine.json").read_text())
    assert saved["verdict"] == made.verdict
    assert saved["size"] == {"width": 64, "depth": 2}
    assert [finding["code"] for finding in saved["findings"]] == [f.code for f in made.findings]
    assert saved["anatomy"]["parameters"] == made.anatomy.num_parameters
    assert Survey.load(tmp_path / "mine.json").to_json() == made.to_json()
    assert page(Survey.load(tmp_path / "mine.json")) == page(made)


def test_a_page_that_cannot_be_made_leaves_the_old_one(gpt, tmp_path, monkeypatch):
    page = tmp_path / "mine.html"
    page.write_text("old")
    made = survey(gpt(), only=["anatomy"])
    monkeypatch.setattr(Survey, "page", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.save(page)
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]
