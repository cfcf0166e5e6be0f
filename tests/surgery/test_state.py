"""What an optimizer remembers is what it would remember had the network been edited before the first step.

With a learning rate of zero nothing moves, so a run of the edited network from the start is the truth.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import theodolite as th
from theodolite.errors import UseError
from theodolite.surgery import fold, scale_vectors

TOKENS = torch.arange(24).view(2, 12) % 20
MAKES: dict[str, dict[str, Any]] = {
    "pre": {},
    "layer": {"norm": "layer", "bias": True},
    "experts": {"experts": 2, "gated": True, "norm_placement": "peri"},
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = th.models.GPT(32, 1, vocab=20, **MAKES[kind]).double()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model


def adam(model: nn.Module, lr: float = 0.0, weight_decay: float = 0.0) -> AdamW:
    return AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)


def trained(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(20, (2, 12), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return optimizer


def moments(model: nn.Module, optimizer: Optimizer, key: str) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[one][key] for name, one in model.named_parameters()}


def assert_same(mine: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == truth.keys()
    for name, value in truth.items():
        assert torch.allclose(mine[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"placement": "output", "reparameterization": "exp"},
        {"heterogeneous": False},
        {"placement": "input", "reparameterization": None},
        {"reparameterization": "product"},
    ],
    ids=str,
)
def test_moments_follow_into_scale_vectors_and_out_of_them(kind: str, options: dict[str, Any]) -> None:
    plain, early = made(kind), made(kind)
    optimizer = trained(plain, adam(plain))
    scale_vectors(plain, TOKENS, optimizer=optimizer, **options)
    scale_vectors(early, TOKENS, **options)
    truth = trained(early, adam(early))
    assert_same(moments(plain, optimizer, "exp_avg"), moments(early, truth, "exp_avg"))
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())
    if kind != "layer":  # a shift that is moved takes a part of the gradient by the weight with it
        held = moments(plain, optimizer, "exp_avg_sq"), moments(early, truth, "exp_avg_sq")
        weights = [{n: v for n, v in one.items() if v.dim() > 1 and "puts" not in n} for one in held]
        assert_same(*weights)

    folded = made(kind)
    scale_vectors(folded, TOKENS, **options)
    fold(folded, TOKENS)
    last = trained(folded, adam(folded))
    fold(early, TOKENS, optimizer=truth)
    assert_same(moments(early, truth, "exp_avg"), moments(folded, last, "exp_avg"))


def test_of_a_gain_with_one_reader_the_second_moment_is_exact() -> None:
    plain, early = made("pre"), made("pre")
    optimizer = trained(plain, adam(plain))
    scale_vectors(plain, TOKENS, placement="input", reparameterization=None, optimizer=optimizer)
    scale_vectors(early, TOKENS, placement="input", reparameterization=None)
    truth = trained(early, adam(early))
    name = "readout.parametrizations.weight.0.inputs.0.gain"
    torch.testing.assert_close(
        moments(plain, optimizer, "exp_avg_sq")[name], moments(early, truth, "exp_avg_sq")[name]
    )


def test_folding_divides_momentum_by_the_gain_and_second_moments_by_its_square() -> None:
    model = made("pre")
    optimizer = trained(model, adam(model))
    gain = model.norm.weight.detach().clone()
    weight, norm = (copy.deepcopy(optimizer.state[one]) for one in (model.readout.weight, model.norm.weight))
    fold(model, TOKENS, optimizer=optimizer)
    after, of_gain = (optimizer.state[one] for one in (model.readout.weight, model.norm.weight))
    torch.testing.assert_close(after["exp_avg"], weight["exp_avg"] / gain)
    torch.testing.assert_close(after["exp_avg_sq"], weight["exp_avg_sq"] / gain**2)
    torch.testing.assert_close(of_gain["exp_avg"], norm["exp_avg"] * gain)
    torch.testing.assert_close(of_gain["exp_avg_sq"], norm["exp_avg_sq"] * gain**2)


def test_momentum_of_sgd_follows() -> None:
    plain, early = made("pre"), made("pre")
    optimizer = trained(plain, SGD(plain.parameters(), lr=0.0, momentum=0.9))
    scale_vectors(plain, TOKENS, optimizer=optimizer)
    scale_vectors(early, TOKENS)
    truth = trained(early, SGD(early.parameters(), lr=0.0, momentum=0.9))
    assert_same(moments(plain, optimizer, "momentum_buffer"), moments(early, truth, "momentum_buffer"))


@pytest.mark.parametrize("named", [True, False])
def test_every_tensor_is_trained_once_and_directions_do_not_decay(named: bool) -> None:
    model = made("layer")
    matrices = [(n, p) if named else p for n, p in model.named_parameters() if p.dim() > 1]
    vectors = [(n, p) if named else p for n, p in model.named_parameters() if p.dim() == 1]
    optimizer = Adam([{"params": matrices}, {"params": vectors, "lr": 0.5, "weight_decay": 0.25}], lr=0.125)
    scale_vectors(model, TOKENS, optimizer=optimizer)
    by_id = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained_once = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(trained_once) == sorted(id(p) for p in model.parameters())
    for name, parameter in model.named_parameters():
        if "puts." in name:
            group = by_id[id(parameter)]
            assert group["lr"] == 0.5
            assert group["weight_decay"] == (0.0 if name.endswith("direction") else 0.25), name
    assert len(optimizer.param_groups) == 3
    if named:
        held = dict(model.named_parameters())
        for group in optimizer.param_groups:
            assert [id(held[name]) for name in group["param_names"]] == [id(p) for p in group["params"]]
    fold(model, TOKENS, optimizer=optimizer)
    trained_once = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(trained_once) == sorted(id(p) for p in model.parameters())


def test_a_round_trip_keeps_the_order_of_the_parameters() -> None:
    for kind in MAKES:
        model = made(kind)
        names = [name for name, _ in model.named_parameters()]
        scale_vectors(model, TOKENS)
        fold(model, TOKENS)
        assert [name for name, _ in model.named_parameters()] == names


def test_what_an_optimizer_keeps_that_is_not_known_is_refused() -> None:
    model = made("pre")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UseError, match=r"'sum' of embed\.weight"):
        scale_vectors(model, TOKENS, optimizer=Adagrad(model.parameters()))
    assert before.keys() == model.state_dict().keys()
    planned = th.plan(
        lambda width, depth: th.models.GPT(width, depth, vocab=20),
        TOKENS,
        size=th.Size(32, 1),
        base=th.Size(32, 1),
        lr=0.1,
    ).optimizer(th.models.GPT(32, 1, vocab=20))
    with pytest.raises(UseError, match="plan the edited build function"):
        fold(model, TOKENS, optimizer=planned)
    with pytest.raises(UseError, match="optimizer is a str"):
        fold(model, TOKENS, optimizer="adamw")  # type: ignore[arg-type]
