import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.models import GPT
from theodolite.probes.scaling.coordinates import Slope
from theodolite.surveying import SurveyContext
from theodolite.surveying.sections import coordinates
from theodolite.surveying.sections.coordinates import (
    STEPS,
    CoordinatePair,
    coordinates_kept,
    measure,
    section,
    verdict,
)
from theodolite.surveying.trials import trials_of
from theodolite.workloads import Workload, next_token_loss

examine = section.run


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
    return measure(trials_of(SurveyContext(workload, workload.size)), [0])


def test_the_stream_grows_without_a_plan_and_keeps_its_size_with_one(check):
    finding = coordinates_kept(check)
    assert (finding.code, finding.level) == ("TH201", "note")
    assert "to the width" not in finding.sentence
    assert "as the width to the power " in finding.sentence
    # The factor between the sizes that were measured, not beyond them.
    assert "at 4× the width" in finding.sentence
    assert "at 4× the depth" in finding.sentence
    assert "Under a plan, all activations keep their size" in finding.sentence
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
    assert "Under a plan, after 3 training steps" in finding.sentence
    assert finding.title == "Activations that change with the size even under a plan"


def test_where_nothing_moves_with_the_size_all_is_well(check):
    finding = coordinates_kept(dataclasses.replace(check, standard=check.planned))
    assert finding.level == "ok"
    assert finding.sentence.startswith("Without a plan and with one, all activations keep their size")


def test_a_run_that_diverges_is_said(check):
    *others, last = check.standard.tracks
    values = {name: (*series[:-1], math.nan) for name, series in last.values.items()}
    lost = dataclasses.replace(last, values=values, status="diverged")
    standard = dataclasses.replace(check.standard, tracks=(*others, lost))
    finding = coordinates_kept(dataclasses.replace(check, standard=standard))
    assert finding.level == "note"
    assert "Without a plan, training diverges as the depth grows." in finding.sentence
    # No line can be drawn through it.
    _, depth = finding.evidence.figures
    assert [panel.title for panel in depth.panels] == ["stream, under a plan"]


@pytest.mark.parametrize(
    ("value", "interval", "growth", "expected"),
    [
        (0.2, None, 4, "kept"),
        (0.32, None, 4, "not known"),
        (-0.5, None, 4, "bent"),
        (0.5, None, 2, "not known"),  # sizes that are close need more
        (0.9, None, 2, "bent"),
        (0.1, 0.1, 8, "kept"),
        (0.1, 0.6, 8, "not known"),
        (0.35, 0.02, 8, "not known"),
        (0.6, 0.9, 8, "not known"),
        (0.6, 0.2, 8, "bent"),
        (math.nan, None, 4, "bent"),
    ],
)
def test_a_slope_is_kept_bent_or_not_known(value, interval, growth, expected):
    half = math.nan if interval is None else interval
    # The same about a wanted slope of -1 as about 0.
    for wanted in (0.0, -1.0):
        there = value + wanted
        slope = Slope("branch.0", "depth", there, there - half, there + half, wanted)
        assert verdict(slope, growth) == expected


def bent_by(coordinates, quantity, slope):
    """The tracks, as if a quantity were right along the depth and went with the width to a power."""

    def bent(track):
        size = (track.size.width / 64) ** slope * track.expected.get(quantity, 1)
        return dataclasses.replace(track, values={**track.values, quantity: (1.0,) * STEPS + (size,)})

    return dataclasses.replace(coordinates, tracks=tuple(map(bent, coordinates.tracks)))


def test_what_a_single_seed_cannot_tell_is_not_called_well(check):
    kept = bent_by(check.planned, "stream.first", 0.35)
    finding = coordinates_kept(dataclasses.replace(check, planned=kept))
    assert finding.level == "note"
    assert "all activations keep" not in finding.sentence
    assert (
        "It is not known whether the stream.first keeps its size under a plan: it grows as the width to the "
        "power 0.35, and 1 seed on sizes up to 4× the width cannot tell this from the right value."
        in finding.sentence
    )
    assert "--deep" in finding.remedy


@pytest.mark.parametrize(("others", "level"), [(0.0, "note"), (0.55, "warn")])
def test_a_fault_that_one_seed_finds_is_looked_for_with_two_more(check, monkeypatch, others, level):
    asked = []

    def measured(trials, seeds):
        asked.append(list(seeds))

        def of_seeds(found, slopes):
            each = [
                dataclasses.replace(track, seed=seed)
                for seed, slope in zip(seeds, slopes, strict=True)
                for track in bent_by(found, "change of branch.1", slope).tracks
            ]
            return dataclasses.replace(found, tracks=tuple(each))

        slopes = [0.6] if len(seeds) == 1 else [others, others + 0.02]
        return CoordinatePair(of_seeds(check.standard, slopes), of_seeds(check.planned, slopes))

    monkeypatch.setattr(coordinates, "measure", measured)
    context = SurveyContext(Workload("small", GPT, lambda *_: None, next_token_loss), Size(64, 2), seed=5)
    monkeypatch.setattr(
        coordinates, "trials_of", lambda context: SimpleNamespace(seed=5, noted=lambda one: one)
    )
    (finding,) = coordinates.examine(context)
    assert asked == [[5], [6, 7]]
    assert finding.level == level
    assert finding.evidence.numbers["seeds"] == 3


def test_what_is_not_known_without_a_plan_is_said_too(check):
    doubtful = dataclasses.replace(check, standard=bent_by(check.planned, "branch.1", -0.35))
    finding = coordinates_kept(doubtful)
    assert finding.level == "note"
    assert finding.sentence.startswith("It is not known whether the branch.1 keeps its size without a plan")
    assert "Under a plan, all activations keep their size" in finding.sentence


@pytest.mark.parametrize("quantity", ["stream.first", "branch.0", "change of branch.1", "layer.embed.weight"])
def test_every_row_that_is_shown_is_judged(check, quantity):
    wrong = dataclasses.replace(check, planned=bent_by(check.planned, quantity, 0.6))
    finding = coordinates_kept(wrong)
    assert finding.level == "warn"
    assert quantity in [row["slope of"] for row in finding.evidence.rows]


def test_the_stream_on_its_way_is_not_shown_along_the_depth(check):
    # After the first of L branches it is the embedding plus 1/L of something: no power of L.
    rows = {row["slope of"]: row for row in coordinates_kept(check).evidence.rows}
    assert rows["stream.first"]["width, plan"] is not None
    assert rows["stream.first"]["depth, plan"] is rows["stream.first"]["depth, wanted"] is None
    assert rows["stream"]["depth, plan"] is not None


def test_a_network_without_branches_is_judged_by_its_layers_and_logits(rows):
    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    finding = only(SurveyContext(rows(build), Size(64, 2)))
    assert finding.level == "note"
    assert "the change of logits grows as the width" in finding.sentence
    assert [row["slope of"] for row in finding.evidence.rows] == [
        "layer.0.weight",
        "change of layer.0.weight",
        "change of logits",
    ]
    (figure,) = finding.evidence.figures
    assert figure.panels[0].title == "change of logits, without a plan"


def test_a_recurrent_network_is_judged_layer_by_layer():
    class Recurrent(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.inside, self.readout = nn.LSTM(8, width, batch_first=True), nn.Linear(width, 2)

        def forward(self, x):
            return self.readout(self.inside(x)[0][:, -1])

    def batch(seed, step):
        x = torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(1_000_003 * seed + step))
        return x, (x.sum((1, 2)) > 0).long()

    workload = Workload("recurrent", Recurrent, batch, nn.functional.cross_entropy, Size(64, 1))
    rows = {row["slope of"]: row for row in only(SurveyContext(workload, workload.size)).evidence.rows}
    # Its own initialisation is uniform within ±1/√width, of what reads 8 inputs too.
    inputs = rows["layer.inside.weight_ih_l0"]
    assert inputs["width"] == pytest.approx(-0.5, abs=0.1)
    assert inputs["width, plan"] == pytest.approx(0, abs=0.1)
    assert "change of layer.inside.weight_hh_l0" in rows


def test_what_cannot_be_measured_is_noted(rows, monkeypatch):
    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def fail(*args, **options):
        raise UseError("two forward passes ran different operations")

    monkeypatch.setattr(coordinates, "follow_from_zero", fail)
    finding = only(SurveyContext(rows(build), Size(64, 2)))
    assert (finding.code, finding.level) == ("TH201", "note")
    assert finding.sentence == "This could not be measured: two forward passes ran different operations."
