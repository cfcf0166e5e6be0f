"""The optimizers for many models against the plain ones, one model at a time, in float64."""

import pytest
import torch

from theodolite.fleet.functional import METHODS, lion, muon_average, muon_move, orthogonal
from theodolite.optimizers import Muon

STEPS, MODELS, SHAPE = 6, 3, (5, 4)
LR, DECAY = (0.1, 0.02, 0.003), (0.0, 0.1, 0.5)


def column(values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def drawn():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(MODELS, *SHAPE, dtype=torch.float64, generator=generator)
    return start, torch.randn(STEPS, MODELS, *SHAPE, dtype=torch.float64, generator=generator)


def together(rule, hyper, shared=None):
    """The weights after all steps, all models in one call."""
    start, gradients = drawn()
    weight = start.clone().flatten(1)
    state = {name: torch.zeros_like(weight) for name in METHODS[rule].state}
    alive = torch.ones(MODELS, 1, dtype=torch.bool)
    for step, gradient in enumerate(gradients, 1):
        hyper["count"] = torch.tensor(step)
        if rule == "adamw":
            hyper["correction1"] = 1 - hyper["beta1"] ** step
            hyper["correction2"] = 1 - hyper["beta2"] ** step
        if METHODS[rule].step is None:
            update = orthogonal(muon_average(gradient.flatten(1), state, hyper), SHAPE, hyper["eps"], shared)
            muon_move(weight, update, hyper, alive)
        else:
            METHODS[rule].step(weight, gradient.flatten(1), state, hyper, alive)
    return weight.unflatten(1, SHAPE)


def alone(make):
    """The same by an ordinary optimizer for each model."""
    start, gradients = drawn()
    found = []
    for model in range(MODELS):
        weight = torch.nn.Parameter(start[model].clone())
        optimizer = make(model, weight)
        for gradient in gradients:
            weight.grad = gradient[model].clone()
            optimizer.step()
        found.append(weight.detach())
    return torch.stack(found)


def test_adamw_is_torchs_with_other_numbers_for_each_model():
    betas, eps = ((0.9, 0.95), (0.5, 0.999), (0.0, 0.9)), (1e-8, 1e-3, 0.1)
    hyper = {
        "lr": column(LR),
        "weight_decay": column(DECAY),
        "beta1": column([one for one, _ in betas]),
        "beta2": column([two for _, two in betas]),
        "eps": column(eps),
    }
    expected = alone(
        lambda i, w: torch.optim.AdamW([w], lr=LR[i], weight_decay=DECAY[i], betas=betas[i], eps=eps[i])
    )
    torch.testing.assert_close(together("adamw", hyper), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dampening, nesterov", [(0.0, False), (0.0, True), (0.3, False)])
def test_sgd_is_torchs_with_other_numbers_for_each_model(dampening, nesterov):
    momentum = (0.5, 0.9, 0.99)
    hyper = {
        "lr": column(LR),
        "weight_decay": column(DECAY),
        "momentum": column(momentum),
        "dampening": column([dampening] * MODELS),
        "nesterov": column([float(nesterov)] * MODELS),
    }
    expected = alone(
        lambda i, w: torch.optim.SGD(
            [w],
            lr=LR[i],
            weight_decay=DECAY[i],
            momentum=momentum[i],
            dampening=dampening,
            nesterov=nesterov,
        )
    )
    torch.testing.assert_close(together("sgd", hyper), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_sgd_without_momentum_is_torchs(dampening):
    hyper = {"lr": column(LR), "weight_decay": column(DECAY), "dampening": column([dampening] * MODELS)} | {
        name: column([0.0] * MODELS) for name in ("momentum", "nesterov")
    }
    expected = alone(lambda i, w: torch.optim.SGD([w], lr=LR[i], weight_decay=DECAY[i], dampening=dampening))
    torch.testing.assert_close(together("sgd", hyper), expected, rtol=1e-12, atol=1e-12)


def test_lion_is_pytorch_optimizers_with_other_numbers_for_each_model():
    peer = pytest.importorskip("pytorch_optimizer")
    betas = ((0.9, 0.99), (0.5, 0.9), (0.95, 0.98))
    hyper = {
        "lr": column(LR),
        "weight_decay": column(DECAY),
        "beta1": column([one for one, _ in betas]),
        "beta2": column([two for _, two in betas]),
    }
    expected = alone(
        lambda i, w: peer.Lion(
            [w], lr=LR[i], weight_decay=DECAY[i], betas=betas[i], weight_decouple=True, fixed_decay=False
        )
    )
    torch.testing.assert_close(together("lion", hyper), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", ["none", "original", "rms", "spectral"])
@pytest.mark.parametrize("axes", [((1,), (0,)), ((0,), (1,))])
@pytest.mark.parametrize("rows", [(), (((0, 1), (2, 3)), ((1, 2), (3, 4)))])
def test_muon_is_ours_with_other_numbers_for_each_model(scale, axes, rows):
    if rows and axes == ((1,), (0,)):
        rows = (*rows, ((4, 5),))  # five outputs
    momentum, eps, nesterov = (0.5, 0.9, 0.95), (1e-7, 1e-2, 1.0), (True, False, True)
    shared = {"scale": scale, "axes": axes, "rows": rows, "steps": 5}
    hyper = {
        "lr": column(LR),
        "weight_decay": column(DECAY),
        "momentum": column(momentum),
        "nesterov": column([float(value) for value in nesterov]),
        "eps": column(eps),
    }
    expected = alone(
        lambda i, w: Muon(
            [w],
            lr=LR[i],
            weight_decay=DECAY[i],
            momentum=momentum[i],
            eps=eps[i],
            nesterov=nesterov[i],
            scale=scale,
            axes=axes,
            rows=rows,
        )
    )
    torch.testing.assert_close(together("muon", hyper, shared), expected, rtol=1e-10, atol=1e-10)


def test_a_dead_model_stays_where_it_is_and_the_others_go_on():
    weight, gradient = torch.ones(2, 3), torch.tensor([[torch.nan] * 3, [1.0] * 3])
    state = {"exp_avg": torch.zeros(2, 3)}
    hyper = {"lr": torch.full((2, 1), 0.1), "weight_decay": torch.zeros(2, 1)}
    hyper |= {"beta1": torch.full((2, 1), 0.9), "beta2": torch.full((2, 1), 0.99)}
    lion(weight, gradient, state, hyper, torch.tensor([[False], [True]]))
    assert weight[0].tolist() == [1.0] * 3
    assert weight[1].tolist() == pytest.approx([0.9] * 3)
