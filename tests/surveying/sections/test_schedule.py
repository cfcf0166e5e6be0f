import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.surveying import SurveyContext, trials
from theodolite.surveying.sections.schedule import largest_change, section

examine = section.run


def build(width, depth):
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )


@pytest.fixture
def surveyed(rows):
    def survey(schedule):
        workload = rows(build, schedule=schedule, size=Size(64, 2))
        return list(examine(SurveyContext(workload, workload.size)))

    return survey


def warm_up(optimizer):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    return lr_scheduler.SequentialLR(
        optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, 190)], milestones=[10]
    )


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 2000),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 2000),  # starts at zero
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=200),
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.97),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=50),
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], total_steps=50
        ),
        warm_up,
    ],
)
def test_one_factor_for_all_groups_is_in_order(surveyed, schedule):
    (finding,) = surveyed(schedule)
    assert (finding.code, finding.level) == ("TH205", "ok")


def test_a_cosine_with_an_absolute_end_is_caught(surveyed):
    # Groups at 2^-8 and a quarter of it end both at eta_min: their ratio of 4 is 1 then.
    (finding,) = surveyed(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 200, eta_min=1e-4))
    assert (finding.code, finding.level) == ("TH205", "warn")
    assert finding.evidence.numbers["largest change of a ratio"] == pytest.approx(4.0, rel=1e-3)
    assert "By step 200" in finding.sentence
    assert "plan.schedule" in finding.remedy


def test_one_cycle_with_one_maximum_is_caught(surveyed):
    (finding,) = surveyed(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=50))
    assert finding.level == "warn"
    assert finding.evidence.numbers["largest change of a ratio"] == pytest.approx(4.0, rel=1e-3)
    assert finding.evidence.numbers["steps"] in (50, 51)  # then it ends


def test_a_floor_under_the_learning_rate_is_caught(surveyed):
    (finding,) = surveyed(
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=5, min_lr=5e-4)
    )
    assert finding.level == "warn"


def test_without_a_schedule_nothing_is_said(surveyed):
    assert surveyed(None) == []


def test_a_group_that_stands_still_changes_its_ratio_without_bound(rows):
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)])
    schedule = [lambda step: 1.0, lambda step: 1.0 if step < 7 else 0.0]
    workload = rows(build, schedule=lambda optimizer: lr_scheduler.LambdaLR(optimizer, schedule))
    bend, _ = largest_change(SurveyContext(workload, Size(64, 2)), optimizer)
    assert bend.factor == math.inf
    assert bend.step == 7
    assert bend.found == (0.0, 0.1)


@pytest.mark.parametrize(
    "schedule, words",
    [
        (lambda optimizer: 1 / 0, r"'mine': schedule\(optimizer\) failed: ZeroDivisionError"),
        (lambda optimizer: None, r"'mine': schedule\(optimizer\) failed: it returned a NoneType"),
        (
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (3 - step)),
            "'mine': the schedule failed at step 3: ZeroDivisionError",
        ),
    ],
)
def test_a_schedule_that_fails_is_an_error_of_use(surveyed, schedule, words):
    with pytest.raises(UseError, match=words):
        surveyed(schedule)


def test_a_schedule_that_is_none_is_refused_at_once(rows):
    with pytest.raises(UseError, match="'mine': schedule is 3, which cannot be called"):
        rows(build, schedule=3)


def test_a_schedule_is_followed_to_its_end(surveyed, monkeypatch):
    """A cosine of five hundred steps has hardly bent after the hundred that are looked at without an end."""
    monkeypatch.setattr(trials, "UNKNOWN_SCHEDULE_STEPS", 100)
    (finding,) = surveyed(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 500, eta_min=5e-5))
    assert finding.level != "ok"
    (finding,) = surveyed(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 150))
    assert (finding.level, finding.evidence.numbers["steps"]) == ("ok", 151)
