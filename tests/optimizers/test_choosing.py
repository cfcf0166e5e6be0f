"""Which optimizer a rule gets, and which of its options a plan leaves to the caller."""

from __future__ import annotations

import dataclasses

import pytest

from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS

from .small import model, plan_for

BORROWED = ["lion", "sophia", "soap", "shampoo", "diffgrad", "schedule-free"]


@pytest.mark.parametrize("rule", BORROWED)
def test_maximizing_would_negate_gradients_in_place(rule: str) -> None:
    with pytest.raises(UseError, match="negates the gradients in place"):
        OPTIMIZERS[rule].maker({"maximize": True})


def test_momentum_of_shampoo_is_refused_with_the_reason() -> None:
    with pytest.raises(UseError, match=r"cannot be used with shampoo: .*raw gradients with preconditioned"):
        OPTIMIZERS["shampoo"].maker({"momentum": 0.9})


@pytest.mark.parametrize("rule", ["lion", "sophia", "shampoo", "diffgrad"])
def test_decay_is_decoupled_whatever_the_library_thinks(rule: str) -> None:
    groups = plan_for(rule, weight_decay=0.1).optimizer(model()).param_groups
    own = [group for group in groups if group["rule"] == rule]
    assert all(group["weight_decouple"] and not group["fixed_decay"] for group in own)
    with pytest.raises(UseError, match=r"'weight_decouple' of .* is set by the plan"):
        OPTIMIZERS[rule].maker({"weight_decouple": False})


def test_options_reach_a_borrowed_optimizer() -> None:
    plan = dataclasses.replace(plan_for("lion"), options={"betas": (0.5, 0.6)})
    assert all(group["betas"] == (0.5, 0.6) for group in plan.optimizer(model()).param_groups)
