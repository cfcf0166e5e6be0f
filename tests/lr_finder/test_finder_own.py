"""`find_lr` with the function that makes an optimizer: the workload's own, one of several, and wrong ones."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.lr_finder import find_lr
from theodolite.workloads import Workload


def build(width, depth):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))


def batch(seed, step):
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    inputs = torch.randn(32, 8, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def two(model):
    """Two optimizers; the first has a default that is not the highest rate, and a schedule."""
    first = torch.optim.SGD(model[0].parameters(), lr=0.02, momentum=0.9)
    warmup = torch.optim.lr_scheduler.LambdaLR(first, lambda step: min(1, step / 10))
    return [first, torch.optim.AdamW(model[2].parameters(), lr=0.05)], [warmup]


OWN = Workload("own", build, batch, nn.functional.cross_entropy, Size(16, 1), optimizer=two)
FEW = {"seeds": [4], "steps": 3, "low": 1e-3, "high": 0.1}


def test_own_is_the_loop_of_the_author_with_all_rates_by_one_factor():
    """The rates of a trial stand for the default of the first optimizer, as those of a sweep do."""
    (curve,) = find_lr(OWN, optimizer="own", **FEW).curves
    for trial in curve.trials[:3]:
        torch.manual_seed(4)
        model = build(16, 1)
        optimizers, _ = two(model)
        for optimizer, own in zip(optimizers, (0.02, 0.05), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = own * trial.rate / 0.02
        for step in range(3):
            inputs, targets = batch(4, step)
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
        with torch.no_grad():
            judges = [OWN.draw_held_out(step) for step in range(8)]
            losses = [nn.functional.cross_entropy(model(inputs), targets) for inputs, targets in judges]
        assert trial.loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_a_function_may_make_several_optimizers_and_its_rates_are_the_highest_of_all():
    by_name = find_lr(OWN, optimizer="own", **FEW).curves[0].trials
    ends = {name: FEW[name] * 0.05 / 0.02 for name in ("low", "high")}
    given = find_lr(OWN, optimizer=two, **{**FEW, **ends})
    assert given.factor == pytest.approx(given.best / 0.05)
    for mine, its in zip(by_name, given.curves[0].trials, strict=True):
        assert its.rate == pytest.approx(mine.rate * 0.05 / 0.02)
        assert its.loss == pytest.approx(mine.loss, rel=1e-4)


class Plain(torch.optim.Optimizer):
    """It has no learning rate."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        """Nothing."""


def fails(model):
    raise KeyError("lr")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model, config: None, r"factory <lambda> needs config beside the model: bind it"),
        (fails, r"factory fails failed at test_finder_own\.py:\d+: KeyError: 'lr'"),
        (lambda model: [{"params": model.parameters()}], "returned parameter groups: return an optimizer"),
        (lambda model: Plain(model.parameters()), r"no default learning rate|without a learning rate"),
        (lambda model: torch.optim.LBFGS(model.parameters()), r"LBFGS needs closure|LBFGS calls the loss"),
    ],
)
def test_functions_that_make_no_optimizer_to_train_with_are_refused_by_name(make, said):
    for given in (make, "own"):
        with pytest.raises(UseError, match=said):
            find_lr(dataclasses.replace(OWN, optimizer=make), optimizer=given, **FEW)


def test_own_needs_an_optimizer_that_is_the_same_at_every_call():
    with pytest.raises(UseError, match=r"says nothing of its optimizer: give Workload\(…, optimizer="):
        find_lr(dataclasses.replace(OWN, optimizer=None), optimizer="own", **FEW)
    rates = itertools.count(1)
    drifting = lambda model: torch.optim.SGD(model.parameters(), lr=0.01 * next(rates))  # noqa: E731
    with pytest.raises(UseError, match="keeps state between calls"):
        find_lr(dataclasses.replace(OWN, optimizer=drifting), optimizer="own", **FEW)
