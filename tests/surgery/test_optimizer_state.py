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
from theodolite.core.errors import UseError
from theodolite.surgery import fold, scale_vectors

from .hand import INPUTS, Hand

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


@pytest.mark.parametrize(
    "kind, options",
    [
        *((kind, {}) for kind in MAKES),
        *((kind, {"placement": "output", "reparameterization": "exp"}) for kind in ("layer", "experts")),
        *((kind, {"heterogeneous": False}) for kind in ("pre", "layer")),
        ("experts", {"placement": "input", "reparameterization": None}),
        ("layer", {"reparameterization": "product"}),
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
    assert {id(p) for p in optimizer.param_groups[1]["params"]} == {
        id(p) for p in model.parameters() if p.dim() == 1
    }


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


@pytest.mark.parametrize("options", [{}, {"heterogeneous": False}], ids=str)
def test_gains_decay_after_a_round_trip_as_they_did_before(options: dict[str, Any]) -> None:
    model = made("pre")
    optimizer = adam(model, weight_decay=0.1)
    scale_vectors(model, TOKENS, optimizer=optimizer, **options)
    fold(model, TOKENS, optimizer=optimizer)
    decaying = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, p in model.named_parameters() if id(p) not in decaying} == set()


def test_a_schedule_goes_on() -> None:
    model = made("pre")
    optimizer = adam(model, lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trained(model, optimizer)
    scale_vectors(model, TOKENS, optimizer=optimizer)
    trained(model, optimizer)
    schedule.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.005}


def test_with_a_trained_factor_on_the_outputs_the_shift_still_takes_its_part() -> None:
    plain, early = made("layer"), made("layer")
    for model in (plain, early):
        scale_vectors(model, TOKENS, heterogeneous=False, reparameterization=None)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, one in model.named_parameters():
                if "outputs" in name:
                    one.add_(torch.rand(one.shape, generator=generator, dtype=one.dtype))
    optimizer = trained(plain, adam(plain))
    fold(plain, TOKENS, optimizer=optimizer)
    fold(early, TOKENS)
    truth = trained(early, adam(early))
    assert_same(moments(plain, optimizer, "exp_avg"), moments(early, truth, "exp_avg"))
    pairs = [moments(one, state, "exp_avg_sq") for one, state in ((plain, optimizer), (early, truth))]
    name = "blocks.0.feed_forward.branch.up.weight"
    assert 0.5 < (pairs[0][name] / pairs[1][name]).median() < 2
    assert (pairs[0][name] > 0).all()  # Adam divides by it


def test_the_moments_of_a_gain_that_is_read_several_times_over_follow() -> None:
    """A vector of the map has an entry for each input, the gain of values one for each channel of a head."""

    def step(block: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = block.out(block.small(x.unflatten(-1, (2, 4))).flatten(-2))
        return found

    def run(model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.0, momentum=0.9)
        model(INPUTS).square().sum().backward()
        optimizer.step()
        return optimizer

    plain = Hand(step, small=nn.RMSNorm(4), out=nn.Linear(8, 8, bias=False))
    early = copy.deepcopy(plain)
    optimizer = run(plain)
    options = {"gains": ["small.weight"], "placement": "input", "reparameterization": None}
    scale_vectors(plain, INPUTS, optimizer=optimizer, **options)
    scale_vectors(early, INPUTS, **options)
    truth = run(early)
    mine, other = (one.out.parametrizations.weight[0].inputs[0].gain for one in (plain, early))
    found, wanted = (
        state.state[one]["momentum_buffer"] for state, one in ((optimizer, mine), (truth, other))
    )
    torch.testing.assert_close(found, wanted)


def test_what_fails_on_the_way_leaves_network_and_optimizer_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made("pre")
    optimizer = trained(model, adam(model))
    names = list(model.state_dict())
    before = copy.deepcopy(optimizer.state_dict())

    def fail(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("theodolite.surgery.optimizer_state.ParamGroups.rename", fail)
    with pytest.raises(MemoryError):
        scale_vectors(model, TOKENS, optimizer=optimizer)
    assert list(model.state_dict()) == names
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, held in before["state"].items():
        assert all(torch.equal(after["state"][key][name], value) for name, value in held.items())
