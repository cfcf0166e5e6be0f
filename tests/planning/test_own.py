"""The own parameterization is the network and the optimizer of their author, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.planning.mixed import MixedGPT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

import theodolite as th
from theodolite import Size, UseError
from theodolite.core.building import untouched_randomness
from theodolite.planning.own import Own, own
from theodolite.planning.parameterization import chosen, plan_for, with_zero_readout

SIZE = Size(16, 2)
TOKENS = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """A residual network with dropout, a frozen tensor, and an initialisation of its own."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, 64, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embed(tokens) * self.scale
        for block in self.blocks:
            stream = stream + self.drop(block(torch.tanh(stream)))
        return self.readout(self.norm(stream)) / self.embed.embedding_dim


class Tied(Net):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.readout.weight = self.embed.weight


def one(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)


def several(model: nn.Module) -> Any:
    assert isinstance(model, Net)
    blocks = SGD(model.blocks.parameters(), lr=0.5, momentum=0.9)
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    return [blocks, AdamW(rest, lr=0.003)]


def mine(make: Any = one, build: Any = Net, **options: Any) -> Own:
    return own(build, TOKENS, make, size=SIZE, **options)


def loss(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.roll(1, 1).flatten())


def by_hand(make: Callable[[nn.Module], Any], factor: float = 1.0) -> list[Tensor]:
    """The loop that the author of the network would write."""
    with untouched_randomness(5):
        model = Net(SIZE.width, SIZE.depth).train()
        made = make(model)
        optimizers = made if isinstance(made, list) else [made]
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = group["lr"] * factor
        torch.manual_seed(6)
        for _ in range(5):
            for each in optimizers:
                each.zero_grad()
            loss(model).backward()
            for each in optimizers:
                each.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("make", [one, several])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_training_is_that_of_a_loop_by_hand(make: Any, factor: float) -> None:
    plan = mine(make)
    if factor != 1:
        plan = plan.at(plan.lr * factor)
    with untouched_randomness(0):
        model = plan.build(5).train()
        optimizer = plan.optimizer(model)
        torch.manual_seed(6)
        for _ in range(5):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    expected = by_hand(make, factor)
    for mine_, theirs in zip(model.parameters(), expected, strict=True):
        assert torch.equal(mine_, theirs)


def test_the_network_is_as_it_builds_itself() -> None:
    with untouched_randomness(7):
        expected = Net(16, 2).state_dict()
    found = mine().build(7).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    blank = Net(16, 2)
    for parameter in blank.parameters():
        nn.init.zeros_(parameter.data)
    found = mine().initialize(blank, 7).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_multipliers_that_the_network_has_stay() -> None:
    """A user's build may be a plan of ours; its hook on the readout belongs to the network."""
    tokens = torch.zeros(1, 8, dtype=torch.long)
    tied = th.models.GPT

    def build(width: int, depth: int) -> nn.Module:
        made = th.plan(gpt, tokens, size=Size(width, depth), base=Size(32, 1), lr=0.01)
        return made.build(seed=torch.initial_seed() % 1000)

    def gpt(width: int, depth: int) -> nn.Module:
        return tied(width, depth, tied=True)

    plan = own(build, tokens, lambda model: AdamW(model.parameters(), lr=0.01), size=Size(64, 1))
    with untouched_randomness(2):
        expected = build(64, 1)(TOKENS)
    found = plan.build(2)
    assert torch.equal(found(TOKENS), expected)
    assert torch.equal(plan.attach(found)(TOKENS), expected)
    usual = th.plan(gpt, tokens, size=Size(64, 1), base=Size(64, 1), lr=0.01)
    assert not torch.equal(usual.attach(found)(TOKENS), expected)  # a plan puts its own in their place


def test_rows_are_read_from_the_optimizer() -> None:
    plan = mine()
    embed, bias, scale = plan["embed.weight"], plan["blocks.1.bias"], plan["scale"]
    assert (embed.rule, embed.lr, embed.weight_decay, embed.eps) == ("adamw", 0.02, 0.1, 1e-6)
    assert (bias.lr, bias.weight_decay) == (0.01, 0.0)
    assert (scale.role, scale.rule, scale.lr) == ("frozen", "", 0.0)
    assert {row.init.kind for row in plan.rows.values()} == {"kept"}
    assert (plan.lr, plan.optimizer_name, plan.num_groups) == (0.01, "AdamW", 2)
    assert (plan.weight_decay, plan.eps) == (0.1, 1e-6)
    text = str(plan)
    assert text.startswith("own, AdamW at 16 × 2\n8 tensors in 2 groups")
    assert "blocks.*.weight" in text
    assert "as built" in text


def test_a_learning_rate_moves_those_of_all_groups() -> None:
    plan = mine(several).at(0.25)
    assert plan.optimizer_name == "AdamW and SGD"
    assert plan["blocks.0.weight"].lr == 0.25
    assert plan["embed.weight"].lr == pytest.approx(0.0015)
    assert [group["lr"] for group in plan.optimizer(plan.build()).param_groups] == [0.25, 0.0015]
    assert plan.at(0.5) == mine(several)
    assert "learning rates × 0.5" in str(plan)


def test_tensors_that_are_left_out_are_named_apart_from_frozen_ones() -> None:
    def some(model: nn.Module) -> Any:
        assert isinstance(model, Net)
        model.norm.requires_grad_(False)
        rest = [*model.blocks.parameters(), *model.embed.parameters(), *model.norm.parameters()]
        return AdamW(rest, lr=0.1)

    plan = mine(some)
    assert plan["readout.weight"].lr == 0.0
    assert (plan["norm.weight"].rule, plan["norm.weight"].lr) == ("", 0.0)  # no step moves what is frozen
    assert any("In no group" in note and note.endswith(": readout.weight (1 tensor).") for note in plan.notes)
    assert any("norm.weight" in note and "Frozen by the factory" in note for note in plan.notes)
    assert not any("scale" in note for note in plan.notes)  # which the network itself has frozen


def test_a_default_rate_that_no_group_has_is_noted() -> None:
    """A sweep would call the runs at these rates those of lr 0.001, the default of torch."""

    def grouped(model: nn.Module) -> Any:
        return AdamW([{"params": model.parameters(), "lr": 0.02}])

    (note,) = mine(grouped).notes
    assert "0.001, is that of no group: they have 0.02." in note
    assert not mine(lambda model: AdamW([{"params": model.parameters(), "lr": 0.02}], lr=0.02)).notes
    assert not mine(one).notes


def test_tensors_of_several_groups_are_named() -> None:
    def doubled(model: nn.Module) -> Any:
        assert isinstance(model, Net)
        return [AdamW(model.parameters(), lr=0.1), SGD(model.readout.parameters(), lr=0.5)]

    plan = mine(doubled)
    (note,) = [note for note in plan.notes if note.startswith("In several groups")]
    assert note.endswith("(the table has the first): readout.weight (1 tensor).")


def test_the_optimizer_of_a_network_of_any_size_is_read_without_its_memory() -> None:
    hollow = []

    def watching(model: nn.Module) -> Any:
        hollow.append(all(parameter.is_meta for parameter in model.parameters()))
        return one(model)

    mine(watching)
    assert hollow == [True]


def test_a_factory_that_needs_values_gets_them() -> None:
    def by_size(model: nn.Module) -> Any:
        return AdamW(
            [{"params": [p], "lr": float(p.detach().abs().max()) + 1e-3} for p in model.parameters()]
        )

    plan = mine(by_size)
    assert plan["norm.weight"].lr == pytest.approx(1.001)


def test_factors_that_a_schedule_multiplies_in_are_multiplied_in() -> None:
    """As timm's `lr_scale`, and Megatron's `wd_mult`."""

    def layered(model: nn.Module) -> Any:
        assert isinstance(model, Net)
        first = {"params": model.embed.parameters(), "lr_scale": 0.25, "wd_mult": 0.5}
        return AdamW([first, {"params": model.readout.parameters()}], lr=0.1, weight_decay=0.2)

    plan = mine(layered)
    assert (plan["embed.weight"].lr, plan["embed.weight"].weight_decay) == (0.025, 0.1)
    assert any("lr_scale and wd_mult, which no optimizer reads" in note for note in plan.notes)
    groups = plan.at(0.2).optimizer(plan.build()).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.05, 0.1), (0.2, 0.2)]


def test_a_readout_can_start_at_zero_and_nothing_else_changes() -> None:
    plan = mine()
    zero, usual = (each.build(1).state_dict() for each in (with_zero_readout(plan), plan))
    assert not zero["readout.weight"].any()
    others = [name for name in usual if name != "readout.weight"]
    assert all(torch.equal(zero[name], usual[name]) for name in others)
    again = with_zero_readout(plan).initialize(Net(16, 2), 1).state_dict()
    assert all(torch.equal(again[name], value) for name, value in zero.items())
    tied = with_zero_readout(mine(build=Tied)).build(1)
    assert tied.get_parameter("embed.weight").any()


def test_routers_are_no_readouts_that_start_at_zero() -> None:
    """They choose what is computed: at zero no expert would differ from another."""
    size = Size(16, 1)
    plan = th.plan(MixedGPT, TOKENS % 23, size=size, base=size, lr=0.01)
    router = plan["blocks.2.router.weight"]
    assert (router.role, router.block is None) == ("output", False)
    assert with_zero_readout(plan)["blocks.2.router.weight"] == router


def test_what_has_no_sense_is_refused_and_the_rest_works(tmp_path: Path) -> None:
    plan = mine()
    model = plan.build()
    with pytest.raises(UseError, match="skip and make are for plans"):
        plan.optimizer(model, skip=["embed.weight"])
    with pytest.raises(UseError, match="skip and make are for plans"):
        plan.optimizer(model, make=lambda groups: AdamW(groups))
    with pytest.raises(UseError, match=r"is that of width 16, depth 2 and does not fit this Net"):
        plan.optimizer(Net(8, 2))
    with pytest.raises(UseError, match="a parameterization cannot be loaded"):
        Own.load(plan.save(tmp_path / "own.json"))
    with pytest.raises(UseError, match="make it again from the workload"):
        Own.from_dict(plan.to_dict())
    assert plan.save(tmp_path / "own.html").stat().st_size > 1000
    assert "trained by AdamW" in str(plan.explain("embed.weight"))
    other = th.plan(Net, TOKENS, size=SIZE, base=SIZE, lr=0.02)
    assert "decay 0.1 → 0" in str(plan.diff(other))
    schedule = plan.schedule(plan.optimizer(model), "linear", steps=4)
    assert schedule.get_last_lr() == [0.02, 0.01]


def test_schedule_free_optimizers_take_no_schedule_and_begin_in_training() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    plan = mine(lambda model: source.ScheduleFreeAdamW(model.parameters(), lr=0.01))
    optimizer = plan.optimizer(plan.build())
    assert optimizer.param_groups[0]["train_mode"]
    with pytest.raises(UseError, match="replaces a schedule"):
        plan.schedule(optimizer, "cosine", steps=3)
    warmed = plan.schedule(optimizer, "constant", steps=4, warmup=2)
    assert warmed.get_last_lr() == [0.005]


def test_optimizers_that_begin_with_averages_are_switched_to_training() -> None:
    """As those of facebookresearch/schedule_free, whose authors ask for it before the first step."""

    class Averaging(AdamW):
        mode = "eval"

        def train(self) -> None:
            self.mode = "train"

    plan = mine(lambda model: Averaging(model.parameters()))
    assert plan.optimizer(plan.build()).mode == "train"


def test_no_rule_is_said_where_none_fits() -> None:
    plan = mine(lambda model: torch.optim.Adadelta(model.parameters(), lr=0.1))
    assert plan["embed.weight"].rule == "Adadelta"
    assert any(note.startswith("No rule is known for Adadelta") for note in plan.notes)


def test_a_rate_needs_something_to_stand_for() -> None:
    source = pytest.importorskip("pytorch_optimizer")

    def relative(model: nn.Module) -> Any:
        return source.AdaFactor(model.parameters(), lr=None, relative_step=True)

    with pytest.raises(UseError, match="has no default learning rate that it could stand for"):
        mine(relative, lr=0.1)
    with pytest.raises(UseError, match="says nothing of its optimizer"):
        mine(None)


def test_a_group_without_a_rate_has_none_to_multiply() -> None:
    def partly(model: nn.Module) -> Any:
        assert isinstance(model, Net)
        rest = [p for p in model.parameters() if p is not model.readout.weight]
        return AdamW([{"params": rest}, {"params": [model.readout.weight], "lr": None}], lr=0.01)

    with pytest.raises(UseError, match=r"the group of readout.weight has no learning rate to multiply"):
        mine(partly, lr=0.1)


GPT = th.models.GPT
BASE, LARGE = Size(32, 1), Size(64, 2)


def test_plan_for_gives_each_parameterization() -> None:
    made = {
        kind: plan_for(GPT, TOKENS, LARGE, parameterization=kind, base=BASE, lr=0.01, make_optimizer=one)
        if kind == "own"
        else plan_for(GPT, TOKENS, LARGE, parameterization=kind, base=BASE, lr=0.01)
        for kind in ("own", "plan", "standard")
    }
    assert isinstance(made["own"], Own)
    assert (made["plan"].base, made["standard"].base) == (BASE, LARGE)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"parameterization": "mup"}, "parameterization is 'mup'"),
        ({"parameterization": "plan", "base": BASE}, "lr is missing"),
        ({"parameterization": "standard"}, "lr is missing"),
        ({"parameterization": "plan", "lr": 0.1}, "base is missing"),
        (
            {"parameterization": "own", "optimizer": "adamw"},
            "optimizer is 'adamw': the own parameterization has",
        ),
        (
            {"parameterization": "own", "planning": {"eps": 1e-8}},
            "eps is given, and the own parameterization",
        ),
        ({"parameterization": "own", "weight_decay": 0.1}, "weight_decay is given, and the own"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(given: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {
        **{"factory": None, "base": None, "lr": None, "optimizer": None},
        **{"weight_decay": 0.0, "planning": {}},
    }
    with pytest.raises(UseError, match=said):
        chosen(**(usual | given))


def test_the_optimizer_that_is_given_comes_before_the_workload_s() -> None:
    usual: dict[str, Any] = {"base": None, "lr": None, "weight_decay": 0.0, "planning": {}}
    for optimizer, expected in ((None, one), (several, several)):
        found = chosen("own", factory=one, optimizer=optimizer, **usual)
        assert found["make_optimizer"] is expected
    roles = {"readout.*": "hidden"}
    assert (
        chosen("own", factory=one, optimizer=None, **(usual | {"planning": {"roles": roles}}))["roles"]
        == roles
    )


def test_a_workload_says_what_cannot_be_called() -> None:
    workload = th.workload("mlp-mixture")
    assert workload.optimizer is None
    with pytest.raises(UseError, match="optimizer is 'adamw', which cannot be called"):
        dataclasses.replace(workload, optimizer="adamw")


def test_an_export_which_would_lack_options_of_the_optimizer_is_refused() -> None:
    with pytest.raises(UseError, match="cannot be exported for torch, as its rows do not have all options"):
        mine().export("torch")


def test_a_network_without_memory_is_refused_and_a_sharded_one_gets_its_shards() -> None:
    plan = mine()
    with torch.device("meta"):
        hollow = Net(SIZE.width, SIZE.depth)
    with pytest.raises(UseError, match=r"scale is on the meta device .*to_empty"):
        plan.initialize(hollow)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(Net(SIZE.width, SIZE.depth), mesh=init_device_mesh("cpu", (1,)))
        plan.initialize(model, seed=3)
        expected = dict(plan.build(3).named_parameters())
        for name, tensor in model.named_parameters():
            assert isinstance(tensor, DTensor)
            assert torch.equal(tensor.full_tensor(), expected[name])
    finally:
        dist.destroy_process_group()


def test_a_default_rate_that_one_of_the_groups_has_needs_no_note() -> None:
    def make(model: nn.Module) -> Any:
        groups = [{"params": [one], "lr": 0.04 / 2**place} for place, one in enumerate(model.parameters())]
        return AdamW(groups, lr=0.01)

    assert "The default learning rate" not in str(mine(make))


def test_of_a_tensor_in_two_groups_all_numbers_are_those_of_the_first() -> None:
    def make(model: nn.Module) -> Any:
        optimizers = [AdamW(model.parameters(), lr=0.01, weight_decay=0.1)]
        return [*optimizers, SGD(model.parameters(), lr=0.5, weight_decay=0.7)]

    row = mine(make)["readout.weight"]
    assert (row.rule, row.lr, row.weight_decay) == ("adamw", 0.01, 0.1)


def test_without_a_default_rate_the_groups_keep_theirs() -> None:
    class Unnamed(SGD):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups)
            del self.defaults["lr"]

    plan = mine(lambda model: Unnamed([{"params": model.parameters(), "lr": 0.25}]))
    assert plan.factor == 1.0
    assert plan.optimizer(plan.build()).param_groups[0]["lr"] == 0.25
