"""Evaluations along training, and metrics: what they say, and that training does not notice them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from theodolite import Size, UseError, Workload, fleet
from theodolite.fleet.checkpoint import RunCheckpoint
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.plans import planned
from theodolite.fleet.run import Grid, Run
from theodolite.fleet.training import train
from theodolite.fleet.vectorised import vectorised
from theodolite.workloads import StepsTo

from . import tiny
from .test_vectorised import agree


class Net(nn.Module):
    """Draws random numbers in training, and counts its passes in evaluation, on which its output depends."""

    drop = 0.2

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        hidden = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(depth)]
        self.layers = nn.Sequential(nn.Linear(8, width), *hidden, nn.Dropout(self.drop), nn.Linear(width, 2))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.passes.add_(1.0)
        return self.layers(x) * (1 + 0.1 * self.passes)


class Undropped(Net):
    drop = 0.0


def rows(seed: int, step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(997 * seed + step))
    return inputs, (inputs.sum(1) > 0).long()


mine = Workload("mine", Net, rows, nn.functional.cross_entropy)
RUN = Run("mine", Size(8, 1), lr=2**-5, base=Size(8, 1), steps=7, held_out=2, schedule="constant")
EVALUATED = dataclasses.replace(RUN, evaluate_every=3, probes=("accuracy",))
AVERAGED = dataclasses.replace(EVALUATED, optimizer="schedule-free")


def judged(build: Callable[..., nn.Module] = Net, **metrics: Any) -> Workload:
    return Workload("mine", build, rows, nn.functional.cross_entropy, metrics=metrics)


@pytest.mark.parametrize("run", [EVALUATED, AVERAGED], ids=lambda run: run.optimizer)
def test_training_does_not_notice_evaluations(run: Run) -> None:
    if run.optimizer == "schedule-free":
        pytest.importorskip("pytorch_optimizer")
    without, evaluated = train(dataclasses.replace(run, evaluate_every=0), mine), train(run, mine)
    assert evaluated.metrics["loss"] == without.metrics["loss"]
    assert evaluated.held_out == without.held_out
    assert evaluated.readings == without.readings
    assert without.metrics.keys() == {"loss"}


@pytest.mark.parametrize("run", [EVALUATED, AVERAGED], ids=lambda run: run.optimizer)
def test_an_evaluation_says_what_a_run_of_so_many_steps_ends_with(run: Run) -> None:
    if run.optimizer == "schedule-free":
        pytest.importorskip("pytorch_optimizer")
    series = train(run, mine).metrics
    for step in (3, 6, 7):
        shorter = train(dataclasses.replace(run, steps=step, evaluate_every=0), mine)
        assert dict(series["held-out loss"])[step] == shorter.held_out
        for name in ("accuracy", "train accuracy"):
            assert dict(series[name])[step] == shorter.readings[name]
    assert {name: [step for step, _ in each] for name, each in series.items() if name != "loss"} == {
        name: [0, 3, 6, 7] for name in ("held-out loss", "accuracy", "train accuracy")
    }
    assert len(set(dict(series["held-out loss"]).values())) == 4


def test_before_the_first_step_the_network_is_as_it_was_built() -> None:
    model = planned(RUN, mine).build(RUN.seed).eval()
    batches = [mine.draw_held_out(step) for step in range(2)]
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(inputs), targets).item() for inputs, targets in batches]
        inputs, targets = rows(0, 0)
        right = (model(inputs).argmax(1) == targets).float().mean().item()
    series = train(EVALUATED, mine).metrics
    assert series["held-out loss"][0] == (0, pytest.approx(sum(losses) / 2, rel=1e-6))
    assert series["train accuracy"][0] == (0, right)


@pytest.mark.parametrize("engine", [serial, vectorised], ids=["serial", "vectorised"])
def test_nothing_is_recorded_after_a_divergence(engine: Any) -> None:
    def late(seed: int, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = rows(seed, step)
        return inputs, torch.full_like(targets, -100) if step == 4 and seed == 0 else targets

    workload = Workload(
        "mine", Undropped, late, nn.functional.cross_entropy, metrics={"one": lambda model: 1.0}
    )
    runs = [dataclasses.replace(RUN, evaluate_every=2, steps=60, seed=seed) for seed in (0, 1)]
    outcomes = {each.run.seed: each for each in engine(runs, Resources({"mine": workload}))}
    assert (outcomes[0].status, outcomes[0].step) == ("diverged", 4)
    assert [step for step, _ in outcomes[0].metrics["held-out loss"]] == [0, 2]
    assert "one" not in outcomes[0].readings
    assert [step for step, _ in outcomes[1].metrics["held-out loss"]] == [*range(0, 61, 2)]
    assert outcomes[1].readings["one"] == 1.0


def test_steps_to_a_level_are_read_off_the_series() -> None:
    loss = dict(train(dataclasses.replace(RUN, evaluate_every=1), mine).metrics["held-out loss"])
    level = (loss[2] + loss[3]) / 2  # between the evaluations after 2 and 3 steps
    assert all(loss[step] > level for step in (0, 1, 2))
    metrics = {
        "first": StepsTo("held-out loss", at_most=level, every=1),
        "never": StepsTo("accuracy", at_least=1.5, every=5),
        "at once": StepsTo("accuracy", at_least=0, every=5),
    }
    outcome = train(RUN, judged(**metrics))
    assert [step for step, _ in outcome.metrics["accuracy"]] == [*range(8)]
    assert {name: outcome.readings[name] for name in metrics} == {"first": 3, "never": math.inf, "at once": 0}
    rarely = train(dataclasses.replace(RUN, evaluate_every=5), judged(**metrics))
    assert rarely.readings["first"] == (5 if loss[5] <= level else 7)


def test_the_first_step_of_a_series() -> None:
    series = {"accuracy": [(20, 0.9), (0, math.nan), (10, 0.5)], "loss": [(0, 2.0), (5, 1.0), (10, 2.0)]}
    assert fleet.first_step(series, "accuracy", at_least=0.5) == 10
    assert fleet.first_step(series, "accuracy", at_least=0.95) is None
    assert fleet.first_step(series, "loss", at_most=1.0) == 5
    outcome = train(EVALUATED, mine)
    assert fleet.first_step(outcome, "train accuracy", at_least=0.0) == 0
    with pytest.raises(
        UseError, match=r"no series 'acuracy' was recorded: there is accuracy, loss\. .*every"
    ):
        fleet.first_step(series, "acuracy", at_least=0.5)
    with pytest.raises(
        UseError, match=r"the level of 'loss': at_least is 1\.0 and at_most is 2\.0: give one"
    ):
        fleet.first_step(series, "loss", at_least=1.0, at_most=2.0)


def test_a_metric_sees_the_trained_network_and_changes_nothing() -> None:
    seen: list[Any] = []

    def spoiling(model: Net) -> float:
        seen.append((model.training, torch.is_grad_enabled(), torch.rand(1).item(), np.random.rand()))
        model.train()
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
        with torch.enable_grad():
            model(rows(0, 0)[0]).sum().backward()
        return 1.0

    def looking(model: Net) -> float:
        seen.append((model.training, torch.is_grad_enabled(), torch.rand(1).item(), np.random.rand()))
        assert all(parameter.grad is None for parameter in model.parameters())
        return sum(tensor.double().abs().sum().item() for tensor in model.state_dict().values())

    first = train(RUN, judged(looking=looking)).readings["looking"]
    outcome = train(RUN, judged(spoiling=spoiling, looking=looking))
    assert outcome.readings["looking"] == first
    torch.manual_seed(RUN.seed)
    np.random.seed(RUN.seed)
    assert seen == [(False, False, torch.rand(1).item(), np.random.rand())] * 3


@pytest.mark.parametrize(
    "value, found",
    [
        (3, 3.0),
        (torch.tensor([[2.5]]), 2.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7.0),
        (math.inf, math.inf),
        (torch.tensor(math.inf), math.inf),
    ],
    ids=str,
)
def test_a_number_is_a_float(value: Any, found: float) -> None:
    value = train(RUN, judged(residual=lambda model: value)).readings["residual"]
    assert type(value) is float
    assert value == found


def raising(model: nn.Module) -> float:
    raise ArithmeticError("singular\nmatrix")


def leaving(model: nn.Module) -> float:
    raise SystemExit("enough")


BAD = [
    (raising, "raised ArithmeticError: singular matrix. Repair it"),
    (leaving, "raised SystemExit: enough"),
    (lambda model: math.nan, "returned nan, by which runs cannot be compared. Return a finite number"),
    (lambda model: torch.tensor(math.nan), r"returned nan, by which"),
    (lambda model: -math.inf, "returned -inf, by which runs cannot be compared"),
    (lambda model: None, "returned None, which is no real number. Return a float"),
    (lambda model: "3", "returned a str, which is no real number"),
    (lambda model: True, "returned the bool True, which is no real number"),
    (lambda model: torch.tensor(True), "which is no real number"),
    (lambda model: torch.ones(2), r"returned a tensor of shape \(2,\), which is no real number"),
    (lambda model: torch.tensor(1j), "which is no real number"),
    (lambda model: 10**400, "by which runs cannot be compared"),
]


@pytest.mark.parametrize("metric, said", BAD, ids=[said[:20] for _, said in BAD])
def test_a_bad_metric_fails_the_run_by_its_name(metric: Any, said: str) -> None:
    with pytest.raises(UseError, match=f"^workload 'mine': metric 'residual' .*{said}"):
        train(RUN, judged(good=lambda model: 1.0, residual=metric))


def mean_square(model: nn.Module) -> float:
    return model(rows(5, 0)[0]).square().mean().item()


def test_many_models_in_one_program_have_the_values_of_one_after_the_other() -> None:
    to_learn = StepsTo("accuracy", at_least=0.7, every=2)
    workload = judged(Undropped, weight=tiny.largest_weight, square=mean_square, learn=to_learn)
    axes = {"lr": [2**-7, 2**-4], "seed": [0, 1], "parameterization": ["plan", "standard"]}
    fixed = {"workload": "mine", "size": Size(8, 1), "base": Size(8, 1), "optimizer": "sgd", "steps": 9}
    runs = Grid(axes, {**fixed, "held_out": 3}).runs
    resources = Resources({"mine": workload}, chunk=3)
    agree(runs, resources)
    alone = {each.run: each.readings for each in serial(runs, resources)}
    together = {each.run: each.readings for each in vectorised(runs, resources)}
    for name in workload.metrics:
        found = [alone[run][name] for run in runs]
        assert [together[run][name] for run in runs] == pytest.approx(found, rel=1e-4)
        assert len(set(found)) > 1


@pytest.mark.parametrize("stop", [ArithmeticError, SystemExit])
def test_in_one_program_a_bad_metric_fails_one_run_alone(stop: type[BaseException]) -> None:
    def picky(model: nn.Module) -> float:
        value = mean_square(model)
        if value == worst:
            raise stop("singular")
        return value

    worst = None
    runs = [dataclasses.replace(RUN, seed=seed, optimizer="sgd") for seed in range(3)]
    resources = Resources({"mine": judged(Undropped, picky=picky)})
    good = {each.run.seed: each.readings["picky"] for each in vectorised(runs, resources)}
    worst = good[1]
    again = {each.run.seed: each for each in vectorised(runs, resources)}
    assert {seed: again[seed].readings["picky"] for seed in (0, 2)} == {0: good[0], 2: good[2]}
    assert again[1].status == "failed"
    assert f"metric 'picky' raised {stop.__name__}: singular" in again[1].error


class Stop(Exception):
    """Ends a run half-way."""


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The checkpoint of a run that was stopped before its fifth step, right after an evaluation."""

    def stopping(seed: int, step: int) -> tuple[Tensor, Tensor]:
        if step == 4:
            raise Stop
        return rows(seed, step)

    file = tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        train(STOPPED, dataclasses.replace(mine, batch=stopping), checkpoint=RunCheckpoint(file, 0))
    return file


STOPPED = dataclasses.replace(EVALUATED, evaluate_every=2)


def test_a_stopped_run_goes_on_with_its_evaluations(stopped: Path) -> None:
    said: list[str] = []
    resumed = train(STOPPED, mine, checkpoint=RunCheckpoint(stopped, 3600, said.append))
    assert said == []
    assert tiny.numbers(resumed) == tiny.numbers(train(STOPPED, mine))


@pytest.mark.parametrize("every, probes", [(3, ("accuracy",)), (2, ()), (0, ())])
def test_a_checkpoint_with_other_evaluations_is_not_used(
    stopped: Path, every: int, probes: tuple[str, ...]
) -> None:
    said: list[str] = []
    run = dataclasses.replace(STOPPED, evaluate_every=every, probes=probes)
    outcome = train(run, mine, checkpoint=RunCheckpoint(stopped, 3600, said.append))
    assert tiny.numbers(outcome) == tiny.numbers(train(run, mine))
    assert said == [
        "state.safetensors is no good, its run begins again: ValueError: it has other evaluations "
        "than the run makes now"
    ]
