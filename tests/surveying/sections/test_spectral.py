import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from theodolite.core.size import Size
from theodolite.models import GPT, ResidualMLP
from theodolite.probes.scaling.spectral import Ratio
from theodolite.surveying import SurveyContext
from theodolite.surveying.sections import spectral
from theodolite.surveying.sections.spectral import START_SIZES, STEP_SIZES, judge, section
from theodolite.surveying.trials import trials_of
from theodolite.workloads import Workload, next_token_loss

examine = section.run


def pair(site):
    steps, starts = examine(site)
    assert (steps.code, starts.code) == ("TH202", "TH203")
    return steps, starts


def powers(finding, column):
    """The exponents behind the factors at the larger size, which is four times the base."""
    return {row["tensor"]: math.log(row[column], 4) for row in finding.evidence.rows}


@pytest.fixture(scope="module")
def growths():
    """A GPT measured once."""
    torch.set_num_threads(1)  # before the fixture of every test does it

    def batch(seed, step):
        tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1_000_003 * seed + step))
        return tokens[:, :-1], tokens[:, 1:]

    build = partial(GPT, vocab=32, context=8, head_dim=16)
    workload = Workload("small", build, batch, next_token_loss, Size(64, 2))
    return spectral.measure(trials_of(SurveyContext(workload, workload.size)), 0)


def test_a_gpt_breaks_the_condition_by_the_known_powers_and_a_plan_mends_it(growths):
    steps, starts = judge(STEP_SIZES, growths), judge(START_SIZES, growths[:1])
    assert (steps.level, starts.level) == ("note", "note")
    width = powers(steps, "256 × 2")
    # Adam's steps have ‖A‖_R ~ n_in, whatever the layer: r_n too large where the fan-in grows.
    for name in ("blocks.*.feed_forward.branch.up.weight", "readout.weight"):
        assert width[name] == pytest.approx(1.0, abs=0.25)
    assert width["embed.weight"] == pytest.approx(0.0, abs=0.2)
    depth = powers(steps, "64 × 8")
    assert depth["blocks.*.feed_forward.branch.down.weight"] == pytest.approx(1.0, abs=0.25)
    assert depth["blocks.*.feed_forward.branch.up.weight"] == pytest.approx(0.0, abs=0.3)
    for size in ("256 × 2", "64 × 8"):
        assert all(abs(power) < 0.3 for power in powers(steps, f"{size}, plan").values())
    assert "from 64 × 2 to 256 × 2, an update of" in steps.sentence
    assert "Under a plan, all tensors satisfy the spectral condition" in steps.sentence
    assert "th.plan" in steps.remedy

    # Only the readout starts at another power of the width than a plan would have it: 1/√n for 1/n.
    assert starts.sentence.startswith(
        "Without a plan, 1 kind of tensor out of 11 breaks the spectral condition as the width grows: from "
        "64 × 2 to 256 × 2, the initial value of readout.weight becomes 2"
    )
    assert powers(starts, "256 × 2")["readout.weight"] == pytest.approx(0.5, abs=0.1)


def flat_std(width, depth):
    """The same std at every width, as transformers has it: hidden weights start √n too large."""
    model = nn.Sequential(
        nn.Linear(8, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, 2, bias=False),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def test_a_std_that_ignores_the_width_is_named(rows):
    _, starts = pair(SurveyContext(rows(flat_std), Size(64, 2)))
    found = powers(starts, "256 × 2")
    assert found["2.weight"] == pytest.approx(0.5, abs=0.05)
    assert found["4.weight"] == pytest.approx(1.0, abs=0.1)
    assert found["0.weight"] == pytest.approx(0.0, abs=0.1)
    assert starts.level == "note"
    assert "4.weight becomes 4" in starts.sentence
    assert "plan.initialize" in starts.remedy


@pytest.mark.parametrize(("others", "level"), [((1.0, 1.0), "note"), ((2.2, 2.0), "warn")])
def test_a_fault_that_one_seed_finds_is_looked_for_with_two_more(growths, monkeypatch, others, level):
    asked = []
    factors = {5: 2.1, 6: others[0], 7: others[1]}

    def measured(trials, seed):
        asked.append(seed)
        width, *rest = growths
        (line, *lines) = width.planned.rows
        step = Ratio(here=factors[seed], base=1.0, expected=1.0)
        rows = (dataclasses.replace(line, role="hidden", step=step), *lines)
        return [dataclasses.replace(width, planned=dataclasses.replace(width.planned, rows=rows)), *rest]

    monkeypatch.setattr(spectral, "measure", measured)
    monkeypatch.setattr(spectral, "trials_of", lambda _: SimpleNamespace(seed=5, noted=lambda one: one))
    finding, _ = spectral.examine(None)
    assert asked == [5, 6, 7]
    assert finding.level == level
    (row, *_) = finding.evidence.rows
    mean = math.prod(factors.values()) ** (1 / 3)
    assert row["256 × 2, plan"] == pytest.approx(mean, rel=0.01)


def test_what_noise_can_do_is_no_finding(growths):
    """Off by 1.9 over a growth of 4 is an exponent of 0.46: too much for a weight, not for a bias.

    2.5 is too much for a bias too, unless it has few entries, each of which may have moved by one step of
    Adam or by three.
    """
    (width, _) = growths

    def pretend(role, off=1.9, entries=64):
        (line, *_) = width.planned.rows
        step = Ratio(here=off, base=1.0, expected=1.0)
        one = dataclasses.replace(line, role=role, step=step, entries=entries)
        planned = dataclasses.replace(width.planned, rows=(one,))
        return judge(STEP_SIZES, [dataclasses.replace(width, planned=planned)])

    assert pretend("hidden").level == "warn"
    assert pretend("bias").level == "note"
    assert pretend("bias", off=2.5).level == "warn"
    assert pretend("bias", off=2.5, entries=2).level == "note"
    assert pretend("bias", off=3.5, entries=2).level == "warn"


def test_the_start_is_judged_against_width_alone(rows):
    steps, starts = pair(SurveyContext(rows(partial(ResidualMLP, inputs=8, outputs=2)), Size(64, 2)))
    assert {"256 × 2", "64 × 8"} < set(steps.evidence.rows[0])
    assert "64 × 8" not in starts.evidence.rows[0]


def good_by_itself(width, depth):
    """Nothing but an input layer grows: one learning rate serves all widths."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, width, bias=False)
            nn.init.normal_(self.first.weight)

        def forward(self, x):
            y = self.first(x)
            return torch.stack([y.square().mean(1), y.mean(1)], 1)

    return Frozen()


def test_where_nothing_breaks_all_is_well(rows):
    steps, starts = pair(SurveyContext(rows(good_by_itself), Size(64, 2)))
    assert (steps.level, starts.level) == ("ok", "ok")
    assert steps.sentence.startswith(
        "Without a plan and with one, all tensors satisfy the spectral condition"
    )
    assert steps.remedy == ""


def test_what_a_plan_does_not_mend_is_a_warning(rows, monkeypatch):
    site = SurveyContext(rows(flat_std), Size(64, 2))
    planned = type(trials_of(site)).planned

    def wrong(self, size):
        plan = planned(self, size)
        row = plan["2.weight"]
        return dataclasses.replace(
            plan, rows={**plan.rows, row.name: dataclasses.replace(row, lr=12 * row.lr)}
        )

    monkeypatch.setattr(type(trials_of(site)), "planned", wrong)
    steps, starts = pair(site)
    assert (steps.level, starts.level) == ("warn", "note")
    assert "A plan does not fix 2.weight (steepest exponent 1." in steps.sentence
    assert steps.title == "Updates that a plan does not fix"


def test_a_training_that_diverges_is_said(growths):
    width, depth = growths
    lost = dataclasses.replace(width.standard, losses=(3.0, math.nan, math.nan))
    finding = judge(STEP_SIZES, [dataclasses.replace(width, standard=lost), depth])
    assert finding.level == "note"
    assert "Without a plan, training diverges at 256 × 2." in finding.sentence
    lost = dataclasses.replace(depth.planned, losses=(3.0, math.inf, math.nan))
    finding = judge(STEP_SIZES, [width, dataclasses.replace(depth, planned=lost)])
    assert finding.level == "warn"
    assert "Under a plan, training diverges at 64 × 8." in finding.sentence


def test_training_that_fails_at_another_size_is_a_note(rows):
    class Short(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)

        def forward(self, x):
            return self.last(self.first(x).relu())

    calls = []

    def batch(seed, step):
        calls.append(step)
        if step == 2:
            return ()  # the data ends
        return torch.ones(4, 8), torch.zeros(4, dtype=torch.long)

    (finding,) = examine(SurveyContext(rows(Short, batch=batch), Size(64, 2)))
    assert (finding.code, finding.level) == ("TH202", "note")
    assert "batch(0, 2) returned a tuple of 0" in finding.sentence


def test_a_tensor_whose_gradient_is_rounding_is_left_out_with_a_line(growths):
    name = "blocks.0.attention.branch.key.weight"

    def rounded(measured):
        lines = [
            dataclasses.replace(line, step=Ratio(1e-6, 1.0, 1.0), only_rounding=True)
            if line.pattern == alike.pattern
            else line
            for line in measured.rows
        ]
        return dataclasses.replace(measured, rows=tuple(lines))

    (alike,) = (line for line in growths[0].planned.rows if line.name == name)
    changed = [
        dataclasses.replace(one, standard=rounded(one.standard), planned=rounded(one.planned))
        for one in growths
    ]
    finding = judge(STEP_SIZES, changed)
    assert finding.level == "note"
    assert f"Not judged: {alike.pattern}. The gradient is zero up to rounding" in finding.sentence
    (row,) = (row for row in finding.evidence.rows if row["tensor"] == alike.pattern)
    assert row["256 × 2, plan"] is row["64 × 8"] is None
    assert "Not judged" not in judge(START_SIZES, changed[:1]).sentence


class Whisper(nn.Module):
    """A branch whose gradients are below Adam's eps, and further below it in the narrow network."""

    def __init__(self, width, depth):
        super().__init__()
        self.embed, self.branch = nn.Linear(8, width), nn.Linear(width, width)
        self.readout = nn.Linear(width, 2)
        self.scale = 1e-8 * (width / 256) ** 3

    def forward(self, x):
        x = self.embed(x)
        return self.readout(x + self.scale * self.branch(x))


def test_a_step_that_eps_limits_is_no_fault_of_the_rule_and_is_told(rows):
    """A step then goes as gradient/eps, and its size says nothing about the learning rate."""
    workload = rows(Whisper)
    for width in (64, 256):
        model = Whisper(width, 2)
        workload.evaluate(model, workload.draw(0, 0)).backward()
        assert model.branch.weight.grad.abs().max() < 1e-8  # the eps of Adam
    steps, _ = pair(SurveyContext(workload, Size(64, 2)))
    assert (steps.level, steps.title) == ("note", "Updates that change with the network's size")
    assert "all other tensors satisfy the spectral condition" in steps.sentence
    assert (
        "Not judged: branch.weight and branch.bias, whose steps AdamW's eps limits at 64 × 2"
        in steps.sentence
    )
    assert "eps=1e-12" in steps.remedy
    (row,) = (row for row in steps.evidence.rows if row["tensor"] == "branch.weight")
    assert row["256 × 2"] is row["256 × 2, plan"] is None
    # What is wrong for another reason is still said to be.
    assert "update of readout.weight becomes" in steps.sentence


def test_of_blocks_that_eps_limits_in_part_the_finding_says_how_many(growths):
    """Here the names of the base are those of its two blocks, and of the deep network those of eight."""
    _, deep = growths
    pattern = "blocks.*.feed_forward.branch.up.weight"

    def limited(measured, free):
        rows = []
        for row in measured.rows:
            if row.pattern == pattern and f"blocks.{free}." not in row.name:
                row = dataclasses.replace(row, over_eps=(0.25, 50.0))
            rows.append(row)
        return dataclasses.replace(measured, rows=tuple(rows))

    def told(free):
        standard, planned = limited(deep.standard, free), limited(deep.planned, free)
        return judge(STEP_SIZES, [growths[0], dataclasses.replace(deep, standard=standard, planned=planned)])

    finding = told(free=3)
    assert f"Not judged: 7 of 8 of {pattern}, whose steps AdamW's eps limits at 64 × 8." in finding.sentence
    assert "Gradients there are as small as 0.25 times eps" in finding.sentence
    assert "all other tensors satisfy" in finding.sentence
    assert "eps=1e-12" in finding.remedy
    (row,) = (row for row in finding.evidence.rows if row["tensor"] == pattern)
    (free,) = (one for one in deep.planned.rows if one.name == pattern.replace("*", "3"))
    assert row["64 × 8, plan"] == pytest.approx(free.off("step"), rel=0.01)
    assert f"Not judged: {pattern}, whose" in told(free=None).sentence
    assert "Not judged" not in judge(STEP_SIZES, growths).sentence
