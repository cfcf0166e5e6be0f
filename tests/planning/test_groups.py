"""What `Groups` gives to a training loop: groups and one optimizer whose steps are those written by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.planning.mixed import PIXELS, TOKENS, Convolutions, MixedGPT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.optimizers import Muon
from theodolite.planning import Groups, groups


def _built(seed: int = 0) -> MixedGPT:
    torch.manual_seed(seed)
    return MixedGPT()


def _train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.roll(-1, 1).flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def test_a_step_is_that_of_muon_and_adamw_by_hand() -> None:
    ours, by_hand = _built(), _built()
    given: Any = {"lr": 0.02, "vector_lr": 0.003, "weight_decay": 0.1, "options": {"momentum": 0.9}}
    made = groups(ours, TOKENS, vector_options={"betas": (0.8, 0.9)}, **given)
    attention, feed, mixture = by_hand.blocks
    thirds = (((0, 16),), ((16, 32),), ((32, 48),))
    muon = Muon(
        [
            {"params": [attention.qkv.weight], "rows": thirds},
            {"params": [attention.out.weight]},
            {"params": [feed.up.weight, feed.down.weight], "axes": ((0,), (1,))},  # stored as (in, out)
            {"params": [mixture.up, mixture.down], "axes": ((2,), (1,))},  # (expert, out, in)
        ],
        lr=0.02,
        momentum=0.9,
        weight_decay=0.1,
    )
    taken = {id(one) for group in muon.param_groups for one in group["params"]}
    rest = [one for one in by_hand.parameters() if id(one) not in taken]
    adamw = torch.optim.AdamW(
        [
            {"params": [one for one in rest if one is not by_hand.norm.weight]},
            {"params": [by_hand.norm.weight], "weight_decay": 0.0},  # with a tied head it reaches a softmax
        ],
        lr=0.003,
        betas=(0.8, 0.9),
        weight_decay=0.1,
    )
    found, wanted = _train(ours, made.optimizer()), _train(by_hand, muon, adamw)
    assert found.keys() == wanted.keys()
    start = dict(_built().named_parameters())
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(tensor, start[name])


def test_the_groups_have_every_trained_tensor_once() -> None:
    model = Convolutions()
    made = groups(model, PIXELS, lr=0.1)
    given = [id(one) for group in made.param_groups() for one in group["params"]]
    assert sorted(given) == sorted(id(one) for one in model.parameters())
    left = made.param_groups(skip=["readout.*"])
    assert not {"readout.weight", "readout.bias"} & {name for one in left for name in one["param_names"]}


def test_groups_of_a_build_function_take_a_network() -> None:
    made = groups(MixedGPT, TOKENS, size=th.Size(16, 1), lr=0.02, vector_lr=0.003)
    ready = groups(_built(), TOKENS, lr=0.02, vector_lr=0.003)
    one, other = _built(), _built()
    assert str(made.optimizer(one)) == str(ready.optimizer(other))
    assert {name: row.rule for name, row in made.rows.items()} == {
        name: row.rule for name, row in ready.rows.items()
    }


def test_groups_name_the_network() -> None:
    def nameless(width: int, depth: int) -> nn.Module:
        return MixedGPT(width, depth)

    size = th.Size(16, 1)
    assert groups(MixedGPT, TOKENS, size=size, lr=0.1).title == "muon, adamw for the rest: MixedGPT at 16 × 1"
    assert "nameless at 16 × 1" in groups(nameless, TOKENS, size=size, lr=0.1).title
    assert "MixedGPT at 16 × 1" in groups(lambda *both: nameless(*both), TOKENS, size=size, lr=0.1).title


def test_saved_groups_come_back_equal(tmp_path: Path) -> None:
    model = _built()
    made = groups(model, TOKENS, lr=0.02, weight_decay=0.1, optimizer="muon-kimi")
    back = Groups.load(made.save(tmp_path / "groups.json"))
    assert back == made
    assert back.model is None
    assert str(back) == str(made)
    assert str(back.optimizer(model)) == str(made.optimizer())
    assert made.save(tmp_path / "groups.csv").read_text().startswith("tensor,role,optimizer,shape,factor,lr")
    assert "<table" in made.save(tmp_path / "groups.html").read_text()


def test_multipliers_of_a_plan_stay_attached() -> None:
    size, base = th.Size(16, 1), th.Size(8, 1)
    plan = th.plan(MixedGPT, TOKENS, size=size, base=base, lr=0.1)
    assert plan.multipliers
    model = plan.build(0)
    before = model(TOKENS)
    groups(model, TOKENS, lr=0.1).optimizer()
    assert torch.equal(model(TOKENS), before)


def _facts(made: Groups) -> dict[str, Any]:
    return {name: (row.role, row.rule, row.rows, row.lr, row.reasons) for name, row in made.rows.items()}


def test_a_network_on_meta_has_the_same_groups() -> None:
    with torch.device("meta"):
        hollow = MixedGPT()
    made = groups(hollow, TOKENS, lr=0.02)
    assert _facts(made) == _facts(groups(_built(), TOKENS, lr=0.02))
    assert all(one.is_meta for group in made.optimizer().param_groups for one in group["params"])


def test_a_compiled_network_has_the_same_groups() -> None:
    model = _built()
    compiled = torch.compile(model, backend="eager")
    made = groups(compiled, TOKENS, lr=0.02)
    assert made.network == "MixedGPT"
    assert _facts(made) == _facts(groups(model, TOKENS, lr=0.02))
    ids = {id(one) for group in made.optimizer().param_groups for one in group["params"]}
    assert ids == {id(one) for one in model.parameters()}


def test_a_ddp_network_has_the_same_groups(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = _built()
        made = groups(DistributedDataParallel(model), TOKENS, lr=0.02)
        assert made.network == "MixedGPT"
        assert _facts(made) == _facts(groups(model, TOKENS, lr=0.02))
        _train(model, made.optimizer(), steps=1)
    finally:
        dist.destroy_process_group()


def test_a_sharded_network_keeps_its_name_and_flattened_parameters_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = _built()
        whole = groups(model, TOKENS, lr=0.02)
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        made = groups(model, TOKENS, lr=0.02)
        assert made.network == "MixedGPT"
        assert _facts(made) == _facts(whole)
        with warnings.catch_warnings(action="ignore"):
            flat = [
                FullyShardedDataParallel(_built(), device_id=torch.device("cpu"), use_orig_params=kept)
                for kept in (True, False)
            ]
        for one in (*flat, nn.Sequential(flat[0])):
            with pytest.raises(
                UseError, match=r"MixedGPT is wrapped by FullyShardedDataParallel.*fully_shard"
            ):
                groups(one, TOKENS, lr=0.02)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", ["muon", "muon-kimi", "adamw", "sgd", "muonh", "sso"])
def test_one_object_trains(optimizer: str) -> None:
    model = _built()
    made = groups(model, TOKENS, lr=0.01, optimizer=optimizer)
    one = made.optimizer()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(one, 10)
    after = _train(model, one, steps=1)
    schedule.step()
    assert all(not torch.equal(after[name], before[name]) for name in before)
    one.load_state_dict(one.state_dict())


def test_an_optimizer_of_yours_gets_the_groups_of_the_one_that_was_named_alone() -> None:
    given: list[set[str]] = []

    def make(made: list[dict[str, Any]]) -> torch.optim.Optimizer:
        given.append({group["rule"] for group in made})
        return torch.optim.SGD(made, lr=0.1)

    groups(_built(), TOKENS, lr=0.1).optimizer(make=make)
    assert given == [{"muon"}]
