"""The edge of stability against the growth factors of the dynamics themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from theodolite import probes
from theodolite.core.errors import UseError

mse = nn.functional.mse_loss


def _growth(optimizer: type[torch.optim.Optimizer], groups: int, scale: float, **options: Any) -> float:
    """By how much a run on a quadratic grows in a step, in the long run."""
    model, batch, made = _made(optimizer, groups, scale, **options)
    sizes = []
    for _ in range(200):
        made.zero_grad()
        mse(model(batch[0]), batch[1]).backward()
        made.step()
        sizes.append(sum(float(p.detach().norm()) for p in model.parameters()))
    return float(np.exp(np.polyfit(range(80), np.log(sizes[120:]), 1)[0]))


def _made(optimizer: Any, groups: int, scale: float, **options: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(3)
    model = nn.Linear(4, 1).double()
    batch = torch.randn(6, 4).double(), torch.zeros(6, 1).double()
    parameters = list(model.parameters())
    listed = [parameters] if groups == 1 else [[parameters[0]], [parameters[1]]]
    rates = [0.3 * scale, 0.05 * scale]
    made = [{"params": some, "lr": rates[place]} for place, some in enumerate(listed)]
    return model, batch, optimizer(made, lr=1.0, **options)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.5},
        {"momentum": 0.7},
        {"momentum": 0.7, "nesterov": True},
        {"momentum": 0.5, "nesterov": True, "weight_decay": 0.3},
    ],
    ids=str,
)
def test_it_is_one_where_training_begins_to_grow(groups: int, options: dict[str, Any]) -> None:
    model, batch, optimizer = _made(torch.optim.SGD, groups, 1.0, **options)
    with probes.track(model, mse, batch, optimizer, measure="edge") as tracking:
        pass
    (value,) = tracking.values("edge")
    for factor, grows in ((0.98, False), (1.02, True)):
        growth = _growth(torch.optim.SGD, groups, factor / value, **options)
        # Learning rates scale the edge, but for what decays with them, which is scaled alike.
        assert (growth > 1) == grows, (factor, growth)


def test_it_is_half_of_lr_times_sharpness_and_follows_the_learning_rate() -> None:
    model, batch, optimizer = _made(torch.optim.SGD, 1, 1.0)
    with probes.track(model, mse, batch, optimizer, measure=["edge", "sharpness"], every=1) as tracking:
        for rate in (0.2, 0.1):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    rates = np.array([0.3, 0.2, 0.1])
    assert tracking.values("edge") == pytest.approx(rates * tracking.values("sharpness") / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (torch.optim.Adam, {}, "'edge' is about gradient descent, and the optimizer is Adam"),
        (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.5}, "without dampening"),
    ],
)
def test_what_it_is_not_about(optimizer: Any, options: dict[str, Any], message: str) -> None:
    model, batch, made = _made(optimizer, 1, 1.0, **options)
    with (
        pytest.raises(UseError, match=message),
        probes.track(model, mse, batch, made, measure="edge"),
    ):
        pass


def test_what_has_no_learning_rate_is_named() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    batch = torch.randn(3, 2), torch.randn(3, 1)
    with (
        pytest.raises(UseError, match="bias requires a gradient and is not in the optimizer"),
        probes.track(model, mse, batch, optimizer, measure="edge"),
    ):
        pass
