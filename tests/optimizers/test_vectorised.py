"""The steps for many models against the optimizers themselves, one model at a time, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.spec import Slot

from .reference import references

STEPS, MODELS, SHAPE = 6, 3, (5, 4)
LR, DECAY = (0.1, 0.02, 0.003), (0.0, 0.1, 0.5)
NUMBERS: dict[str, tuple[Any, ...]] = {
    "eps": (1e-8, 1e-2, 1.0),
    "betas": ((0.9, 0.95), (0.5, 0.999), (0.0, 0.9)),
    "momentum": (0.5, 0.9, 0.99),
    "nesterov": (True, False, True),
    "dampening": (0.0, 0.3, 0.0),
}
"""For each model another one, of every option that may differ between models."""
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"axes": ((0,), (1,)), "rows": (((0, 1), (2, 3)), ((1, 2), (3, 4)))},
    {"axes": ((1,), (0,)), "rows": (((0, 1), (2, 3)), ((1, 2), (3, 4)), ((4, 5),))},
)
VECTORISED = {name: spec.vectorised for name, spec in OPTIMIZERS.items() if spec.vectorised}
CASES = [
    (name, layout)
    for name, one in VECTORISED.items()
    for layout in LAYOUTS
    if not layout or "axes" in one.shared
]


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(MODELS, *SHAPE, dtype=torch.float64, generator=generator)
    return start, torch.randn(STEPS, MODELS, *SHAPE, dtype=torch.float64, generator=generator)


def together(name: str, numbers: dict[str, tuple[Any, ...]], layout: dict[str, Any]) -> Tensor:
    """The weights after all steps, all models in one call."""
    one, (start, gradients) = VECTORISED[name], drawn()
    hyper = {
        key: torch.tensor([float(value) for value in values], dtype=torch.float64)[:, None]
        for key, values in {"lr": LR, "weight_decay": DECAY, **numbers}.items()
        if key != "betas"
    }
    for place, beta in enumerate(("beta1", "beta2") if "betas" in numbers else ()):
        values = [betas[place] for betas in numbers["betas"]]
        hyper[beta] = torch.tensor(values, dtype=torch.float64)[:, None]
    weight = start.clone().flatten(1)
    state = {key: torch.zeros_like(weight) for key in one.state}
    slot = Slot(SHAPE, {**one.shared, **layout})
    for step, gradient in enumerate(gradients, 1):
        now = {**hyper, "count": torch.tensor(step)}
        for beta, correction in (("beta1", "correction1"), ("beta2", "correction2")):
            if beta in hyper:
                now[correction] = 1 - hyper[beta] ** step
        one.step(weight, gradient.flatten(1), state, now, torch.ones(MODELS, 1, dtype=torch.bool), slot)
    return weight.unflatten(1, SHAPE)


def alone(name: str, numbers: dict[str, tuple[Any, ...]], layout: dict[str, Any]) -> Tensor:
    """The same by the optimizer, model by model."""
    spec, (start, gradients) = OPTIMIZERS[name], drawn()
    found = []
    for model in range(MODELS):
        weight = nn.Parameter(start[model].clone())
        own = {key: values[model] for key, values in numbers.items()}
        group = {"params": [weight], "lr": LR[model], **spec.fixed, **layout, **own}
        group |= {"weight_decay": DECAY[model] if spec.decays else 0.0}
        optimizer = spec.maker({})([group])
        for gradient in gradients:
            weight.grad = gradient[model].clone()
            optimizer.step()
        found.append(weight.detach())
    return torch.stack(found)


@pytest.mark.parametrize("name, layout", CASES)
def test_many_models_move_as_each_does_alone(name: str, layout: dict[str, Any]) -> None:
    if OPTIMIZERS[name].source == "pytorch_optimizer":
        pytest.importorskip("pytorch_optimizer")
    known = {**NUMBERS, **references()[name].numbers}
    numbers = {key: known[key] for key in VECTORISED[name].numbers}
    expected = alone(name, numbers, layout)
    torch.testing.assert_close(together(name, numbers, layout), expected, rtol=1e-10, atol=1e-10)
    assert (expected - drawn()[0]).abs().max() > 0.01


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_sgd_without_momentum(dampening: float) -> None:
    numbers = {"momentum": (0.0,) * 3, "dampening": (dampening,) * 3, "nesterov": (False,) * 3}
    torch.testing.assert_close(
        together("sgd", numbers, {}), alone("sgd", numbers, {}), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", VECTORISED)
def test_a_dead_model_stays_where_it_is_and_the_others_go_on(name: str) -> None:
    one, (start, gradients) = VECTORISED[name], drawn()
    weight, gradient = start.clone().flatten(1), gradients[0].flatten(1)
    gradient[0] = torch.nan
    options = {"lr": 0.1, "weight_decay": 0.0, **dict.fromkeys(one.numbers, 0.5)}
    options |= dict.fromkeys(("beta1", "beta2", "correction1", "correction2"), 0.5)
    hyper = {key: torch.full((MODELS, 1), value, dtype=torch.float64) for key, value in options.items()}
    hyper["count"] = torch.tensor(1)
    state = {key: torch.zeros_like(weight) for key in one.state}
    alive = torch.tensor([[False], [True], [True]])
    one.step(weight, gradient, state, hyper, alive, Slot(SHAPE, one.shared))
    assert torch.equal(weight[0], start[0].flatten())
    assert bool(((weight - start.flatten(1))[1:].abs().amax(1) > 1e-3).all())
    assert bool(weight.isfinite().all())
