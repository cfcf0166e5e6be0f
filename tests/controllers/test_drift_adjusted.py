"""DAL against closed forms: on a quadratic c·I the curvature along every gradient is c."""

from __future__ import annotations

import copy
import json
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.controllers.drift_adjusted import DriftAdjusted
from theodolite.core.errors import UseError

mse = nn.functional.mse_loss


def _round(curvature: float, size: int = 4) -> tuple[nn.Linear, tuple[Tensor, Tensor]]:
    """A linear regression whose Hessian is `curvature` times the identity."""
    torch.manual_seed(0)
    points = math.sqrt(curvature * size / 2) * torch.eye(size).double()
    return nn.Linear(size, 1, bias=False).double(), (points, torch.randn(size, 1).double())


def _slope(model: nn.Linear) -> Tensor:
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("power", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("curvature", [0.01, 0.5, 3.0, 100.0])
def test_on_a_round_quadratic_it_is_two_over_the_curvature(power: float, curvature: float) -> None:
    model, batch = _round(curvature)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    adjusted = DriftAdjusted(optimizer, model, mse, power=power)
    adjusted.step(batch)
    expected = min(5.0, 2 / curvature**power)
    assert adjusted.get_last_lr() == pytest.approx([expected], rel=1e-12)
    assert optimizer.param_groups[0]["lr"] == adjusted.get_last_lr()[0]
    assert adjusted.curvature == pytest.approx(curvature, rel=1e-12)


def test_along_an_eigenvector_it_is_that_eigenvalue() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    batch = torch.diag(torch.tensor([1.0, 3.0])).double(), torch.zeros(2, 1).double()  # λ = 1 and 9
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    adjusted = DriftAdjusted(optimizer, model, mse)
    for place, value in (([0.7, 0.0], 1.0), ([0.0, -0.2], 9.0)):
        model.weight.data = torch.tensor([place]).double()
        adjusted.step(batch)
        assert adjusted.lr == pytest.approx(2 / value, rel=1e-12)


def test_groups_keep_their_ratios_and_what_is_not_trained_does_not_bend() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    batch = torch.randn(8, 3).double(), torch.randn(8, 1).double()
    groups = [{"params": [model[2].weight], "lr": 0.02}, {"params": [model[2].bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    adjusted = DriftAdjusted(optimizer, model, mse)
    adjusted.step(batch)
    # The last layer alone is a linear regression on (tanh, 1).
    features = torch.cat([torch.tanh(model[0](batch[0])), torch.ones(8, 1)], 1).detach()
    weights = torch.cat([model[2].weight[0], model[2].bias]).detach()
    curved = 2 / 8 * features.T @ features
    slope = 2 / 8 * features.T @ (features @ weights - batch[1][:, 0])
    lr = 2 / float((curved @ slope).norm() / slope.norm())
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2 * lr, lr], rel=1e-10)


def test_what_is_frozen_counts_only_when_it_is_thawed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    batch = 3 * torch.randn(8, 3).double(), torch.randn(8, 1).double()
    every = DriftAdjusted(torch.optim.SGD(model.parameters(), lr=1.0), model, mse)
    head = DriftAdjusted(torch.optim.SGD(model[2].parameters(), lr=1.0), model, mse)
    every.step(batch), head.step(batch)
    whole = every.curvature
    assert whole != pytest.approx(head.curvature, rel=0.01)
    model[0].requires_grad_(False)
    every.step(batch)
    assert every.curvature == head.curvature
    model[0].requires_grad_(True)
    every.step(batch)
    assert every.curvature == whole
    model.requires_grad_(False)
    with pytest.raises(UseError, match="no parameter of the optimizer requires a gradient"):
        every.step(batch)


def test_a_group_that_is_added_later_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    adjusted = DriftAdjusted(optimizer, model, mse)
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    with pytest.raises(UseError, match="has 2 parameter groups, and had 1 when this was made"):
        adjusted.step((torch.ones(2, 3).double(), torch.zeros(2, 1).double()))
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]
    assert adjusted.calls == 0


def test_what_the_loss_does_not_need_can_be_frozen_as_is_said() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    adjusted = DriftAdjusted(torch.optim.SGD(model.parameters(), lr=1.0), model, mse)
    batch = torch.tensor([[2.0, 0.0]]), torch.zeros(1, 1)  # the curvature is 8
    with pytest.raises(UseError, match=r"depend on idle.*requires_grad_\(False\)"):
        adjusted.step(batch)
    model.idle.requires_grad_(False)  # type: ignore[union-attr]
    adjusted.step(batch)
    assert adjusted.lr == pytest.approx(0.25)


def test_it_measures_every_so_often_and_leaves_no_trace() -> None:
    model, batch = _round(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mse(model(batch[0]), batch[1]).backward()
    optimizer.step()
    weight, grad, state = model.weight.detach().clone(), _slope(model).clone(), torch.get_rng_state()
    kept = copy.deepcopy(optimizer.state_dict()["state"])
    adjusted = DriftAdjusted(optimizer, model, mse, every=3)
    found = []
    for scale in (1.0, 2.0, 3.0, 4.0):
        adjusted.step((math.sqrt(scale) * batch[0], batch[1]))
        found.append(adjusted.lr)
    assert found == pytest.approx([1.0, 1.0, 1.0, 0.25])
    assert torch.equal(model.weight, weight)
    assert torch.equal(_slope(model), grad)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], kept[0]["momentum_buffer"])


def test_a_flat_place_gets_the_cap() -> None:
    model, (points, targets) = _round(1.0)
    adjusted = DriftAdjusted(torch.optim.SGD(model.parameters(), lr=0.1), model, mse, cap=7.0)
    adjusted.step((0 * points, targets))
    assert adjusted.get_last_lr() == [7.0]


def _trained(steps: int, stop: int | None, every: int) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    batch = torch.randn(16, 4), torch.randn(16, 1)

    def made(model: nn.Module) -> tuple[Any, DriftAdjusted]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, DriftAdjusted(optimizer, model, mse, every=every)

    optimizer, adjusted = made(model)
    rates = []
    for step in range(steps):
        if step == stop:
            saved = json.loads(json.dumps(adjusted.state_dict()))
            weights, groups = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
            model = copy.deepcopy(model)
            model.load_state_dict(weights)
            optimizer, adjusted = made(model)
            optimizer.load_state_dict(groups)
            adjusted.load_state_dict(saved)
        adjusted.step(batch)
        optimizer.zero_grad()
        mse(model(batch[0]), batch[1]).backward()
        optimizer.step()
        rates += adjusted.get_last_lr()
    return model, rates


@pytest.mark.parametrize("every", [1, 4])
def test_resumed_it_goes_on_to_the_bit(every: int) -> None:
    straight, rates = _trained(12, None, every)
    resumed, again = _trained(12, 6, every)
    assert rates == again
    assert len(set(rates)) == 12 // every
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_plan_keeps_its_ratios() -> None:
    from theodolite.optimizers import Planned

    model, batch = _round(4.0)
    extra = nn.Parameter(torch.ones(1).double())
    model.register_parameter("extra", extra)
    groups = [
        {"params": [p], "param_names": [n], "rule": "sgd", "lr": lr, "planned_lr": lr}
        for n, p, lr in (("weight", model.weight, 0.3), ("extra", extra, 0.1))
    ]
    optimizer = Planned(groups, {"sgd": torch.optim.SGD})
    adjusted = DriftAdjusted(optimizer, model, lambda out, y: mse(out, y))
    model.forward = lambda x: nn.functional.linear(x, model.weight) + 0 * model.extra  # type: ignore[method-assign]
    adjusted.step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert adjusted.get_last_lr() == pytest.approx([0.5, 0.5 / 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power": 0.0}, "power is 0.0"),
        ({"cap": math.inf}, "cap is inf"),
        ({"every": 0}, "every is 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    model, _ = _round(1.0)
    with pytest.raises(UseError, match=message):
        DriftAdjusted(torch.optim.SGD(model.parameters(), lr=0.1), model, mse, **options)


def test_bad_input_leaves_the_learning_rates() -> None:
    model, (points, targets) = _round(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adjusted = DriftAdjusted(optimizer, model, mse)
    with pytest.raises(UseError, match="the loss is nan"):
        adjusted.step((points * math.nan, targets))
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(UseError, match="none of the model's"):
        DriftAdjusted(optimizer, copy.deepcopy(model), mse)
    with pytest.raises(UseError, match=r"the largest learning rate is 0\.0"):
        DriftAdjusted(torch.optim.SGD(model.parameters(), lr=0.0), model, mse)
    with pytest.raises(UseError, match="the state has no 'cap'"):
        adjusted.load_state_dict({"power": 1.0})
