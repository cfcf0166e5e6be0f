"""Schedule-free AdamW, by its formula; and the weights that it evaluates."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.optimizers import Base, Hyper

from .reference import Reference, State, averaged, sign_first, sign_rows, sign_rows_alone, sign_unequal
from .small import gradients, model, plan_for, train


def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    """The weight is y."""
    z, x = state.get("z", w), state.get("x", w)
    v = averaged(state, "v", g**2, 0.999) / (1 - 0.999**t)
    z = z - hyper.lr * (g / (v.sqrt() + hyper.eps) + hyper.weight_decay * w)
    x = (1 - 1 / t) * x + z / t
    state["z"], state["x"] = z, x
    return 0.1 * z + 0.9 * x


REFERENCES = {
    "schedule-free": Reference(
        step,
        first=sign_first,
        rows=sign_rows,
        rows_alone=sign_rows_alone,
        unequal=sign_unequal,
        base=Base(lr=0.02, weight_decay=0.5, eps=0.05),
        eps=lambda entry, norm: entry,
    )
}


def test_it_evaluates_the_average_of_all_z() -> None:
    pytest.importorskip("pytorch_optimizer")
    network = model(dtype=torch.float64)
    optimizer = plan_for("schedule-free", weight_decay=0.1).optimizer(network)
    embed = network.get_parameter("embed.weight")
    average = torch.zeros_like(embed)
    for step in range(4):
        gradients(network, step)
        optimizer.step()
        average += (optimizer.state[embed]["z"] - average) / (step + 1)
    training = [param.detach().clone() for param in network.parameters()]
    optimizer.eval()
    torch.testing.assert_close(embed.detach(), average.detach(), rtol=0, atol=1e-12)
    optimizer.eval()  # once more is the same
    torch.testing.assert_close(embed.detach(), average.detach(), rtol=0, atol=1e-12)
    with pytest.raises(UseError, match=r"after eval\(\): call optimizer\.train\(\)"):
        optimizer.step()
    # Saved as it is evaluated, and resumed.
    twin = copy.deepcopy(network)
    resumed = plan_for("schedule-free", weight_decay=0.1).optimizer(twin)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, resumed):
        one.train()
    for param, same, other in zip(network.parameters(), training, twin.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), same, rtol=0, atol=1e-12)
        assert torch.equal(param, other)


def test_train_and_eval_are_nothing_to_other_optimizers() -> None:
    network = model()
    optimizer = plan_for("muon-kimi").optimizer(network)
    before = train(network, optimizer, 1)
    optimizer.eval()
    optimizer.train()
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), before, strict=True))


def test_it_takes_no_schedule_but_a_warmup() -> None:
    pytest.importorskip("pytorch_optimizer")
    plan = plan_for("schedule-free")
    optimizer = plan.optimizer(model())
    with pytest.raises(UseError, match="replaces a schedule"):
        plan.schedule(optimizer, "cosine", steps=10)
    warmed = plan.schedule(optimizer, "constant", steps=10, warmup=4)
    assert warmed.get_last_lr()[0] == pytest.approx(optimizer.param_groups[0]["planned_lr"] / 4)
