"""What is fixed in all optimizers of pytorch_optimizer, and that it was wrong there."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS, borrowed

from .small import model, noise, plan_for, stepped

source = pytest.importorskip("pytorch_optimizer")

BORROWED = [name for name, spec in OPTIMIZERS.items() if spec.source == "pytorch_optimizer"]


@pytest.mark.parametrize("rule", BORROWED)
def test_maximizing_would_negate_gradients_in_place(rule: str) -> None:
    with pytest.raises(UseError, match="negates the gradients in place"):
        OPTIMIZERS[rule].maker({"maximize": True})


@pytest.mark.parametrize("rule", [rule for rule in BORROWED if "weight_decouple" in OPTIMIZERS[rule].fixed])
def test_decay_is_decoupled_whatever_the_library_thinks(rule: str) -> None:
    groups = plan_for(rule, weight_decay=0.1).optimizer(model()).param_groups
    own = [group for group in groups if group["rule"] == rule]
    assert all(group["weight_decouple"] and not group["fixed_decay"] for group in own)
    with pytest.raises(UseError, match=r"'weight_decouple' of .* is set for each tensor"):
        OPTIMIZERS[rule].maker({"weight_decouple": False})


@pytest.mark.parametrize("name", ["DiffGrad", "ScheduleFreeAdamW"])
def test_no_floor_but_eps(name: str) -> None:
    """Entries of 1e-12 are far above eps, and far below √1e-15."""
    grad = torch.full((3,), 1e-12, dtype=torch.float64)
    ours, theirs = (stepped(getattr(home, name), grad, eps=1e-20) for home in (borrowed, source))
    assert ours.abs().min() > 0.49
    assert theirs.abs().max() < 1e-3


def test_a_state_of_pytorch_optimizers_own_goes_on() -> None:
    """Its counts of steps are in the group."""
    param, twin = (nn.Parameter(noise(4, 3)) for _ in range(2))
    theirs = source.DiffGrad([param], lr=0.1, eps=1e-30)
    for step in range(3):
        param.grad = noise(4, 3, seed=step)
        theirs.step()
    ours = borrowed.DiffGrad([twin], lr=0.1, eps=1e-30)
    twin.data.copy_(param)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step in range(3, 5):
        for one, optimizer in ((param, theirs), (twin, ours)):
            one.grad = noise(4, 3, seed=step)
            optimizer.step()
    torch.testing.assert_close(param, twin, rtol=1e-9, atol=0)
    assert math.isclose(float(ours.state[twin]["step"]), 5)


@pytest.mark.parametrize("rule", BORROWED)
def test_classes_are_found_by_pickle(rule: str) -> None:
    made = OPTIMIZERS[rule].maker({})([{"params": [nn.Parameter(noise(3, 2))]}])
    assert type(pickle.loads(pickle.dumps(made))) is type(made)
    assert getattr(borrowed, type(made).__name__) is type(made)


def test_options_reach_the_optimizer() -> None:
    plan = dataclasses.replace(plan_for("lion"), options={"betas": (0.5, 0.6)})
    assert all(group["betas"] == (0.5, 0.6) for group in plan.optimizer(model()).param_groups)
