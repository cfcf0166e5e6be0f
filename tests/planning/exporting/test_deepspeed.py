"""Exports for DeepSpeed, run by its own Muon where it is installed, else by its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.planning.exporting.made import (
    apart,
    gpt_plan,
    parts,
    parts_plan,
    run,
    trained_gpt,
    trained_parts,
)
from tests.planning.exporting.readers import DeepSpeedMuon, modules

import theodolite as th
from theodolite.core.errors import UseError

pytestmark = pytest.mark.usefixtures("one_dissection")

MUONS = ("muon", "muon-original", "muon-kimi", "muon-spectral")
EXACT = ("wide", "tall", "transposed", "equal", "experts", "experts_back")
AS_ONE = ("fused", "interleaved")


def _file(plan: th.Plan) -> Any:
    with modules(deepspeed__runtime__zero__muon__muon_optimizer={"MuonWithAuxAdam": DeepSpeedMuon}):
        return run(plan.export("deepspeed").text)


@pytest.mark.parametrize("optimizer", MUONS)
def test_the_plans_steps_are_taken(optimizer: str) -> None:
    plan = gpt_plan(optimizer, tied=True)
    ours, theirs = plan.build(seed=0), plan.build(seed=0)
    made = _file(plan).make_optimizer(theirs)
    differ = apart(trained_gpt(theirs, made), trained_gpt(ours, plan.optimizer(ours)))
    assert max(differ.values()) < 1e-3


def test_adamw_is_torchs_which_zero_supports() -> None:
    plan = gpt_plan()
    ours, theirs = plan.build(seed=0), plan.build(seed=0)
    made = _file(plan).make_optimizer(theirs)
    assert type(made) is torch.optim.AdamW
    differ = apart(trained_gpt(theirs, made), trained_gpt(ours, plan.optimizer(ours)))
    assert max(differ.values()) < 1e-5


@pytest.mark.parametrize("rule", MUONS)
@pytest.mark.parametrize("name", EXACT)
def test_layouts_that_it_sees_take_the_plans_steps(name: str, rule: str) -> None:
    plan = parts_plan((name,), rule)
    ours, theirs = parts(plan), parts(plan)
    made = _file(plan).make_optimizer(theirs)
    assert apart(trained_parts(theirs, made), trained_parts(ours, plan.optimizer(ours)))[name] < 1e-4


@pytest.mark.parametrize("rule", MUONS)
@pytest.mark.parametrize("name", AS_ONE)
def test_blocks_of_rows_keep_the_size_of_the_step_and_are_said(name: str, rule: str) -> None:
    plan = parts_plan((name,), rule)
    assert any(f"{name}: the plan orthogonalises" in note for note in plan.export("deepspeed").notes)
    ours, theirs = parts(plan), parts(plan)
    made = _file(plan).make_optimizer(theirs)
    one, two = trained_parts(theirs, made), trained_parts(ours, plan.optimizer(ours))
    assert float(one[name].norm() / two[name].norm()) == pytest.approx(1, rel=0.1)


def test_every_parameter_is_marked() -> None:
    plan = gpt_plan("muon")
    model = _file(plan).mark(plan.build(seed=0))
    for name, tensor in model.named_parameters():
        assert tensor.use_muon == (plan[name].rule == "muon")
    experts = parts_plan(("experts", "wide"))
    model = _file(experts).mark(parts(experts))
    assert model.experts.is_expert_group
    assert not hasattr(model.wide, "is_expert_group")


def test_blocks_of_rows_of_one_size_are_told_by_their_number() -> None:
    plan = parts_plan(("equal", "fused", "wide"))
    model = _file(plan).mark(parts(plan))
    assert [model.equal.muon_num_heads, model.fused.muon_num_heads, model.wide.muon_num_heads] == [
        3,
        None,
        None,
    ]
    assert any("equal: muon_num_heads is set" in note for note in plan.export("deepspeed").notes)


def test_the_config_names_no_optimizer_which_would_mark_parameters_again() -> None:
    config = json.loads(json.dumps(_file(gpt_plan("muon")).CONFIG))
    assert "optimizer" not in config
    stage = config["zero_optimization"]["stage"]
    assert stage in (1, 2, 3)
    assert f"CONFIG has stage {stage}." in " ".join(gpt_plan("muon").export("deepspeed").notes)


def test_clipping_is_off_as_zero_would_clip_the_orthogonal_updates() -> None:
    plan = parts_plan(("wide", "tall", "experts"))  # norms √12, √3·√10 and √(3·8)
    assert _file(plan).CONFIG["gradient_clipping"] == 0
    assert any("norm of all updates is about 8.12" in note for note in plan.export("deepspeed").notes)


def test_a_fixed_eps_is_said() -> None:
    notes = gpt_plan("muon").export("deepspeed").notes
    assert any("Muon's eps fixed at 1e-07, where the plan has" in note for note in notes)
    alike = parts_plan(("wide", "tall"))
    assert {row.eps for row in alike.trained} == {1e-7}
    assert not any("Muon's eps" in note for note in alike.export("deepspeed").notes)


@pytest.mark.parametrize("options", [{"nesterov": False}, {"steps": 7}])
def test_options_that_are_fixed_there_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UseError, match=rf"the option {next(iter(options))}=.* always"):
        parts_plan(("wide",), options=options).export("deepspeed")


@pytest.mark.parametrize("name", ["kernel", "kernel_back", "kernel_1d", "kernel_last"])
def test_kernels_are_refused_by_name(name: str) -> None:
    with pytest.raises(UseError, match=rf"DeepSpeed cannot train {name} .* Export for torch"):
        parts_plan(("wide", name)).export("deepspeed")


@pytest.mark.filterwarnings("ignore:.torch._prims_common.check. is deprecated")  # torch's own, as it compiles
@pytest.mark.parametrize("rule", MUONS)
@pytest.mark.parametrize("name", [name for name in EXACT if name != "equal"])  # ZeRO alone cuts it
def test_deepspeeds_own_update_is_the_plans(name: str, rule: str) -> None:
    reason = "deepspeed is not installed: its schema is checked above"
    muon = pytest.importorskip("deepspeed.runtime.zero.muon.muon_optimizer", reason=reason)
    if not hasattr(muon, "muon_update"):
        pytest.skip("this DeepSpeed is older than 0.19.8: without ZeRO it does not orthogonalise")
    torch._dynamo.reset()  # it compiles for each shape, and torch allows few of them
    plan = parts_plan((name,), rule)
    ours, theirs = parts(plan), parts(plan)
    made = run(plan.export("deepspeed").text).make_optimizer(theirs)
    differ = apart(trained_parts(theirs, made), trained_parts(ours, plan.optimizer(ours)))
    assert differ[name] < 0.02  # it computes in half precision


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"nesterov": True, "steps": 3},
            "the option steps=3 .* always 5, which takes momentum, nesterov",
        ),
        ({"steps": 5, "nesterov": False}, "the option nesterov=False .* it is always True, which"),
    ],
)
def test_of_two_options_the_one_that_is_not_as_there_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UseError, match=said):
        parts_plan(("wide",), options=options).export("deepspeed")


def test_a_tensor_whose_step_is_another_is_not_said_to_be_adjusted() -> None:
    notes = parts_plan(("tall", "fused")).export("deepspeed").notes
    (adjusted,) = [note for note in notes if "adjusted for it" in note]
    assert "of tall are adjusted" in adjusted
