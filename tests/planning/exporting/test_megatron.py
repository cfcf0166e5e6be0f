"""Exports for Megatron-LM, read by its own code where it is installed, else by its schema."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tests.planning.exporting.made import (
    SIZE,
    apart,
    build,
    gpt_plan,
    parts,
    parts_plan,
    run,
    trained_parts,
)
from tests.planning.exporting.readers import MEGATRON, modules, read_megatron
from torch import nn

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.optimizers.muon import SCALES

pytestmark = pytest.mark.usefixtures("one_dissection")

MUONS = ("muon", "muon-original", "muon-kimi", "muon-spectral")
FACTORS = {  # emerging_optimizers' get_muon_scale_factor(size_out, size_in, mode)
    "shape_scaling": lambda rows, columns: max(1, rows / columns) ** 0.5,
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
}


def _file(plan: th.Plan, **given: Any) -> Any:
    with modules(megatron__core__optimizer__optimizer_config=MEGATRON):
        return run(plan.export("megatron", **given).text)


def _check(plan: th.Plan, file: Any, read: dict[str, dict[str, Any]]) -> None:
    """The rates that Megatron makes of the overrides are those of the plan."""
    config = file.CONFIG
    for name, override in read.items():
        row = plan[name]
        rate, decay = override["max_lr"], override["wd_mult"] * config["weight_decay"]
        if row.rule == "adamw":
            assert (rate, decay, override["eps"]) == pytest.approx((row.lr, row.weight_decay, row.eps))
            continue
        assert "eps" not in override
        rows, columns = row.shape
        factor = FACTORS[config["muon_scale_mode"]](rows, columns) * config["muon_extra_scale_factor"]
        scale = SCALES[{"muon": "none", "muon-kimi": "rms"}.get(row.rule, row.rule.removeprefix("muon-"))]
        assert rate * factor == pytest.approx(row.lr * scale(row.fan_in, row.fan_out))
        assert rate * decay == pytest.approx(row.lr * row.weight_decay)


@pytest.mark.parametrize("optimizer", ["adamw", *MUONS])
def test_every_tensor_has_the_plans_rates(optimizer: str) -> None:
    plan = gpt_plan(optimizer)
    file = _file(plan)
    read = read_megatron(file.config_overrides(), build(SIZE.width, SIZE.depth))
    assert read.keys() == plan.rows.keys()
    _check(plan, file, read)
    assert file.CONFIG["optimizer"] == ("adam" if optimizer == "adamw" else "muon")


def test_options_are_settings_of_megatron() -> None:
    options = {"momentum": 0.8, "nesterov": False, "steps": 7}
    config = _file(parts_plan(("wide",), options=options)).CONFIG
    names = ("muon_momentum", "muon_nesterov", "muon_num_ns_steps")
    assert [config[name] for name in names] == [0.8, False, 7]
    assert config["muon_coefficient_type"] == "simple"  # Jordan's three numbers, at every step
    config = _file(parts_plan(("wide",), "adamw", options={"betas": (0.8, 0.95)})).CONFIG
    assert (config["adam_beta1"], config["adam_beta2"]) == (0.8, 0.95)


def test_the_lowest_rate_keeps_the_ratios() -> None:
    plan = gpt_plan()
    read = read_megatron(_file(plan).config_overrides(lr=2.0, min_lr=0.2), build(SIZE.width, SIZE.depth))
    for name, override in read.items():
        assert override["max_lr"] == pytest.approx(2.0 * plan[name].lr / plan.lr)
        assert override["min_lr"] == pytest.approx(0.1 * override["max_lr"])


def test_without_decay_nothing_decays() -> None:
    plan = gpt_plan(weight_decay=0.0)
    file = _file(plan)
    assert file.CONFIG["weight_decay"] == 0
    _check(plan, file, read_megatron(file.config_overrides(), build(SIZE.width, SIZE.depth)))


def test_decays_without_one_for_all_are_relative_to_the_largest() -> None:
    plan = dataclasses.replace(gpt_plan(), weight_decay=0.0)  # as of an optimizer whose groups have their own
    file = _file(plan)
    assert file.CONFIG["weight_decay"] == max(row.weight_decay for row in plan.trained)
    _check(plan, file, read_megatron(file.config_overrides(), build(SIZE.width, SIZE.depth)))


def test_parameters_are_marked_for_muon() -> None:
    plan = gpt_plan("muon")
    model = _file(plan).mark(plan.build(seed=0))
    assert {name for name, tensor in model.named_parameters() if tensor.use_muon} == {
        name for name, row in plan.rows.items() if row.rule == "muon"
    }


def test_what_megatron_gives_to_adam_cannot_be_muons() -> None:
    plan = parts_plan(("wide",))
    model = parts(plan)
    model.wide.is_embedding_or_output_parameter = True  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"wide: Megatron trains embeddings and outputs by Adam"):
        _file(plan).mark(model)


def test_another_model_is_refused_by_name() -> None:
    file = _file(gpt_plan())
    for function in (file.mark, lambda model: read_megatron(file.config_overrides(), model)):
        with pytest.raises(ValueError, match=r"bias is not in the plan|weight is not in the plan"):
            function(nn.Linear(2, 2))


def test_what_the_plan_leaves_alone_must_be_frozen() -> None:
    rows = parts_plan(("wide", "tall")).rows
    rows = {**rows, "tall": dataclasses.replace(rows["tall"], role="frozen")}
    plan = dataclasses.replace(parts_plan(("wide", "tall")), rows=rows)
    model = parts(plan)
    with pytest.raises(ValueError, match=r"tall: the plan does not train it, and Megatron would"):
        _file(plan).mark(model)
    model.tall.requires_grad_(False)  # type: ignore[union-attr]
    _file(plan).mark(model)


def test_a_rate_of_zero_has_no_multiples() -> None:
    plan = dataclasses.replace(parts_plan(("wide",)), lr=0.0)
    with pytest.raises(UseError, match=r"multiples of the plan's, which is 0, and that of wide is 0\.02"):
        plan.export("megatron")
    still = dataclasses.replace(plan, rows={"wide": dataclasses.replace(plan.rows["wide"], lr=0.0)})
    assert _file(still).GROUPS["hidden"]["lr_mult"] == 1


def test_the_scheduler_that_applies_the_multiples_is_named() -> None:
    assert any(
        "until OptimizerParamScheduler sets max_lr" in note for note in gpt_plan().export("megatron").notes
    )


@pytest.mark.parametrize("rule", MUONS)
@pytest.mark.parametrize("name", ["fused", "interleaved"])
def test_queries_keys_and_values_are_the_planned_matrices_in_any_layout(name: str, rule: str) -> None:
    plan = parts_plan((name,), rule)
    names = {name: "decoder.layers.0.self_attention.linear_qkv.weight"}
    made = plan.export("megatron", names=names)
    inexact = any("the plan orthogonalises" in note for note in made.notes)
    assert inexact == (
        (name, rule) == ("fused", "muon")
    )  # its factors √1.4, 1, 1 cannot be undone by one rate


def test_stacks_are_refused_by_name() -> None:
    with pytest.raises(UseError, match=r"Megatron cannot train experts \(3, 8, 16\) \(matrices 3 × 8×16\)"):
        parts_plan(("wide", "experts")).export("megatron")


def test_queries_keys_and_values_are_split_by_their_name_alone() -> None:
    plan = parts_plan(("fused",), "muon-kimi")
    as_one = plan.export("megatron")
    assert any("fused: the plan orthogonalises" in note for note in as_one.notes)
    split = plan.export("megatron", names={"fused": "decoder.layers.0.self_attention.linear_qkv.weight"})
    assert not any("the plan orthogonalises" in note for note in split.notes)
    assert any("muon_split_qkv" in note for note in split.notes)


def test_layers_with_settings_of_their_own_are_said() -> None:
    row = parts_plan(("wide",)).rows["wide"]
    rows = {
        f"h.{layer}.w": dataclasses.replace(row, name=f"h.{layer}.w", lr=0.1 if layer else 0.2)
        for layer in range(3)
    }
    notes = dataclasses.replace(parts_plan(("wide",)), rows=rows).export("megatron").notes
    assert any("h.0.w has settings of its own" in note and "pipeline" in note for note in notes)
    assert not any("pipeline" in note for note in gpt_plan().export("megatron").notes)


@pytest.mark.parametrize("optimizer", ["adamw", *MUONS])
def test_megatrons_own_groups_have_the_plans_rates(optimizer: str) -> None:
    reason = "megatron.core is not installed: its schema is checked above"
    core = pytest.importorskip("megatron.core.optimizer", reason=reason)
    plan = gpt_plan(optimizer)
    file = run(plan.export("megatron").text)
    model = file.mark(build(SIZE.width, SIZE.depth))
    config = core.OptimizerConfig(**file.CONFIG, min_lr=0.0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        groups = core._get_param_groups([model], config, file.config_overrides())
    finally:
        torch.distributed.destroy_process_group()
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    read = {names[id(tensor)]: group for group in groups for tensor in group["params"]}
    read = {
        name: {key: group[key] for key in ("max_lr", "min_lr", "wd_mult", "eps") if key in group}
        for name, group in read.items()
    }
    assert read.keys() == plan.rows.keys()
    _check(plan, file, read)
    assert all(math.isfinite(group["max_lr"]) for group in read.values())


@pytest.mark.parametrize("rule", MUONS)
@pytest.mark.parametrize("name", ["wide", "tall", "transposed", "interleaved"])
def test_megatrons_own_muon_takes_the_plans_steps(name: str, rule: str) -> None:
    reason = "megatron.core is not installed: its factors are checked above"
    core = pytest.importorskip("megatron.core.optimizer.emerging_optimizers", reason=reason)
    if not core.HAVE_EMERGING_OPTIMIZERS:
        pytest.skip("emerging_optimizers is not installed, which has Megatron's Muon")
    plan = parts_plan((name,), rule)
    names = {name: "linear_qkv.weight" if name == "interleaved" else name}
    file = run(plan.export("megatron", names=names).text)
    ours, theirs = parts(plan), parts(plan)
    (tensor,), config = theirs.parameters(), file.CONFIG
    ((_, override),) = [
        (key, override)
        for key, override in file.config_overrides().items()
        if key.matches(tensor, names[name])
    ]
    muon = core.TensorParallelMuon(
        [tensor],
        lr=override["max_lr"],
        weight_decay=config["weight_decay"] * override["wd_mult"],
        momentum=config["muon_momentum"],
        nesterov=config["muon_nesterov"],
        num_ns_steps=config["muon_num_ns_steps"],
        coefficient_type=config["muon_coefficient_type"],
        scale_mode=config["muon_scale_mode"],
        extra_scale_factor=config["muon_extra_scale_factor"],
        split_qkv=name == "interleaved",
        is_qkv_fn=lambda _: True,
        qkv_split_shapes=[4, 4],
        fp32_matmul_prec="highest",
    )
    assert apart(trained_parts(theirs, muon), trained_parts(ours, plan.optimizer(ours)))[name] < 1e-3
