"""Exports for torchtitan, read by its own container where it is installed, else by its schema."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from tests.planning.exporting.made import SIZE, apart, build, gpt_plan, parts, parts_plan, run, trained_gpt
from tests.planning.exporting.readers import TITAN, modules, read_titan
from torch import nn

import theodolite as th
from theodolite.core.errors import UseError

pytestmark = pytest.mark.usefixtures("one_dissection")


def _config(plan: th.Plan, **given: Any) -> Any:
    with modules(torchtitan__components__optimizer=TITAN):
        return run(plan.export("torchtitan").text).optimizer_config(**given)


def test_every_tensor_has_the_plans_numbers() -> None:
    plan = gpt_plan()
    read = read_titan(_config(plan), build(SIZE.width, SIZE.depth))
    assert read.keys() == plan.rows.keys()
    for name, (kind, options) in read.items():
        row = plan[name]
        assert kind == "AdamW"
        assert (options["lr"], options["weight_decay"], options["eps"]) == pytest.approx(
            (row.lr, row.weight_decay, row.eps), rel=1e-11
        )
        assert options["betas"] == (0.9, 0.999)


def test_equal_rows_share_a_group() -> None:
    groups = _config(gpt_plan()).param_groups
    assert len(groups) == len({repr(one.optimizer_kwargs) for one in groups})


def test_layers_that_are_wrapped_for_checkpointing_are_matched() -> None:
    model = build(SIZE.width, SIZE.depth)
    for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
        wrapper = nn.Module()
        wrapper._checkpoint_wrapped_module = block
        model.blocks[layer] = wrapper  # type: ignore[index,operator]
    assert len(read_titan(_config(gpt_plan()), model)) == len(gpt_plan().rows)


def test_patterns_match_whole_names() -> None:
    patterns = [one.pattern for one in _config(gpt_plan()).param_groups]
    for name in ("xnorm.weight", "norm.weightx", "readout_weight", "a.embed.weight"):
        assert not any(re.search(pattern, name) for pattern in patterns)


def test_the_pattern_of_one_tensor_matches_no_longer_name() -> None:
    (group,) = _config(parts_plan(("wide",), "adamw")).param_groups
    assert re.search(group.pattern, "wide")
    for name in ("xwide", "x.wide", "widex", "wide.x"):
        assert not re.search(group.pattern, name)


def test_options_of_muon_are_those_of_torchs_class() -> None:
    plan = parts_plan(("wide",), options={"momentum": 0.8, "nesterov": False, "steps": 7})
    (group,) = _config(plan, dist_muon={}).param_groups
    known = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]).defaults
    kwargs = group.optimizer_kwargs
    assert [kwargs[name] for name in ("momentum", "nesterov", "ns_steps")] == [0.8, False, 7]
    assert kwargs.keys() - known.keys() == {"fused", "foreach"}  # of every optimizer of torchtitan


def test_layers_with_settings_of_their_own_are_told_apart_in_any_order() -> None:
    row = parts_plan(("wide",), "adamw").rows["wide"]
    lrs = {"h.0.w": 0.1, "h.1.w": 0.2, "h.2.w": 0.2, "h.0.v": 0.2, "h.1.v": 0.1, "h.2.v": 0.1}
    lrs |= {"h.0.m.3.u": 0.1, "h.1.m.3.u": 0.2}
    rows = {name: dataclasses.replace(row, name=name, lr=lr) for name, lr in lrs.items()}
    plan = dataclasses.replace(parts_plan(("wide",), "adamw"), rows=rows)
    model = nn.Module()
    for name in lrs:
        inner = model
        *path, last = name.split(".")
        for step in path:
            if not hasattr(inner, step):
                inner.add_module(step, nn.Module())
            inner = getattr(inner, step)
        inner.register_parameter(last, nn.Parameter(torch.zeros(12, 20)))
    read = read_titan(_config(plan), model)
    assert {name: options["lr"] for name, (_, options) in read.items()} == lrs


def test_patterns_leave_out_what_the_plan_does_not_train() -> None:
    row = parts_plan(("wide",), "adamw").rows["wide"]
    rows = {name: dataclasses.replace(row, name=name) for name in ("h.0.w", "h.1.w", "h.2.w")}
    rows["h.0.w"] = dataclasses.replace(rows["h.0.w"], role="frozen")
    made = dataclasses.replace(parts_plan(("wide",), "adamw"), rows=rows)
    (group,) = _config(made).param_groups
    assert [bool(re.search(group.pattern, name)) for name in rows] == [False, True, True]
    assert any("h.*.w: not trained by the plan" in note for note in made.export("torchtitan").notes)


def test_names_with_quotes_are_matched() -> None:
    with modules(torchtitan__components__optimizer=TITAN):
        text = parts_plan(("wide",), "adamw").export("torchtitan", names={"wide": 'a"b'}).text
        (group,) = run(text).optimizer_config().param_groups
    assert re.search(group.pattern, 'a"b')


@pytest.mark.parametrize(
    "rule, adjust",
    [
        ("muon-original", "original"),
        ("muon-kimi", "match_rms_adamw"),
        ("muon-spectral", "spectral_unclamped"),
    ],
)
def test_muon_keeps_its_factor_where_all_matrices_have_one_rate(rule: str, adjust: str) -> None:
    plan = parts_plan(("wide", "tall", "experts"), rule)
    config = _config(plan, dist_muon={"bucket_configs": (), "compute_sharding_by_fqn": {}})
    ((kind, options),) = {repr(one): one for one in read_titan(config, parts(plan)).values()}.values()
    assert (kind, options["adjust_lr_fn"], options["lr"]) == ("DistMuon", adjust, 0.02)
    assert (options["fused"], options["foreach"]) == (False, False)  # which DistMuon refuses
    assert config.optimizer_factory_kwargs_by_name["DistMuon"]["bucket_configs"] == ()


def test_matrices_with_rates_of_their_own_are_refused_with_both() -> None:
    with pytest.raises(
        UseError, match=r"wide needs lr 0\.02, decay 0\.3, tall lr 0\.011547, decay 0\.519615"
    ):
        parts_plan(("wide", "tall")).export("torchtitan")


def test_kernels_are_refused_by_name() -> None:
    with pytest.raises(UseError, match=r"torchtitan cannot train kernel \(12, 4, 3, 3\) \(matrices 12×36\)"):
        parts_plan(("wide", "kernel")).export("torchtitan")


def test_blocks_of_rows_are_said() -> None:
    notes = parts_plan(("equal",), "muon-original").export("torchtitan").notes
    assert any("equal: the plan orthogonalises 10×10 + 10×10 + 10×10 apart" in note for note in notes)


def test_one_eps_is_said() -> None:
    plan = parts_plan(("wide", "experts"), "muon-kimi")
    rows = {**plan.rows, "wide": dataclasses.replace(plan.rows["wide"], eps=1e-5)}
    notes = dataclasses.replace(plan, rows=rows).export("torchtitan").notes
    assert any("takes one eps, set to 1e-07, where the plan has" in note for note in notes)


def test_torchtitans_container_takes_the_plans_steps() -> None:
    reason = "torchtitan is not installed: its schema is checked above"
    pytest.importorskip("torchtitan.components.optimizer", reason=reason)
    plan = gpt_plan()
    config = run(plan.export("torchtitan").text).optimizer_config(implementation="for-loop")
    ours, theirs = plan.build(seed=0), plan.build(seed=0)
    container = config.build(model_parts=[theirs])
    differ = apart(trained_gpt(theirs, container), trained_gpt(ours, plan.optimizer(ours)))
    assert max(differ.values()) < 1e-5
