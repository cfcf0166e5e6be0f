"""Runs of several lengths that share their beginning end with the numbers of runs made alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from theodolite import Size, Workload
from theodolite.fleet import Ledger, Resources, conduct
from theodolite.fleet.run import Grid, Run
from theodolite.fleet.trunks import branch_step, sharing, trunk_of
from theodolite.models import ResidualMLP
from theodolite.optimizers.schedule import KINDS, LRFactor

WSD = Run(
    "mlp-mixture", Size(16, 1), 2**-6, parameterization="standard", steps=20, schedule="wsd", held_out=1
)
LENGTHS = (20, 30, 60)
KINDS_OF_RUN = {
    "wsd": {"schedule": "wsd", "final": 0.1},
    "constant": {"schedule": "constant", "optimizer": "muon-kimi"},
    "diverging": {"schedule": "wsd", "optimizer": "sgd", "lr": 2.0**12},
    "watched": {"schedule": "wsd", "probes": ("gradient", "accuracy"), "evaluate_every": 7},
}


def runs_of(**fields: object) -> tuple[Run, ...]:
    own = {name: value for name, value in vars(WSD).items() if name not in ("steps", "seed", "identity")}
    return Grid({"steps": LENGTHS, "seed": range(2)}, {**own, "warmup": 4, **fields}).runs


def made(folder: Path, *parts: Sequence[Run], engine: str, checkpoints: bool = True) -> dict[str, object]:
    """All numbers of the runs, made part by part."""
    resources = Resources(checkpoints=folder / "checkpoints" if checkpoints else None, jobs=1)
    with Ledger.open(folder, name="lengths", spec={}) as ledger:
        for runs in parts:
            assert conduct(runs, ledger, engine=engine, resources=resources).ok
        rows = ledger.rows()
        timeless = [
            {name: value for name, value in row.items() if name not in ("seconds", "ended")} for row in rows
        ]
        return {row["identity"]: (row, ledger.metrics(row["identity"])) for row in timeless}


@pytest.mark.parametrize("kind", KINDS_OF_RUN)
@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_shared_runs_have_the_numbers_of_runs_made_alone(tmp_path: Path, engine: str, kind: str) -> None:
    runs = runs_of(**KINDS_OF_RUN[kind])
    # Models of one program are of one length there, as their sums depend on how many there are.
    parts = [[run for run in runs if run.steps == steps] for steps in LENGTHS]
    parts = [[run] for run in runs] if engine == "serial" else parts
    alone = made(tmp_path / "alone", *parts, engine=engine)
    assert made(tmp_path / "together", runs, engine=engine) == alone
    assert not (tmp_path / "together" / "checkpoints").exists()


def test_a_short_run_makes_only_its_decay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    run = dataclasses.replace(WSD, warmup=4)
    runs = [dataclasses.replace(run, steps=steps) for steps in LENGTHS]
    original = LRFactor.__call__
    monkeypatch.setattr(
        LRFactor, "__call__", lambda self, step: (drawn.append(self.steps), original(self, step))[1]
    )
    made(tmp_path, runs, engine="serial")
    assert [drawn.count(steps) for steps in LENGTHS] == [4, 6, 60]  # a fifth of 20 and of 30


@pytest.mark.parametrize("schedule", [kind for kind in KINDS if kind not in ("wsd", "constant")])
def test_schedules_that_change_all_the_time_share_nothing(schedule: str) -> None:
    runs = runs_of(schedule=schedule)
    assert sharing(runs).first == runs
    assert trunk_of(runs[0]) is None


def test_until_its_branch_a_run_has_the_rates_of_a_longer_one() -> None:
    for run in runs_of():
        step = branch_step(run)
        assert step is not None
        short, long = LRFactor("wsd", run.steps, 4), LRFactor("wsd", 10 * run.steps, 4)
        assert [short(each) for each in range(step)] == [long(each) for each in range(step)]
        assert short(step + 1) < long(step + 1)


@pytest.mark.parametrize(
    "change",
    [{"lr": 0.5}, {"seed": 1}, {"warmup": 3}, {"weight_decay": 0.1}, {"size": Size(32, 1)}, {"final": 0.5}],
    ids=str,
)
def test_runs_that_differ_in_more_than_their_length_share_nothing(change: dict[str, object]) -> None:
    run = dataclasses.replace(WSD, warmup=2)
    other = dataclasses.replace(run, steps=60, **change)  # type: ignore[arg-type]
    assert not sharing([run, other]).later


def test_tokens_of_a_size_are_shared_where_the_plan_does_not_follow_them() -> None:
    base = Size(16, 1, batch=128, tokens=2560)
    planned = {"parameterization": "plan", "base": base, "warmup": 2}
    for horizon, num in (("none", 1), ("sde", 0)):
        runs = [
            dataclasses.replace(
                WSD, size=base.at(tokens=128 * steps), steps=steps, horizon=horizon, **planned
            )
            for steps in (20, 60)
        ]
        assert len(sharing(runs).later) == num


def test_a_state_that_is_damaged_or_missing_costs_time_alone(tmp_path: Path) -> None:
    short, long = (dataclasses.replace(WSD, steps=steps, warmup=2) for steps in (20, 60))
    alone = made(tmp_path / "alone", [short], engine="serial")
    folder = tmp_path / "damaged" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / f"{trunk_of(short)}-{branch_step(short)}.safetensors").write_bytes(b"nothing")
    assert made(tmp_path / "damaged", [short], engine="serial") == alone
    assert (
        made(tmp_path / "without", [short, long], engine="serial", checkpoints=False).items() >= alone.items()
    )


def uneven(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One to three examples, so that steps differ in their targets."""
    inputs = torch.randn(1 + step % 3, 4, generator=torch.Generator().manual_seed(1_000_003 * seed + step))
    return inputs, (inputs.sum(1) > 0).long()


@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_targets_are_counted_once(tmp_path: Path, engine: str) -> None:
    build, loss = partial(ResidualMLP, inputs=4, outputs=2), torch.nn.functional.cross_entropy
    mine = Workload("uneven", build, uneven, loss, Size(8, 1))
    resources = Resources(workloads={"uneven": mine}, checkpoints=tmp_path / "checkpoints", jobs=1)
    run = dataclasses.replace(WSD, workload="uneven", size=Size(8, 1), warmup=2)
    runs = [dataclasses.replace(run, steps=steps) for steps in LENGTHS]
    with Ledger.open(tmp_path, name="uneven", spec={}) as ledger:
        assert conduct(runs, ledger, engine=engine, resources=resources).ok
        seen = {row["steps"]: row["tokens"] for row in ledger.rows()}
    assert seen == {steps: sum(1 + step % 3 for step in range(steps)) for steps in LENGTHS}
