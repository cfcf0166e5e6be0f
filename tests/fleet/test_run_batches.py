"""Runs with a batch and a number of tokens: what they train on, on every engine, stopped or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite import Size, UseError
from theodolite.core.building import one_thread
from theodolite.fleet.checkpoint import RunCheckpoint
from theodolite.fleet.engine import Resources, cost, processes, serial
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.plans import check_plans, planned
from theodolite.fleet.run import Run
from theodolite.fleet.stack import kin
from theodolite.fleet.training import train, workload_for
from theodolite.fleet.vectorised import vectorised

from . import tiny
from .test_checkpoint import Stop, stopping

USUAL = 16
"""Examples in a batch of `tiny`; each has one target."""
BASE = Size(16, 2, batch=USUAL, tokens=128)


def run(batch: int | None = 24, tokens: int | None = 192, **fields: object) -> Run:
    """A planned run of some batch and tokens, whose base is that of all."""
    size = Size(16, 2, batch=batch, tokens=tokens)
    base = Size(16, 2, batch and USUAL, tokens and 128)
    given = {"parameterization": "plan", "base": base, "horizon": "sde+timescale", "weight_decay": 0.1}
    return dataclasses.replace(tiny.run(), **{**given, "size": size, **fields})


class Rows(nn.Module):
    """Without dropout, so that models can be trained together."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for hidden in self.hidden:
            x = x + hidden(x.relu())
        return self.last(x)


ROWS = th.Workload("rows", Rows, tiny.batch, nn.functional.cross_entropy, held_out=tiny.held_out)


def by_hand(one: Run, batch: int, betas: tuple[float, float], lr: float) -> float:
    """The held-out loss of a plain loop with AdamW over `batch` examples in a step."""
    own = [tiny.batch(one.seed, step) for step in range(20)]
    inputs, targets = torch.cat([x for x, _ in own]), torch.cat([y for _, y in own])
    with one_thread():
        model = planned(one, ROWS).build(one.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, eps=one.eps, weight_decay=0.0)
        for step in range(one.steps):
            part = slice(step * batch, (step + 1) * batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[part]), targets[part]).backward()
            optimizer.param_groups[0]["lr"] = lr * (1 - step / one.steps)
            optimizer.step()
        model.eval()
        held_out = [tiny.held_out(0, step) for step in range(one.held_out)]
        return sum(nn.functional.cross_entropy(model(x), y).item() for x, y in held_out) / len(held_out)


@pytest.mark.parametrize("batch", [8, 32, 64])
def test_a_run_is_the_plain_loop_over_the_stream_in_its_batches_with_the_rule_s_rate(batch: int) -> None:
    """The base is of the same network, so that the plan is the plain optimizer but for batch and tokens."""
    one = run(batch, 192, weight_decay=0.0, steps=192 // batch, seed=3, horizon="sde", eps=1e-12)
    one = dataclasses.replace(one, workload="rows")
    m_batch, m_tokens = batch / USUAL, 192 / 128
    betas = (0.9**m_batch, 0.999**m_batch)
    expected = by_hand(one, batch, betas, one.lr * (m_batch / m_tokens) ** 0.5)
    found = train(one, workload_for(one, {"rows": ROWS}))
    assert found.held_out == pytest.approx(expected, rel=1e-4)
    assert found.readings["tokens"] == 192
    unplanned = train(dataclasses.replace(one, horizon="none"), ROWS.with_batch(batch))
    assert unplanned.held_out != pytest.approx(expected, rel=1e-3)


def test_the_batch_of_the_base_size_is_the_run_without_one() -> None:
    plain = dataclasses.replace(tiny.run(), parameterization="plan", base=Size(16, 2))
    same = dataclasses.replace(plain, size=BASE, base=BASE, horizon="sde+timescale")
    assert tiny.numbers(train(same, workload_for(same, {}))) == tiny.numbers(train(plain, tiny.plain))


MIXED = [
    run(8, 64, seed=0),
    run(8, 64, seed=1, horizon="none"),
    run(8, 64, seed=1, horizon="power(0.3, 0.5)"),
    run(24, 192, seed=0),
    run(24, 192, seed=1),
    run(None, 128, seed=0),
    run(24, None, seed=0),
]


def test_engines_agree_on_runs_of_several_batches_and_rules() -> None:
    resources = Resources(jobs=1)
    alone = {outcome.run.identity: outcome for outcome in serial(MIXED, resources)}
    assert {outcome.status for outcome in alone.values()} == {"finished"}
    assert [alone[one.identity].readings["tokens"] for one in MIXED] == [
        *[64] * 3,
        *[192] * 2,
        *[128, 192],
    ]
    apart = {outcome.run.identity: outcome for outcome in processes(MIXED[2:4], resources)}
    assert {key: tiny.numbers(each) for key, each in apart.items()} == {
        key: tiny.numbers(alone[key]) for key in apart
    }


def test_models_of_several_rules_train_together_and_those_of_other_batches_apart() -> None:
    resources = Resources({"rows": ROWS})
    runs = [dataclasses.replace(one, workload="rows") for one in MIXED]
    alone = {outcome.run.identity: outcome for outcome in serial(runs, resources)}
    together = list(vectorised(runs, resources))
    assert len(together) == len(runs)
    for outcome in together:
        assert (outcome.status, outcome.engine) == ("finished", "vectorised"), outcome.error
        assert outcome.held_out == pytest.approx(alone[outcome.run.identity].held_out, rel=1e-4)
        assert outcome.readings["tokens"] == alone[outcome.run.identity].readings["tokens"]
    assert len({round(outcome.held_out or 0, 6) for outcome in together}) == len(runs)
    # One program has one shape of batches and one number of steps; its models may have rules of their own.
    own = [kin(one, workload_for(one, resources.workloads)) for one in runs]
    assert own[1] == own[2]
    assert own[0] != own[3]


def test_a_stopped_run_with_a_batch_of_its_own_goes_on_bit_for_bit(tmp_path: Path) -> None:
    one = run(24, 192, steps=8)
    workload = tiny.plain.with_batch(24)
    whole, file = train(one, workload), tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        train(one, stopping(workload, 5), checkpoint=RunCheckpoint(file, 0))
    resumed = train(one, workload, checkpoint=RunCheckpoint(file, 0))
    assert tiny.numbers(resumed) == tiny.numbers(whole)
    assert len(set(dict(whole.metrics["loss"]).values())) == 8


def test_steps_that_do_not_see_the_tokens_of_the_size_are_refused() -> None:
    good, bad = run(24, 192, steps=8), run(24, 192, steps=12)
    check_plans([good], tiny.plain)
    words = r"steps is 12, and training at 16 × 2, batch 24, 192 tokens takes 8: give 8, or leave out the"
    for runs in ([good, bad], [bad, good]):
        with pytest.raises(UseError, match=words):
            check_plans(runs, tiny.plain)
    check_plans([run(24, None, steps=12)], tiny.plain)


@pytest.mark.parametrize("num", [8, 24])
def test_batches_that_cannot_be_cut_are_refused_before_the_first_run(num: int) -> None:
    def ragged(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = tiny.batch(seed, step)
        return inputs[: len(inputs) - step], targets[: len(inputs) - step]

    workload = dataclasses.replace(ROWS, batch=ragged)
    check_plans([run(None, None, workload=workload.name)], workload)
    with pytest.raises(UseError, match=r"batch\(0, 1\) has 15 examples and batch\(0, 0\) 16"):
        check_plans([run(num, None, workload=workload.name)], workload)


def test_a_plan_is_made_once_for_all_seeds_and_has_the_size_of_the_run() -> None:
    plan = planned(run(24, 192, seed=5), tiny.plain.with_batch(24))
    assert planned(run(24, 192, seed=6), tiny.plain) is plan
    assert (plan.size, plan.base) == (Size(16, 2, 24, 192), BASE)
    assert planned(run(8, 192), tiny.plain).size.batch == 8


def test_runs_of_larger_batches_cost_more() -> None:
    assert cost(run(48, None)) == pytest.approx(2 * cost(run(24, None)))


def test_a_ledger_has_columns_for_batch_tokens_and_rule(tmp_path: Path) -> None:
    one, old = run(24, 192), tiny.run()
    with Ledger.open(tmp_path / "ledger", name="mine", spec={}) as ledger:
        for each in (one, old):
            ledger.append(train(each, workload_for(each, {})))
        rows = {row["identity"]: row for row in ledger.rows()}
    new = rows[one.identity]
    assert (new["batch"], new["planned_tokens"], new["horizon"]) == (24, 192, "sde+timescale")
    assert (new["base_batch"], new["base_planned_tokens"]) == (16, 128)
    assert new["tokens"] == 8 * 24  # those that were seen
    assert rows[old.identity].get("batch") is None
    assert rows[old.identity]["horizon"] == "none"
