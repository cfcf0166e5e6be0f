"""Runs of a workload's own optimizer: the loop of its author, on every engine, stopped or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite import Size, UseError
from theodolite.core.building import one_thread, untouched_randomness
from theodolite.fleet.checkpoint import RunCheckpoint
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.plans import check_plans, planned
from theodolite.fleet.run import Grid, Run
from theodolite.fleet.stack import kin, why_not_stacked
from theodolite.fleet.training import train
from theodolite.fleet.vectorised import vectorised

from . import tiny
from .test_checkpoint import Stop, stopping

OWN = tiny.own_run()


def by_hand(run: Run) -> tuple[list[float], float]:
    """The author's loop: the losses of all steps, and the mean over the held-out batches."""
    with untouched_randomness(run.seed), one_thread():
        torch.manual_seed(run.seed)
        with torch.random.fork_rng():
            model = tiny.build(run.size.width, run.size.depth)
        optimizers = tiny.authored_optimizers(model)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rates = [group["lr"] * run.lr / 0.01 for group in groups]
        losses = []
        for step in range(run.steps):
            inputs, targets = tiny.batch(run.seed, step)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * (1 - step / run.steps)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        model.eval()
        batches = [tiny.held_out(0, step) for step in range(run.held_out)]
        held_out = [nn.functional.cross_entropy(model(x), y).item() for x, y in batches]
    return losses, sum(held_out) / len(held_out)


@pytest.mark.parametrize("lr", [0.01, 0.04])
def test_a_run_is_the_loop_of_the_author(lr: float) -> None:
    run = tiny.own_run(lr=lr, seed=3)
    losses, held_out = by_hand(run)
    outcome = train(run, tiny.authored, metrics=False)
    assert [value for _, value in outcome.metrics["loss"]] == losses
    assert outcome.held_out == pytest.approx(held_out, rel=1e-6)


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    file, said = tmp_path / "state.safetensors", list[str]()
    for at in (2, 5):
        with pytest.raises(Stop):
            train(OWN, stopping(tiny.authored, at), checkpoint=RunCheckpoint(file, 0, said.append))
    resumed = train(OWN, tiny.authored, checkpoint=RunCheckpoint(file, 0, said.append))
    assert said == []
    assert tiny.numbers(resumed) == tiny.numbers(train(OWN, tiny.authored))


MLP = th.workload("mlp-mixture")
BASE = Size(16, 1)


def same_plan(optimizer: str, **options: Any) -> th.Workload:
    """A workload whose author has written the plan down: its weights, and its optimizer."""
    inputs = MLP.draw(0, 0)[0]

    def plan(width: int, depth: int) -> Any:
        size = Size(width, depth)
        return th.plan(MLP.build, inputs, size=size, base=BASE, lr=0.01, optimizer=optimizer, **options)

    def build(width: int, depth: int) -> nn.Module:
        return plan(width, depth).build(torch.initial_seed() % 2**31)

    def make(model: nn.Module) -> Any:
        weight = model.get_parameter("readout.weight")
        depth = sum(name.endswith("layers.0.weight") for name, _ in model.named_parameters())
        return plan(weight.shape[1], depth).optimizer(model)

    return dataclasses.replace(MLP, name="planned by hand", build=build, optimizer=make)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "schedule-free", "sophia"])
def test_own_runs_of_a_plan_are_those_of_the_plan(optimizer: str) -> None:
    if optimizer in ("schedule-free", "sophia"):
        pytest.importorskip("pytorch_optimizer")
    shared: dict[str, Any] = {"seed": 2, "steps": 4, "held_out": 1, "schedule": "constant", "lr": 0.02}
    own = Run("by hand", Size(32, 2), optimizer="own", parameterization="own", **shared)
    plan = Run("mlp-mixture", Size(32, 2), optimizer=optimizer, base=BASE, **shared)
    found, expected = train(own, same_plan(optimizer)), train(plan, MLP)
    assert found.metrics == expected.metrics
    assert found.held_out == expected.held_out


def test_many_models_at_once_are_refused_with_the_reason() -> None:
    assert "trains one model at a time" in (why_not_stacked(OWN, tiny.authored) or "")
    assert kin(OWN, tiny.authored) == kin(tiny.own_run(lr=0.5), tiny.authored)
    (outcome,) = vectorised([OWN], Resources())
    assert outcome.status == "failed"
    assert "one model at a time" in outcome.reason


def test_an_optimizer_that_fails_fails_its_run_alone() -> None:
    def broken(model: nn.Module) -> Any:
        raise KeyError("lr")

    bad = dataclasses.replace(tiny.plain, name="bad", optimizer=broken)
    runs = [dataclasses.replace(OWN, workload="bad"), OWN]
    first, second = serial(runs, Resources({"bad": bad}))
    assert (first.status, second.status) == ("failed", "finished")
    assert "factory broken failed at test_plans.py" in first.reason


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": "adamw"}, "optimizer is 'adamw': with the own parameterization it is the workload's"),
        ({"base": Size(8, 1)}, "base is 8 × 1: the own parameterization has none"),
        (
            {"weight_decay": 0.1},
            "weight_decay is 0.1: with the own parameterization the workload's optimizer",
        ),
        ({"eps": 1e-8}, "eps is 1e-08: with the own"),
        ({"decay": "none"}, "decay is 'none': with the own"),
        ({"options": {"betas": (0.9, 0.95)}}, "options is .* with the own"),
        ({"init_scale": 2.0}, "init_scale is 2.0: with the own"),
        ({"parameterization": "plan", "base": Size(8, 1)}, "optimizer is 'own'"),
        ({"parameterization": "mup"}, "parameterization is 'mup'"),
    ],
)
def test_fields_that_the_optimizer_has_itself_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UseError, match=said):
        tiny.own_run(**fields)


def test_a_grid_gives_runs_of_own_what_they_take() -> None:
    axes = {"parameterization": ["own", "plan", "standard"], "optimizer": ["adamw", "sgd"], "seed": range(2)}
    fixed = {"workload": "w", "size": Size(16, 1), "base": Size(8, 1), "lr": 0.1, "weight_decay": 0.1}
    runs = Grid(axes, fixed).runs
    own = [run for run in runs if run.parameterization == "own"]
    assert (len(runs), len(own)) == (2 * 2 * 2 + 2, 2)
    assert {(run.optimizer, run.base, run.weight_decay) for run in own} == {("own", None, 0.0)}
    with pytest.raises(UseError, match=r"weight_decay is 0.1: with the own"):  # it is for no run at all
        _ = Grid({**axes, "parameterization": ["own"]}, fixed).runs
    with pytest.raises(UseError, match="weight_decay is an axis, and the own parameterization has what its"):
        Grid({**axes, "weight_decay": [0, 0.1]}, {"workload": "w"})
    with pytest.raises(UseError, match=r"options.betas is an axis, and the own"):
        Grid({"options.betas": [(0.9, 0.95)], "seed": [0]}, {**fixed, "parameterization": "own"})


def test_runs_of_before_keep_their_identity() -> None:
    """As they were computed before there were runs of own."""
    assert Run("gpt-sotu", Size(128, 4), 2**-8, base=Size(64, 4)).identity == "1d3a86e165844cc7"
    other = {"weight_decay": 0.1, "options": {"momentum": 0.9}}
    assert Run("w", Size(8, 1), 0.1, "muon", "standard", **other).identity == "9d299e3ebd4a3494"
    assert Run.from_dict(OWN.to_dict()) == OWN


def test_what_no_run_can_be_made_of_is_refused_before_the_first() -> None:
    without = dataclasses.replace(tiny.plain, name="without")
    with pytest.raises(UseError, match=r"says nothing of its optimizer: give Workload\(…, optimizer="):
        check_plans([OWN], without)
    rates = iter([0.01, 0.01, 0.02])
    drifting = dataclasses.replace(
        tiny.plain,
        name="drifting",
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=next(rates)),
    )
    with pytest.raises(UseError, match=r"keeps state between calls.* with lr 0.01, then 0.02"):
        check_plans([OWN], drifting)
    closing = dataclasses.replace(
        tiny.plain, name="closing", optimizer=lambda model: torch.optim.LBFGS(model.parameters())
    )
    with pytest.raises(UseError, match="a step of the factory's LBFGS needs closure"):
        check_plans([OWN], closing)
    source = pytest.importorskip("pytorch_optimizer")
    averaging = dataclasses.replace(
        tiny.plain,
        name="averaging",
        optimizer=lambda model: source.ScheduleFreeAdamW(model.parameters(), lr=0.01),
    )
    with pytest.raises(
        UseError, match=r"schedule is 'linear': ScheduleFreeAdamW, the optimizer of averaging"
    ):
        check_plans([OWN], averaging)


def test_the_plan_of_a_run_is_read_once_for_all_learning_rates() -> None:
    calls: list[int] = []

    def counted(model: nn.Module) -> Any:
        calls.append(1)
        return tiny.authored_optimizers(model)

    workload = dataclasses.replace(tiny.plain, name="counted", optimizer=counted)
    rates = [planned(tiny.own_run(lr=lr), workload)["0.weight"].lr for lr in (0.01, 0.02, 0.04)]
    assert rates == pytest.approx([0.02, 0.04, 0.08])
    assert len(calls) == 1


def test_runs_that_differ_in_seed_and_length_share_a_plan() -> None:
    short, long = tiny.own_run(steps=4, seed=0), tiny.own_run(steps=9, seed=5)
    assert planned(short, tiny.authored) is planned(long, tiny.authored)


def test_a_factory_may_be_an_object_that_has_no_hash() -> None:
    @dataclasses.dataclass
    class Factory:
        lr: float = 0.02

        def __call__(self, model: nn.Module) -> Any:
            return torch.optim.AdamW(model.parameters(), lr=self.lr)

    workload = dataclasses.replace(tiny.plain, name="an object", optimizer=Factory())
    assert planned(tiny.own_run(lr=0.04), workload)["0.weight"].lr == 0.04
    other = dataclasses.replace(workload, optimizer=Factory(0.01))
    assert planned(tiny.own_run(lr=0.04), other).factor == 4.0  # type: ignore[attr-defined]
