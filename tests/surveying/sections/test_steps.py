import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import theodolite as th
from theodolite.core.size import Size
from theodolite.models import ResidualMLP
from theodolite.surveying import SurveyContext
from theodolite.surveying.budget import with_few
from theodolite.surveying.curvature_setup import find_setup
from theodolite.surveying.section import attempt
from theodolite.surveying.sections import steps
from theodolite.surveying.sections.steps import section, take_first_step
from theodolite.surveying.trials import LR, PlannedRates, trials_of
from theodolite.workloads import Workload

examine = section.run


def rows(seed, step, scale=1.0):
    """Rows of sixteen numbers; the class is the greatest of the first four."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    inputs = torch.randn(64, 16, generator=generator)
    return scale * inputs, inputs[:, :4].argmax(1)


def site_of(**changes):
    build = partial(ResidualMLP, inputs=16, outputs=4)
    given = {"build": build, "batch": rows, "loss": F.cross_entropy, "size": Size(64, 2)} | changes
    workload = Workload("mine", **given)
    return SurveyContext(workload, workload.size)


def found(site):
    return {finding.code: finding for finding in examine(site)}


def constant(factor):
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: factor)


def warmed(factor):
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: factor * min(1.0, step / 100))


def squared(logits, targets):
    return (logits - F.one_hot(targets, 4)).square().mean()


@pytest.fixture(scope="module")
def usual():
    torch.set_num_threads(1)  # before the fixture of every test does it
    return found(site_of())


def test_a_usual_learning_rate_raises_nothing(usual):
    findings = usual
    assert list(findings) == ["TH701", "TH702", "TH703"]
    assert findings["TH702"].level == findings["TH703"].level == "ok"
    assert findings["TH701"].level == "ok"
    assert "It lowers the loss" in findings["TH701"].sentence


def test_a_learning_rate_a_hundred_times_too_high_is_warned_of_by_all_three():
    findings = found(site_of(schedule=constant(100.0)))
    assert [finding.level for finding in findings.values()] == ["warn"] * 3
    assert "It raises the loss" in findings["TH702"].sentence
    safe = float(findings["TH702"].remedy.split("below ")[1].split(",")[0])
    best = float(findings["TH703"].remedy.split("about ")[1].split(",")[0])
    mended = found(site_of(schedule=constant(min(safe, best) / LR)))
    assert "warn" not in [finding.level for finding in mended.values()]


def test_a_warm_up_to_the_same_rate_is_a_note():
    findings = found(site_of(schedule=warmed(100.0)))
    assert [finding.level for finding in findings.values()] == ["note"] * 3
    assert "The schedule begins at 0, which does not raise it" in findings["TH701"].sentence
    assert "Keep the warm-up" in findings["TH702"].remedy


def test_a_learning_rate_that_hardly_moves_is_a_note():
    findings = found(site_of(schedule=constant(1 / 200)))
    assert [finding.level for finding in findings.values()] == ["ok", "ok", "note"]
    assert findings["TH703"].title == "A learning rate that hardly lowers the loss"


def test_a_step_far_beyond_its_radius_that_lowers_the_loss_is_all_right():
    site = site_of(batch=partial(rows, scale=255.0))
    finding = next(examine(site))
    assert finding.evidence.numbers["r"] > 10
    assert finding.evidence.numbers["loss after it"] < finding.evidence.numbers["loss at the start"]
    assert finding.level == "ok"


def test_without_a_softmax_there_is_no_radius_and_the_rest_goes_on():
    findings = found(site_of(loss=squared, schedule=constant(100.0)))
    assert [finding.level for finding in findings.values()] == ["note", "warn", "warn"]
    assert "not the cross-entropy" in findings["TH701"].sentence
    (figure,) = findings["TH702"].evidence.figures
    assert figure.panels[0].data[0]["y"]


def test_the_step_is_that_of_adamw_and_the_loss_along_it_the_loss_after_it():
    site = site_of()
    setup = find_setup(site)
    before = [tensor.clone() for tensor in setup.model.parameters()]
    taken = take_first_step(setup, LR, LR / 2)
    assert all(map(torch.equal, before, setup.model.parameters()))
    assert all(tensor.grad is None for tensor in setup.model.parameters())
    for rate in (LR / 2, LR, 8 * LR):
        model = site.build(setup.size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        F.cross_entropy(model(setup.batch[0]), setup.batch[1]).backward()
        gradient = torch.cat([tensor.grad.flatten() for tensor in model.parameters()])
        start = torch.cat([tensor.detach().flatten() for tensor in model.parameters()])
        optimizer.step()
        moved = torch.cat([tensor.detach().flatten() for tensor in model.parameters()]) - start
        with torch.no_grad():
            after = F.cross_entropy(model(setup.batch[0]), setup.batch[1])
        assert taken.loss_at(rate) == pytest.approx(after.item(), rel=1e-4)
        assert taken.slope == pytest.approx((gradient @ moved).item() / rate, rel=1e-4)
        if rate == LR:
            assert taken.length == pytest.approx(moved.norm().item(), rel=1e-5)
    # What a parabola of slope and curvature foretells is right for small steps.
    small = taken.rates[0]
    foretold = taken.start + taken.slope * small + taken.bend * small**2 / 2
    assert taken.losses[0] == pytest.approx(foretold, abs=2e-3 * abs(taken.start - taken.losses[0]) + 1e-6)
    direct = th.probes.radius(
        setup.model, F.cross_entropy, setup.batch, _step(setup, LR), parameters=setup.parameters
    )
    assert taken.ghost == pytest.approx(LR / direct.r, rel=1e-4)
    # A bias that is raised for all classes moves no logit against another.
    alike = {"weight": torch.zeros(3, 2), "bias": torch.ones(3)}
    batch = torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)
    nowhere = th.probes.radius(nn.Linear(2, 3), F.cross_entropy, batch, alike)
    assert math.isinf(dataclasses.replace(taken, radius=nowhere).ghost)


def _step(setup, rate):
    optimizer = torch.optim.AdamW(setup.model.parameters(), lr=rate, weight_decay=0.0)
    F.cross_entropy(setup.model(setup.batch[0]), setup.batch[1]).backward()
    step = th.probes.optimizer_step(optimizer, setup.model)
    optimizer.zero_grad()
    return step


def test_where_the_loss_rises_is_where_one_step_raises_it():
    setup = find_setup(site_of())
    taken = take_first_step(setup, LR, LR)
    assert math.isfinite(taken.above)
    below = [rate for rate in taken.rates if rate < taken.above]
    assert not any(taken.raises(rate) for rate in below)
    assert taken.raises(min(rate for rate in taken.rates if rate > taken.above))


def test_impatience_is_a_note(monkeypatch):
    monkeypatch.setattr(steps, "QUICK_WORK", 1e6)
    (finding,) = attempt(steps._tried(site_of(), PlannedRates(LR, LR)))
    assert finding.level == "note"
    assert "4 steps of 64 × 2 at each learning rate are too much work" in finding.sentence


def test_fewer_steps_where_they_are_dear_are_told(monkeypatch):
    site = site_of()
    trials = trials_of(site)
    each = trials.step_work(trials.base, with_few(trials.workload, steps.TARGETS))
    monkeypatch.setattr(steps, "QUICK_WORK", 5.5 * steps.LEGS * each)
    (finding,) = steps._tried(site, PlannedRates(LR, LR))
    assert finding.evidence.numbers["steps"] == 5
    assert "These are 5 steps instead of 12, which would take too long." in finding.sentence


def test_a_sentence_says_at_which_size_and_after_how_many_steps(usual):
    """TH302 is of the curvature at the start; this one is of a training, of another size perhaps."""
    said = found(dataclasses.replace(site_of(size=Size(64, 1)), size=Size(64, 1)))
    assert "At 64 × 1 the parabola along AdamW's first step" in said["TH702"].sentence
    low, high = (usual["TH703"].evidence.numbers[name] for name in ("low", "high"))
    assert usual["TH703"].sentence.startswith(
        "mine, 64 × 2: with adamw, the loss is lower after 12 steps than before them at learning rates from "
        f"{low:.2g} to {high:.2g}, most at "
    )
    assert said["TH703"].sentence.startswith("mine, 64 × 2: with adamw")


class Tailed(ResidualMLP):
    """No dimension of its last weight grows with the width, so no role can be given to it."""

    def __init__(self, width, depth):
        super().__init__(width, depth, inputs=16, outputs=4)
        self.tail = nn.Linear(4, 4)

    def forward(self, x):
        return self.tail(super().forward(x))


def test_without_a_plan_no_sentence_speaks_of_a_planned_rate():
    findings = {one.code: one for one in attempt(section.run(site_of(build=Tailed)))}
    assert "TH703" not in findings
    assert findings["TH107"].level == "fail"
    for code in ("TH701", "TH702"):
        assert "plan" not in findings[code].sentence
    assert "the survey's rate is 0.0039" in findings["TH702"].sentence
    hasty = found(site_of(schedule=constant(100.0)))
    assert "the schedule's highest rate is 0.39" in hasty["TH702"].sentence
    assert "The schedule's highest rate is 0.39, " in hasty["TH703"].sentence


def test_the_figures_show_the_planned_rate_and_the_interval(usual):
    findings = usual
    (along,) = findings["TH701"].evidence.figures
    assert LR in [shape.get("x0") for shape in along.panels[0].layout["shapes"]]
    (curve,) = findings["TH703"].evidence.figures
    numbers = findings["TH703"].evidence.numbers
    shaded = [shape for shape in curve.panels[0].layout["shapes"] if shape["type"] == "rect"]
    assert [(shape["x0"], shape["x1"]) for shape in shaded] == [(numbers["low"], numbers["high"])]


def test_a_network_without_a_gradient_is_a_note():
    class Still(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.inner = ResidualMLP(width, depth, inputs=16, outputs=4)

        def forward(self, inputs):
            return self.inner(inputs).detach() + 0 * self.inner(inputs)

    finding = next(examine(site_of(build=Still)))
    assert finding.level in ("note", "fail")
