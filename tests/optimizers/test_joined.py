"""Several optimizers as one object: each makes the steps it makes alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from theodolite.core.errors import UseError
from theodolite.optimizers.joined import Joined


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def apart(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    return [first, torch.optim.AdamW(model[2].parameters(), lr=0.01)]


def descend(model: nn.Module, steps: range) -> None:
    model.zero_grad()
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(steps.start))
    model(inputs).square().mean().backward()


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, its) for mine, its in pairs)


def test_steps_are_those_of_each_alone() -> None:
    model, twin = network(), network()
    joined, alone = Joined(apart(model)), apart(twin)
    for step in range(5):
        descend(model, range(step, 5))
        descend(twin, range(step, 5))
        joined.step()
        for one in alone:
            one.step()
        assert equal(model, twin)
    joined.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_saved_state_continues_with_the_same_numbers() -> None:
    model = network()
    joined = Joined(apart(model))
    for step in range(3):
        descend(model, range(step, 9))
        joined.step()
    twin = copy.deepcopy(model)
    other = Joined(apart(twin))
    other.load_state_dict(copy.deepcopy(joined.state_dict()))
    for step in range(3, 6):
        for each, optimizer in ((model, joined), (twin, other)):
            descend(each, range(step, 9))
            optimizer.step()
    assert equal(model, twin)
    assert len(other.state) == 4
    with pytest.raises(UseError, match="the state is of 1 optimizers, and these are 2"):
        other.load_state_dict({"optimizers": [{}]})


def test_schedules_see_all_groups() -> None:
    model = network()
    joined = Joined(apart(model))
    schedule = LambdaLR(joined, lambda step: 0.5**step)
    descend(model, range(1))
    joined.step()
    schedule.step()
    assert [group["lr"] for group in joined.param_groups] == [0.05, 0.005]
    assert [group["lr"] for one in joined.optimizers for group in one.param_groups] == [0.05, 0.005]


def test_hooks_run_once_for_a_step_of_all() -> None:
    model = network()
    joined, called = Joined(apart(model)), []
    joined.register_step_pre_hook(lambda *_: called.append("before"))
    joined.register_step_post_hook(lambda *_: called.append("after"))
    descend(model, range(1))
    joined.step()
    assert called == ["before", "after"]


def test_gradients_can_become_zeros() -> None:
    model = network()
    joined = Joined(apart(model))
    descend(model, range(1))
    joined.zero_grad(set_to_none=False)
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and not grad.any() for grad in grads)


def test_those_that_average_weights_are_switched_and_the_others_are_let_be() -> None:
    class Averaging(torch.optim.SGD):
        mode = "train"

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    model = network()
    averaging = Averaging(model[0].parameters(), lr=0.1)
    joined = Joined([averaging, torch.optim.SGD(model[2].parameters(), lr=0.1)])
    joined.eval()
    assert averaging.mode == "eval"
    joined.train()
    assert averaging.mode == "train"


def test_a_closure_is_called_once() -> None:
    model, calls = network(), []
    joined = Joined(apart(model))

    def closure() -> float:
        calls.append(1)
        descend(model, range(1))
        return 3.0

    assert joined.step(closure) == 3.0
    assert calls == [1]


def test_it_survives_pickle_with_its_groups() -> None:
    joined = Joined(apart(network()))
    found = pickle.loads(pickle.dumps(joined))
    assert [group["lr"] for group in found.param_groups] == [0.1, 0.01]
    assert found.defaults["momentum"] == 0.9


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UseError, match="optimizers is empty"):
        Joined([])
    with pytest.raises(UseError, match="add it to one of"):
        Joined(apart(network())).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_closure_computes_gradients_where_they_are_off() -> None:
    weight = nn.Parameter(torch.ones(2))
    joined = Joined([torch.optim.SGD([weight], lr=0.1)])

    def closure() -> float:
        loss = weight.sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert joined.step(closure) == 2.0
    assert weight.tolist() == pytest.approx([0.9, 0.9])
