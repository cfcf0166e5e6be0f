"""The identity of a run, what it may say of batch and tokens, and grids over sizes with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from theodolite import Size, UseError
from theodolite.fleet.run import Grid, Run
from theodolite.fleet.tables import flat
from theodolite.optimizers.horizon import Horizon

GPT = {"workload": "gpt-sotu", "size": Size(128, 4), "lr": 2**-8, "base": Size(64, 2)}
BEFORE = [  # as commit 435e51e computed them, when sizes had no batch
    (Run(**GPT), "35316add039d7081"),
    (
        Run(
            "gpt-sotu",
            Size(128, 4),
            0.1,
            parameterization="standard",
            seed=3,
            steps=40,
            warmup=4,
            weight_decay=0.1,
            options={"betas": (0.9, 0.95)},
        ),
        "e8a70df2a8a54c5b",
    ),
    (
        Run(
            "mine.py:tiny",
            Size(16, 1),
            0.01,
            "muon-kimi",
            base=Size(8, 1),
            vector_lr=0.02,
            evaluate_every=5,
            probes=("gradient",),
        ),
        "2e5b6e3852d8e0d1",
    ),
    (Run("mine.py:tiny", Size(16, 1), 0.01, "own", "own"), "f137e4436a5755c2"),
]


@pytest.mark.parametrize("run, identity", BEFORE)
def test_runs_without_batch_and_tokens_are_the_runs_they_were(run: Run, identity: str) -> None:
    assert run.identity == identity
    assert "horizon" not in run.to_dict()
    assert run.to_dict()["size"] == [run.size.width, run.size.depth]


SIZED = [
    Size(128, 4),
    Size(128, 4, batch=8),
    Size(128, 4, batch=16),
    Size(128, 4, tokens=800),
    Size(128, 4, batch=8, tokens=800),
]


def test_every_batch_number_of_tokens_and_rule_is_another_run_that_comes_back_from_json() -> None:
    base = {"base": Size(64, 2, batch=8, tokens=800)}
    runs = [Run(**{**GPT, "size": size, "base": None, "parameterization": "standard"}) for size in SIZED]
    rules = ("none", "sde", "timescale", "power(0.3, 0.5)")
    runs += [Run(**{**GPT, **base, "size": SIZED[-1], "horizon": rule}) for rule in rules]
    assert len({run.identity for run in runs}) == len(SIZED) + len(rules)
    for run in runs:
        content = json.loads(json.dumps(run.to_dict()))
        again = Run.from_dict(content)
        assert again == run
        assert again.identity == run.identity


def test_one_rule_written_in_two_ways_is_one_run() -> None:
    base = {"base": Size(64, 2, batch=8), "size": Size(128, 4, batch=16)}
    ways: list[Any] = ["power(0.3,0.5) + timescale", Horizon("power", 0.3, 0.5, timescale=True)]
    assert len({Run(**{**GPT, **base, "horizon": way}).identity for way in ways}) == 1


def test_columns_of_a_ledger_name_batch_and_tokens_where_a_size_has_them() -> None:
    assert flat({"size": [64, 2]}) == {"width": 64, "depth": 2}
    assert flat({"size": [64, 2, 8, None], "base": [32, 2, 4, 900]}) == {
        **{"width": 64, "depth": 2, "batch": 8, "planned_tokens": None},
        **{"base_width": 32, "base_depth": 2, "base_batch": 4, "base_planned_tokens": 900},
    }


@pytest.mark.parametrize("parameterization", ["standard", "own"])
def test_a_rule_belongs_to_a_plan(parameterization: str) -> None:
    given = {**GPT, "base": None, "parameterization": parameterization}
    given |= {"optimizer": "own"} if parameterization == "own" else {}
    with pytest.raises(UseError, match=f"horizon is 'sde': the {parameterization} parameterization has the"):
        Run(**given, horizon="sde")
    with pytest.raises(UseError, match=r"horizon is 'sdee'. Did you mean 'sde'\?"):
        Run(**GPT, horizon="sdee")


@pytest.mark.parametrize("name", ["batch", "tokens"])
def test_a_run_says_what_its_base_says(name: str) -> None:
    """Otherwise it would train on the workload's own batch, by a plan for that of the base."""
    with pytest.raises(UseError, match=f"base has {name}=9 and size has none.* give size the {name} too"):
        Run(**{**GPT, "base": Size(64, 2, **{name: 9})})


def test_fields_of_a_size_go_into_its_runs_alone() -> None:
    small, large = Size(8, 1, tokens=100), Size(8, 1, tokens=400)
    axes = {"size": [small, large], "seed": [0, 1]}
    fixed = {"workload": "mine", "lr": 0.1, "base": small, "steps": 7}
    grid = Grid(axes, fixed, {large: {"steps": 28, "warmup": 2}})
    assert [(run.size, run.steps, run.warmup) for run in grid.runs] == [
        *[(small, 7, 0)] * 2,
        *[(large, 28, 2)] * 2,
    ]


def test_a_grid_gives_its_rule_to_plans_alone() -> None:
    size = Size(8, 1, batch=4)
    axes = {"parameterization": ["plan", "standard", "own"], "seed": [0]}
    runs = Grid(axes, {"workload": "mine", "size": size, "base": size, "lr": 0.1, "horizon": "sde"}).runs
    assert [(run.parameterization, run.horizon) for run in runs] == [
        *[("plan", "sde"), ("standard", "none"), ("own", "none")]
    ]
