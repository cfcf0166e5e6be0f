"""Groups and optimizers of a plan: few, named, and at base size the plain optimizer bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.optimizers import Muon

pytestmark = pytest.mark.usefixtures("one_dissection")

TOKENS = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(1))
BASE = th.Size(16, 2)


def _build(width: int, depth: int) -> nn.Module:
    return th.models.GPT(width, depth, vocab=17, context=8, head_dim=8, bias=True, norm="layer")


def _plan(optimizer: str = "adamw", size: th.Size = BASE, **given: Any) -> th.Plan:
    options = {key: given.pop(key) for key in ("options", "vector_options") if key in given}
    return dataclasses.replace(_planned(optimizer, size, tuple({"lr": 1e-2, **given}.items())), **options)


@functools.cache
def _planned(optimizer: str, size: th.Size, given: tuple[tuple[str, float], ...]) -> th.Plan:
    return th.plan(_build, TOKENS[:, :-1], size=size, base=BASE, optimizer=optimizer, **dict(given))


def _model(size: th.Size = BASE, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return _build(size.width, size.depth)


def _train(model: nn.Module, *optimizers: Optimizer, steps: int = 5) -> list[Tensor]:
    for step in range(steps):
        tokens = (TOKENS + step) % 17
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def _lion(params: Any, **options: Any) -> Optimizer:
    from pytorch_optimizer import Lion

    return Lion(params, **options)


@pytest.mark.parametrize(
    ("rule", "plain", "options"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("lion", _lion, {"betas": (0.8, 0.9)}),
    ],
)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_at_base_size_it_is_the_plain_optimizer_bit_for_bit(
    rule: str, plain: Callable[..., Optimizer], options: dict[str, Any], decay: float
) -> None:
    planned, by_hand = _model(), _model()
    optimizer = _plan(rule, weight_decay=decay, options=options).optimizer(planned)
    if decay == 0:
        assert len(optimizer.param_groups) == 1
    theirs = plain(by_hand.parameters(), lr=1e-2, weight_decay=decay, **options)
    moved = _train(planned, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(moved, _train(by_hand, theirs), strict=True))


def test_what_does_not_decay_is_the_only_other_group() -> None:
    """Gains after a branch reach the stream: they do not decay."""

    def build(width: int, depth: int) -> nn.Module:
        return th.models.GPT(width, depth, vocab=17, context=8, head_dim=8, norm_placement="peri")

    plan = th.plan(build, TOKENS[:, :-1], size=BASE, base=BASE, lr=1e-2, weight_decay=0.1)
    torch.manual_seed(0)
    planned = build(16, 2)
    torch.manual_seed(0)
    by_hand = build(16, 2)
    optimizer = plan.optimizer(planned)
    assert len(optimizer.param_groups) == 2
    named = dict(by_hand.named_parameters())
    still = [param for name, param in named.items() if "norm_out" in name]
    others = [param for name, param in named.items() if "norm_out" not in name]
    assert len(still) == 4
    groups = [{"params": others}, {"params": still, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    moved = _train(planned, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(moved, _train(by_hand, theirs), strict=True))


def test_at_base_size_a_pair_is_the_two_optimizers_bit_for_bit() -> None:
    plan = _plan("muon-original", weight_decay=0.1, vector_lr=3e-3, vector_options={"betas": (0.8, 0.9)})
    planned, by_hand = _model(), _model()
    matrices, vectors = [], []
    for name, param in by_hand.named_parameters():
        (matrices if param.ndim == 2 and name.startswith("blocks.") else vectors).append(param)
    assert len(matrices) == 12
    muon = Muon(matrices, lr=1e-2, weight_decay=0.1, scale="original")
    adamw = torch.optim.AdamW(vectors, lr=3e-3, weight_decay=0.1, betas=(0.8, 0.9))
    moved = _train(planned, plan.optimizer(planned))
    assert all(torch.equal(a, b) for a, b in zip(moved, _train(by_hand, muon, adamw), strict=True))


@pytest.mark.parametrize("rule", list(th.optimizers.OPTIMIZERS))
def test_every_tensor_is_in_the_group_of_its_row(rule: str) -> None:
    size = th.Size(32, 4)
    plan = _plan(rule, size, weight_decay=0.1)
    model = _model(size)
    groups = plan.param_groups(model)
    assert len(groups) <= 16
    named = dict(model.named_parameters())
    seen = []
    for group in groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            row = plan[name]
            assert param is named[name]
            assert group["rule"] == row.rule
            values = [group["lr"], group["planned_lr"], group["weight_decay"]]
            assert values == pytest.approx([row.lr, row.lr, row.weight_decay], rel=1e-9)
            seen.append(name)
    assert sorted(seen) == sorted(named)
    firsts = [list(named).index(group["param_names"][0]) for group in groups]
    assert firsts == sorted(firsts)


def test_each_optimizer_gets_eps_and_extent_under_its_own_name() -> None:
    size = th.Size(32, 4)

    def group(rule: str, tensor: str, **given: Any) -> tuple[dict[str, Any], Any]:
        plan = _plan(rule, size, weight_decay=0.1, **given)
        groups = plan.param_groups(_model(size))
        return next(one for one in groups if tensor in one["param_names"]), plan[tensor]

    down = "blocks.3.feed_forward.branch.down.weight"
    found, row = group("adamw", down)
    assert found["eps"] == row.eps != 1e-8
    found, row = group("shampoo", "blocks.3.feed_forward.branch.up.weight")
    assert found["matrix_eps"] == row.eps != 1e-6
    assert "eps" not in found
    assert found["weight_decouple"] is True
    assert "eps" not in group("lion", down)[0]
    assert "eps" not in group("sgd", down)[0]
    found, row = group("sophia", down)
    assert found["p"] == 0.01 * row.extent != 0.01
    found, row = group("sophia", down, options={"p": 0.1})
    assert found["p"] == 0.1 * row.extent
    assert group("sso", down)[0]["radius"] is None
    # The branch is half as strong: depth 4 against 2.
    assert group("sso", down, options={"radius": 3.0})[0]["radius"] == 3.0 / 2
    assert group("muon-kimi", down)[0]["scale"] == "rms"
    assert group("muon-kimi", down)[0]["axes"] == ((1,), (0,))


def test_a_transposed_layout_is_told_to_muon() -> None:
    class Turned(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.first = nn.Linear(8, width)
            self.turned = nn.ParameterList([nn.Parameter(torch.randn(width, width)) for _ in range(depth)])
            self.last = nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for weight in self.turned:
                x = x + torch.relu(x) @ weight
            return self.last(x)

    plan = th.plan(
        Turned, torch.randn(2, 8), size=th.Size(32, 2), base=th.Size(16, 2), optimizer="muon", lr=1.0
    )
    groups = [group for group in plan.param_groups(Turned(32, 2)) if group["rule"] == "muon"]
    assert [group["axes"] for group in groups] == [((0,), (1,))]


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_a_schedule_that_ends_at_a_learning_rate_ends_there_in_units_of_the_plans(rule: str) -> None:
    """It divides that learning rate by the one in `optimizer.defaults`."""
    optimization = pytest.importorskip("transformers.optimization")
    plan, model = _plan(rule, th.Size(32, 4), weight_decay=0.1), _model(th.Size(32, 4))
    optimizer = plan.optimizer(model)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (1e-2, 0.1)
    schedule = optimization.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 0, 3, min_lr=1e-3)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    ends = [(group["lr"], group["planned_lr"] / 10) for group in optimizer.param_groups]
    assert all(end == pytest.approx(right) for end, right in ends)


def test_a_group_without_a_learning_rate_gets_that_of_the_plan() -> None:
    optimizer = _plan(weight_decay=0.1).optimizer(_model())
    new = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [new], "param_names": ["new"], "rule": "adamw"})
    assert optimizer.param_groups[-1]["lr"] == 1e-2
    assert optimizer.param_groups[-1]["weight_decay"] == 0.1


def test_groups_have_names_that_say_what_is_in_them() -> None:
    size = th.Size(32, 4)
    for rule in ("adamw", "muon"):
        groups = _plan(rule, size, weight_decay=0.1).param_groups(_model(size))
        names = [group["name"] for group in groups]
        assert len(set(names)) == len(names) > 2
        assert all(("-" in name) == (rule == "muon") for name in names)
    hidden = [name for name in names if name.startswith("muon-hidden")]
    assert hidden == [
        "muon-hidden:blocks.0.attention.branch.query.weight",
        "muon-hidden:blocks.0.attention.branch.out.weight",
    ]


def test_a_state_may_be_loaded_into_groups_of_another_name() -> None:
    plan, model = _plan(size=th.Size(32, 4)), _model(th.Size(32, 4))
    optimizer = plan.optimizer(model)
    saved = optimizer.state_dict()
    for number, group in enumerate(saved["param_groups"]):
        group["name"] = f"group {number}"
    names = [group["name"] for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    assert [group["name"] for group in optimizer.param_groups] == names


def test_a_skipped_tensor_is_left_out_and_a_frozen_one_is_refused() -> None:
    plan, model = _plan(), _model()
    for name, param in model.named_parameters():
        if name.startswith("blocks.0."):
            param.requires_grad_(False)
    with pytest.raises(
        UseError, match=r"blocks\.0\.attention\.norm_in\.weight, .* and 13 more: frozen .*skip=\['blocks\.0"
    ):
        plan.optimizer(model)
    optimizer = plan.optimizer(model, skip=["blocks.0.*"])
    names = {name for group in optimizer.param_groups for name in group["param_names"]}
    assert names == {name for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (["head.*"], r"skip: no tensor's name matches 'head\.\*'"),
        ("blocks.0.*", r"give a list of patterns, skip=\['blocks\.0\.\*'\]"),
        (["*"], "leaves no tensor to train"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(skip: Any, message: str) -> None:
    with pytest.raises(UseError, match=message):
        _plan().optimizer(_model(), skip=skip)


def test_another_network_is_refused() -> None:
    with pytest.raises(UseError, match=r"embed\.weight is \(17, 32\), planned \(17, 16\)"):
        _plan().param_groups(_model(th.Size(32, 2)))


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("adamw", {"beta": 0.9}, r"'beta' is no option of AdamW\. Did you mean 'betas'\?"),
        ("lion", {"lr": 0.1}, "'lr' of Lion is set for each tensor"),
        ("shampoo", {"matrix_eps": 0.1}, "'matrix_eps' of Shampoo is set for each tensor"),
        ("lion", {"weight_decouple": False}, "'weight_decouple' of Lion is set for each tensor"),
        ("shampoo", {"momentum": 0.9}, "'momentum' cannot be used with shampoo"),
        ("sso", {"frobnicate": 1}, r"no option of SpectralSphere\. It has .*radius"),
    ],
)
def test_options_no_optimizer_has_are_refused(rule: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UseError, match=message):
        _plan(rule, options=options).optimizer(_model())


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UseError, match=r"lion comes from pytorch_optimizer.*'theodolite\[optim\]'"):
        _plan("lion").optimizer(_model())


def test_numbers_that_differ_by_rounding_share_a_group() -> None:
    plan = _plan()
    rows = dict(plan.rows)
    rows["readout.weight"] = dataclasses.replace(plan["readout.weight"], lr=1e-2 * (1 + 2e-16))
    close = dataclasses.replace(plan, rows=rows)
    assert close["readout.weight"].lr != 1e-2
    assert len(close.param_groups(_model())) == 1
    rows["readout.weight"] = dataclasses.replace(plan["readout.weight"], lr=1e-2 * (1 + 1e-6))
    assert len(dataclasses.replace(plan, rows=rows).param_groups(_model())) == 2


@pytest.mark.parametrize("wrap", ["plain", "compile", "compile blocks"])
def test_a_compiled_network_has_the_same_groups(wrap: str) -> None:
    plan, model = _plan(size=th.Size(32, 2), weight_decay=0.1), _model(th.Size(32, 2))
    expected = [group["param_names"] for group in plan.param_groups(model)]
    if wrap == "compile":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif wrap == "compile blocks":
        for number, block in enumerate(model.blocks):  # type: ignore[arg-type, union-attr]
            model.blocks[number] = torch.compile(block, backend="aot_eager")  # type: ignore[index, operator]
    assert [group["param_names"] for group in plan.param_groups(model)] == expected


@pytest.mark.parametrize("rule", ["adamw", "muon-kimi", "sso"])
def test_bfloat16_parameters_learn(rule: str) -> None:
    plan = _plan(rule)
    model = _model().bfloat16()
    optimizer = plan.optimizer(model)
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1).float(), TOKENS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(param.dtype == torch.bfloat16 for param in model.parameters())
    assert losses[-1] < losses[0] - 0.2
