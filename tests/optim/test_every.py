"""What every optimizer of a plan can do: one table for all of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import theodolite as th

from .small import gradients, model, plan_for, train

EVERY = list(th.rules.RULES)


@pytest.mark.parametrize("rule", EVERY)
def test_resuming_is_as_if_nothing_had_happened(rule: str) -> None:
    plan = plan_for(rule, weight_decay=0.1)
    straight = model()
    expected = train(straight, plan.optimizer(straight), 6)

    first = model()
    optimizer = plan.optimizer(first)
    train(first, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    second = model(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = plan.optimizer(second)
    resumed.load_state_dict(saved)
    got = train(second, resumed, 3, start=3)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("rule", EVERY)
def test_state_is_loaded_by_name_whatever_the_order(rule: str) -> None:
    plan = plan_for(rule, weight_decay=0.1)
    network = model()
    optimizer = plan.optimizer(network)
    train(network, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = copy.deepcopy((network, optimizer))

    # The same state as another program might have saved it: groups and parameters in the reverse order.
    saved["param_groups"].reverse()
    for group in saved["param_groups"]:
        group["params"].reverse()
        group["param_names"].reverse()
    fresh = plan.optimizer(network)
    fresh.load_state_dict(saved)
    got = train(network, fresh, 2, start=3)
    assert all(torch.equal(a, b) for a, b in zip(got, train(*expected, 2, start=3), strict=True))


@pytest.mark.parametrize("rule", EVERY)
def test_copies_train_alike_and_apart(rule: str) -> None:
    plan = plan_for(rule)
    network = model()
    optimizer = plan.optimizer(network)
    train(network, optimizer, 2)
    twin, its_optimizer = copy.deepcopy((network, optimizer))
    before = [param.detach().clone() for param in network.parameters()]
    trained = train(twin, its_optimizer, 2, start=2)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), before, strict=True))
    expected = train(network, optimizer, 2, start=2)
    assert all(torch.equal(a, b) for a, b in zip(trained, expected, strict=True))


@pytest.mark.parametrize("rule", EVERY)
def test_a_parameter_without_gradient_stays(rule: str) -> None:
    plan = plan_for(rule, weight_decay=0.1)
    network = model()
    optimizer = plan.optimizer(network)
    still = {"embed.weight", "blocks.1.feed_forward.branch.up.weight", "blocks.0.attention.norm_in.weight"}
    named = dict(network.named_parameters())
    assert still < set(named)
    before = {name: param.detach().clone() for name, param in named.items()}
    for step in range(3):
        gradients(network, step)
        for name in still:
            named[name].grad = None
        optimizer.step()
    moved = {name for name, param in named.items() if not torch.equal(param, before[name])}
    assert moved == set(named) - still


# Sophia draws its vectors in the order of memory; SOAP divides noise by noise where a gradient is not of
# full rank, in a basis that rounding chooses.
@pytest.mark.parametrize("rule", [rule for rule in EVERY if rule not in ("sophia", "soap")])
def test_layout_in_memory_makes_no_difference(rule: str) -> None:
    plan = plan_for(rule, weight_decay=0.1)
    results = []
    for turned in (False, True):
        network = model(dtype=torch.float64)
        if turned:
            for module in network.modules():
                if isinstance(module, nn.Linear):
                    module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)
        results.append(train(network, plan.optimizer(network), 3))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, rtol=0, atol=1e-9)  # products sum in another order


@pytest.mark.parametrize("rule", EVERY)
def test_float64_is_computed_in_float64(rule: str) -> None:
    """Runs that start 1e-10 apart end about as close: rounding to float32 would be seen at 1e-7."""
    plan = plan_for(rule)
    results = []
    for shift in (0.0, 1e-10):
        network = model(dtype=torch.float64)
        with torch.no_grad():
            network.get_parameter("embed.weight").add_(shift)
        results.append(train(network, plan.optimizer(network), 2))
    assert all(value.dtype == torch.float64 for value in results[0])
    if rule in ("lion", "soap"):
        return  # a sign has no derivative
    assert max((a - b).abs().max().item() for a, b in zip(*results, strict=True)) < 2e-8
