"""One optimizer over several: what torch, schedulers, scalers and checkpoints see of it."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.optimizers import BrokenRatiosWarning, Muon, NonFiniteError, Planned

from .small import TOKENS, build, gradients, model, plan_for, train

pytestmark = pytest.mark.usefixtures("one_dissection")

PAIR = ["adamw", "muon-kimi"]


def _flat(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    return [
        pair
        for group in optimizer.param_groups
        for pair in zip(group["param_names"], group["params"], strict=True)
    ]


def _same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("rule", PAIR)
def test_it_is_a_torch_optimizer_with_every_parameter_once(rule: str) -> None:
    network = model()
    optimizer = plan_for(rule).optimizer(network)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert {name: id(param) for name, param in _flat(optimizer)} == {
        name: id(param) for name, param in network.named_parameters()
    }
    train(network, optimizer, 1)
    assert set(optimizer.state) == set(network.parameters())


def test_options_reach_the_optimizer_that_knows_them() -> None:
    plan = dataclasses.replace(
        plan_for("muon-kimi"), options={"momentum": 0.5}, vector_options={"betas": (0.1, 0.2)}
    )
    for group in plan.optimizer(model()).param_groups:
        assert group.get("momentum") == (0.5 if group["rule"] == "muon-kimi" else None)
        assert group.get("betas") == ((0.1, 0.2) if group["rule"] == "adamw" else None)


@pytest.mark.parametrize("rule", PAIR)
def test_hooks_closures_and_zero_grad(rule: str) -> None:
    network = model()
    optimizer = plan_for(rule).optimizer(network)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append("closure")
        gradients(network, 0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert calls == ["before", "closure", "after"]
    by_closure = [param.detach().clone() for param in network.parameters()]
    plain = model()
    assert _same(train(plain, plan_for(rule).optimizer(plain), 1), by_closure)
    optimizer.zero_grad()
    assert all(param.grad is None for param in network.parameters())


@pytest.mark.parametrize("rule", PAIR)
def test_a_grad_scaler_skips_a_step_that_overflowed(rule: str) -> None:
    network = model()
    optimizer = plan_for(rule).optimizer(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [param.detach().clone() for param in network.parameters()]
    gradients(network, 0)
    for param in network.parameters():
        param.grad = param.grad.detach() * 8.0
    network.get_parameter("readout.weight").grad[0, 0] = torch.inf
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert _same(network.parameters(), before)
    gradients(network, 0)
    for param in network.parameters():
        param.grad = param.grad.detach() * scaler.get_scale()
    scaler.step(optimizer)
    plain = model()
    expected = train(plain, plan_for(rule).optimizer(plain), 1)
    torch.testing.assert_close([param.detach() for param in network.parameters()], expected)


@pytest.mark.parametrize("rule", PAIR)
def test_accelerate_takes_it_as_one_optimizer(rule: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    plain = model()
    expected = train(plain, plan_for(rule).optimizer(plain), 3)
    network = model()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare_optimizer(plan_for(rule).optimizer(network), device_placement=True)
    assert _same(train(network, prepared, 3), expected)


@pytest.mark.parametrize("rule", [*PAIR, "lion"])
def test_distributed_checkpoints_give_and_take_its_state_by_name(rule: str) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    plan = plan_for(rule)
    straight = model()
    expected = train(straight, plan.optimizer(straight), 4)
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        first = model()
        optimizer = plan.optimizer(first)
        train(first, optimizer, 2)
        saved = copy.deepcopy(get_optimizer_state_dict(first, optimizer, options=options))
        if not flatten:
            assert set(saved["state"]) == {name for name, _ in first.named_parameters()}
            for group in saved["param_groups"]:  # as another program might have ordered them
                group["params"].reverse()
                group["param_names"].reverse()
        second = model(seed=1)
        second.load_state_dict(first.state_dict())
        resumed = plan.optimizer(second)
        set_optimizer_state_dict(second, resumed, saved, options=options)
        assert _same(train(second, resumed, 2, start=2), expected)


def test_moments_keep_the_dtype_they_were_saved_with() -> None:
    network = model(dtype=torch.bfloat16)
    optimizer = plan_for("adamw").optimizer(network)
    train(network, optimizer, 1)
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].float() + 1e-6  # what bfloat16 could not hold
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = plan_for("adamw").optimizer(network)
    fresh.load_state_dict(saved)
    for param in network.parameters():
        assert fresh.state[param]["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(fresh.state[param]["exp_avg_sq"], optimizer.state[param]["exp_avg_sq"])
        assert fresh.state[param]["exp_avg"].dtype == torch.bfloat16


def test_a_plain_state_is_taken_by_position() -> None:
    network = model()
    plain = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.0)
    train(network, plain, 2)
    twin, its_optimizer = copy.deepcopy((network, plain))
    planned = plan_for("adamw", base=th.Size(16, 2)).optimizer(network)
    planned.load_state_dict(plain.state_dict())
    assert _same(train(network, planned, 2, start=2), train(twin, its_optimizer, 2, start=2))


def _without_a_name(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["param_names"][0] = "embed.table"


def _of_another_width(saved: dict[str, Any]) -> None:
    saved["state"][0]["exp_avg"] = torch.zeros(17, 32)


def _without_names(saved: dict[str, Any]) -> None:
    for group in saved["param_groups"]:
        del group["param_names"]
    saved["param_groups"][0]["params"].pop()


def _by_another_rule(saved: dict[str, Any]) -> None:
    saved["param_groups"][1]["rule"] = "lion"


def _cut_otherwise(saved: dict[str, Any]) -> None:
    first, second = saved["param_groups"][:2]
    second["params"].append(first["params"].pop())
    second["param_names"].append(first["param_names"].pop())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            _without_a_name,
            r"to another network\. Not in the state: embed\.weight\. Not in this optimizer: embed\.table",
        ),
        (_of_another_width, r"embed\.weight has shape \(17, 16\), and the saved exp_avg \(17, 32\)"),
        (_without_names, r"by position, and it has groups of \[2, .* parameters where this .* \[3, "),
        (_by_another_rule, "saved with rule 'lion' and now has 'adamw'"),
        (_cut_otherwise, "here they are in one group"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(spoil: Any, message: str) -> None:
    network = model()
    optimizer = plan_for("adamw").optimizer(network)
    train(network, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UseError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())


def test_sgd_without_momentum_keeps_shapes_by_which_another_width_is_refused() -> None:
    wide = build(32, 2)
    saved = (
        th.plan(build, TOKENS[:, :-1], size=th.Size(32, 2), base=th.Size(8, 1), optimizer="sgd", lr=1e-2)
        .optimizer(wide)
        .state_dict()
    )
    network = model()
    optimizer = plan_for("sgd").optimizer(network)
    before = [group["lr"] for group in optimizer.param_groups]
    with pytest.raises(
        UseError, match=r"embed\.weight has shape \(17, 16\), and the saved shape is \(17, 32\)"
    ):
        optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == before
    for group in (own := copy.deepcopy(optimizer.state_dict()))["param_groups"]:
        group["lr"] /= 4  # as a schedule left it
    optimizer.load_state_dict(own)
    assert [group["lr"] for group in optimizer.param_groups] == [lr / 4 for lr in before]
    plain = torch.optim.SGD(network.parameters(), lr=1.0).state_dict()
    with pytest.raises(UseError, match="neither names nor moments"):
        plan_for("sgd", base=th.Size(16, 2)).optimizer(network).load_state_dict(plain)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("lr", math.nan, "nan"),
        ("lr", -0.1, "-0.1"),
        ("lr", torch.tensor(math.inf), r"tensor\(inf\)"),
        ("weight_decay", math.inf, "inf"),
        ("betas", (0.9, math.nan), r"\(0.9, nan\)"),
        ("eps", math.nan, "nan"),
    ],
)
def test_a_number_that_is_none_is_refused_before_anything_moves(option: str, value: Any, said: str) -> None:
    network = model()
    optimizer = plan_for("adamw").optimizer(network)
    before = train(network, optimizer, 1)
    gradients(network, 1)
    optimizer.param_groups[1][option] = value
    name = optimizer.param_groups[1]["param_names"][0]
    with pytest.raises(UseError, match=rf"{option} of group 1 \({name}, …\) is {said}: no step was made"):
        optimizer.step()
    assert _same(before, [param.detach() for param in network.parameters()])


class Odd(torch.optim.SGD):
    """With options whose defaults are of all kinds."""

    def __init__(self, params: Any, bound: float = math.inf, power: float = -0.5, share: float = 0.5) -> None:
        super().__init__(params, lr=0.1)
        self.defaults |= {"bound": bound, "power": power, "share": share}
        self.param_groups[0].update(bound=bound, power=power, share=share)


@pytest.mark.parametrize(
    "option, value, is_refused",
    [
        ("bound", math.inf, False),
        ("bound", math.nan, True),
        ("power", -2.0, False),
        ("power", -math.inf, True),
        ("share", -1.0, True),
        ("share", math.inf, True),
        ("planned_lr", -1.0, True),
        ("own", math.inf, False),
    ],
)
def test_an_option_is_infinite_or_negative_only_where_its_default_is(
    option: str, value: float, is_refused: bool
) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = Planned([{"params": [weight], "param_names": ["w"], "rule": "odd"}], {"odd": Odd})
    optimizer.step()
    before = weight.detach().clone()
    optimizer.param_groups[0][option] = value
    if is_refused:
        with pytest.raises(UseError, match=f"{option} of group 0"):
            optimizer.step()
    else:
        optimizer.step()
    assert torch.equal(weight, before) == is_refused


def test_a_gradient_whose_square_overflows_is_refused_where_squares_are_kept() -> None:
    network = model()
    optimizer = plan_for("adamw").optimizer(network)
    gradients(network, 0)
    optimizer.step()
    before = [param.detach().clone() for param in network.parameters()]
    network.readout.weight.grad[0, 0] = 1e25
    with pytest.raises(
        NonFiniteError, match=r"readout\.weight has an entry of 1e\+25, .* adamw keeps squares"
    ):
        optimizer.step()
    assert _same(before, [param.detach() for param in network.parameters()])
    network.readout.weight.grad[0, 0] = 1e18  # the sum of squares may overflow where no square does
    optimizer.step()


def test_load_hooks_see_the_state_first_and_the_optimizer_last() -> None:
    network = model()
    optimizer = plan_for("adamw").optimizer(network)
    train(network, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["param_names"][0] = "old.name"
    seen: list[Any] = []

    def rename(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        state["param_groups"][0]["param_names"][0] = "embed.weight"
        return state

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(one))
    optimizer.load_state_dict(saved)
    assert seen == [optimizer]


def test_a_scheduler_that_breaks_the_ratios_is_told_once() -> None:
    network = model()
    optimizer = plan_for("adamw").optimizer(network)
    scheduler = CosineAnnealingLR(optimizer, T_max=4, eta_min=1e-3)
    train(network, optimizer, 1)
    scheduler.step()
    with pytest.warns(
        BrokenRatiosWarning, match=r"TH205: .*\(ratio .*\(ratio .*optimizers\.schedule"
    ) as caught:
        train(network, optimizer, 2)
    assert len(caught) == 1
    low, high = sorted(group["lr"] for group in optimizer.param_groups)[:: len(optimizer.param_groups) - 1]
    assert all(f"{rate:.4g}" in str(caught[0].message) for rate in (low, high))


def test_schedulers_that_keep_the_ratios_are_left_in_peace() -> None:
    network = model()
    optimizer = plan_for("muon-kimi").optimizer(network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peak = [group["lr"] for group in optimizer.param_groups]
        scheduler = OneCycleLR(optimizer, max_lr=peak, total_steps=5, cycle_momentum=False)
        for _ in range(4):
            train(network, optimizer, 1)
            scheduler.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(network, optimizer, 1)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["planned_lr"] * (group["rule"] == "adamw"))
        train(network, optimizer, 1)


def test_momentum_is_cycled_where_all_groups_have_it_and_refused_where_not() -> None:
    with pytest.raises(ValueError, match="must support momentum"):
        OneCycleLR(plan_for("muon-kimi").optimizer(model()), max_lr=1.0, total_steps=5)
    optimizer = plan_for("adamw").optimizer(model())
    OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    assert all(group["betas"][0] == 0.95 for group in optimizer.param_groups)


def test_a_group_is_added_with_the_defaults_of_its_rule() -> None:
    plan = plan_for("muon-kimi", weight_decay=0.1)
    network = model()
    optimizer = plan.optimizer(network, skip=["blocks.1.*"])
    rest = [name for name, _ in network.named_parameters() if not name.startswith("blocks.1.")]
    for group in plan.param_groups(network, skip=rest):
        optimizer.add_param_group(group)
    twin = model()
    assert _same(train(network, optimizer, 3), train(twin, plan.optimizer(twin), 3))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": [nn.Parameter(torch.ones(2))]}, "rule is None: say which optimizer trains it, 'adamw'"),
        ({"params": [nn.Parameter(torch.ones(2))], "rule": "adamw"}, "param_names"),
    ],
)
def test_a_group_that_cannot_be_saved_by_name_is_refused(group: dict[str, Any], message: str) -> None:
    with pytest.raises(UseError, match=message):
        plan_for("adamw").optimizer(model()).add_param_group(group)


def test_an_optimizer_of_ones_own() -> None:
    def half(part: Any, ratios: th.optimizers.Ratios, base: th.optimizers.Base) -> th.optimizers.Hyper:
        return th.optimizers.meet(part, ratios, base, update=1.0)

    tokens = torch.zeros(1, 4, dtype=torch.long)
    plan = th.plan(build, tokens, size=th.Size(16, 2), base=th.Size(8, 1), optimizer=half, lr=1.0)
    with pytest.raises(UseError, match=r"half is a rule of yours.*make=lambda groups"):
        plan.optimizer(model())
    network, twin = model(), model()
    mine = plan.optimizer(network, make=lambda groups: torch.optim.SGD(groups, momentum=0.5))
    assert isinstance(mine, Planned)
    theirs = torch.optim.SGD(
        [{"params": [param], "lr": plan[name].lr} for name, param in twin.named_parameters()], momentum=0.5
    )
    assert _same(train(network, mine, 3), train(twin, theirs, 3))


def test_make_takes_the_place_of_a_matrix_optimizer_alone() -> None:
    network = model()
    given: list[Any] = []

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        given.extend(groups)
        return Muon(groups)

    optimizer = plan_for("muon").optimizer(network, make=make)
    assert {group["rule"] for group in given} == {"muon"}
    assert {group["rule"] for group in optimizer.param_groups} == {"muon", "adamw"}


def test_a_group_of_a_rule_that_had_none_is_trained() -> None:
    first, later = (nn.Parameter(torch.ones(2)) for _ in range(2))
    group = {"params": [first], "param_names": ["a"], "rule": "sgd", "lr": 0.1}
    optimizer = Planned([group], {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW})
    optimizer.add_param_group({"params": [later], "param_names": ["b"], "rule": "adamw", "lr": 0.1})
    (first.sum() + later.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(first.detach(), torch.full((2,), 0.9))
    torch.testing.assert_close(later.detach(), torch.full((2,), 0.899))


def test_a_group_that_is_planned_to_rest_has_no_ratio() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [
        {"params": [param], "param_names": [name], "rule": "sgd", "lr": lr}
        for param, name, lr in zip(params, "ab", (0.1, 0.0), strict=True)
    ]
    optimizer = Planned(groups, {"sgd": torch.optim.SGD})
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    assert [param.tolist() for param in params] == [[pytest.approx(0.9)] * 2, [1.0] * 2]
