import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import nn

from theodolite.errors import UseError
from theodolite.models import GPT
from theodolite.size import Size
from theodolite.surveying import Site
from theodolite.surveying.sections import coordinates
from theodolite.surveying.sections.coordinates import coordinates_kept, examine, measure
from theodolite.workloads import Workload, next_token_loss


def only(site):
    (finding,) = examine(site)
    return finding


@pytest.fixture(scope="module")
def check():
    """A GPT measured once."""
    torch.set_num_threads(1)  # before the fixture of every test does it

    def batch(seed, step):
        tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1_000_003 * seed + step))
        return tokens[:, :-1], tokens[:, 1:]

    build = partial(GPT, vocab=32, context=8, head_dim=16)
    workload = Workload("small", build, batch, next_token_loss, Size(64, 2))
    return measure(Site(workload, workload.size).trials)


def test_the_stream_grows_without_a_plan_and_keeps_its_size_with_one(check):
    finding = coordinates_kept(check)
    assert (finding.code, finding.level) == ("TH201", "note")
    assert "to the width" not in finding.sentence
    assert "as the width to the " in finding.sentence
    assert "at 10× the depth" in finding.sentence
    assert "The plan keeps them all" in finding.sentence
    assert "th.plan" in finding.remedy
    rows = {row["slope of"]: row for row in finding.evidence.rows}
    # Adam moves every layer that reads the width r_n too far, and so the logits.
    assert rows["change of logits"]["width"] == pytest.approx(1.0, abs=0.25)
    assert abs(rows["change of logits"]["width, plan"]) < 0.3
    assert rows["branch.1"]["depth, wanted"] == -1.0
    assert rows["branch.1"]["depth, plan"] == pytest.approx(-1.0, abs=0.35)
    width, depth = finding.evidence.figures
    assert [panel.title for panel in width.panels] == ["stream, without a plan", "stream, under a plan"]
    assert list(width.panels[0].data[1]["x"]) == [64, 128, 256]
    assert list(depth.panels[0].data[1]["x"]) == [2, 8]
    drawn = width.panels[0].data[1]["y"]
    assert drawn == [track.values["stream"][-1] for track in check.standard.tracks[:3]]


def test_the_base_is_trained_once_and_serves_both(check):
    assert check.standard.tracks[0] is check.planned.tracks[0]
    assert [track.size for track in check.planned.tracks] == [
        Size(64, 2),
        Size(128, 2),
        Size(256, 2),
        Size(64, 8),
    ]


def test_logits_start_at_nothing(check):
    assert all(track.values["logits"][0] == 0 for track in check.planned.tracks)


def test_a_plan_that_does_not_keep_them_is_a_warning(check):
    # What the plan should mend, as if it had not.
    finding = coordinates_kept(dataclasses.replace(check, planned=check.standard))
    assert finding.level == "warn"
    assert "Under a plan, after 3 steps" in finding.sentence
    assert finding.title == "Values that change with the size under a plan too"


def test_where_nothing_moves_with_the_size_all_is_well(check):
    finding = coordinates_kept(dataclasses.replace(check, standard=check.planned))
    assert finding.level == "ok"
    assert finding.sentence.startswith("Without a plan and with one, the network keeps them all")


def test_a_run_that_diverges_is_said(check):
    *others, last = check.standard.tracks
    values = {name: (*series[:-1], math.nan) for name, series in last.values.items()}
    lost = dataclasses.replace(last, values=values, status="diverged")
    standard = dataclasses.replace(check.standard, tracks=(*others, lost))
    finding = coordinates_kept(dataclasses.replace(check, standard=standard))
    assert finding.level == "note"
    assert "Without a plan, the training diverges as the depth grows." in finding.sentence
    # No line can be drawn through it.
    _, depth = finding.evidence.figures
    assert [panel.title for panel in depth.panels] == ["stream, under a plan"]


def test_two_sizes_that_are_close_need_more_to_be_judged(check):
    close = [track for track in check.standard.tracks if track.size in (Size(64, 2), Size(128, 2))]
    near = dataclasses.replace(check.standard, tracks=tuple(close))
    (slope,) = (slope for slope in near.slopes if slope.quantity == "stream")
    slopes = [dataclasses.replace(slope, value=value) for value in (0.5, 0.9)]
    bent = dataclasses.replace(near)
    object.__setattr__(bent, "bent", lambda tolerance: slopes)
    assert [one.value for one in coordinates._bent(bent)] == [0.9]


def test_a_network_without_branches_is_judged_by_its_logits(rows):
    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    finding = only(Site(rows(build), Size(64, 2)))
    assert finding.level == "note"
    assert "the change of logits goes as the width" in finding.sentence
    (figure,) = finding.evidence.figures
    assert figure.panels[0].title == "change of logits, without a plan"


def test_what_cannot_be_measured_is_noted(rows, monkeypatch):
    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def fail(*args, **options):
        raise UseError("two forward passes ran different operations")

    monkeypatch.setattr(coordinates, "follow", fail)
    finding = only(Site(rows(build), Size(64, 2)))
    assert (finding.code, finding.level) == ("TH201", "note")
    assert finding.sentence == "This could not be measured: two forward passes ran different operations."
