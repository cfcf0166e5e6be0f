"""Exports for dion, run by its own Muon where it is installed, else by its schema."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.planning.exporting.made import (
    LAYOUTS,
    apart,
    gpt_plan,
    parts,
    parts_plan,
    run,
    settings,
    trained_gpt,
    trained_parts,
)
from tests.planning.exporting.readers import DionMuon, modules, orthogonal

import theodolite as th
from theodolite.core.errors import UseError

pytestmark = pytest.mark.usefixtures("one_dissection")

MUONS = ("muon", "muon-original", "muon-kimi", "muon-spectral")
SPLIT = ("fused", "equal")
REFUSED = ("kernel_back", "kernel_last")
INEXACT = {("interleaved", rule) for rule in MUONS} | {("fused", "muon-original")}
"""Blocks that are not contiguous, and scales of blocks that dion has no factor for."""


def _file(plan: th.Plan) -> Any:
    with modules(dion={"Muon": DionMuon}):
        return run(plan.export("dion").text)


@pytest.mark.parametrize("optimizer", ["adamw", *MUONS])
def test_the_plans_steps_are_taken(optimizer: str) -> None:
    plan = gpt_plan(optimizer, tied=True)
    ours, theirs = plan.build(seed=0), plan.build(seed=0)
    made = _file(plan).make_optimizer(theirs)
    assert settings([made], theirs).keys() == plan.rows.keys()
    differ = apart(trained_gpt(theirs, made), trained_gpt(ours, plan.optimizer(ours)))
    assert max(differ.values()) < 1e-3


@pytest.mark.parametrize("rule", MUONS)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in REFUSED])
def test_every_layout_takes_the_plans_steps_or_steps_of_their_size(name: str, rule: str) -> None:
    plan = parts_plan((name,), rule)
    ours, theirs = parts(plan), parts(plan)
    made = _file(plan).make_optimizer(theirs)
    one, two = trained_parts(theirs, made), trained_parts(ours, plan.optimizer(ours))
    said = any("the size of the step the same" in note for note in plan.export("dion").notes)
    assert said == ((name, rule) in INEXACT)
    if said:  # Newton–Schulz leaves singular values between 0.7 and 1.2, so that sizes agree roughly
        assert float(one[name].norm() / two[name].norm()) == pytest.approx(1, rel=0.1)
    else:
        assert apart(one, two)[name] < 1e-4


@pytest.mark.parametrize(
    "name, option", [("fused", {"split_sizes": (14, 8, 8)}), ("kernel", {"flatten": True}), ("experts", {})]
)
def test_layouts_are_in_the_words_of_dion(name: str, option: dict[str, Any]) -> None:
    (group,) = _file(parts_plan((name,), "muon-kimi")).param_groups(parts(parts_plan((name,))))
    assert {key: group[key] for key in ("split_sizes", "flatten", "num_heads") if key in group} == option
    assert (group["algorithm"], group["adjust_lr"], group["lr"]) == ("muon", "rms_norm", 0.02)


@pytest.mark.parametrize("rule", MUONS)
def test_kernels_of_one_shape_stay_matrices_of_their_own(rule: str) -> None:
    row = parts_plan(("kernel",), rule).rows["kernel"]
    rows = {name: dataclasses.replace(row, name=name) for name in ("one", "two", "three")}
    plan = dataclasses.replace(parts_plan(("kernel",), rule), rows=rows)
    ours, theirs = parts(plan), parts(plan)
    made = _file(plan).make_optimizer(theirs)
    assert max(apart(trained_parts(theirs, made), trained_parts(ours, plan.optimizer(ours))).values()) < 1e-4
    assert any("gives each kernel a group of its own" in note for note in plan.export("dion").notes)


def test_options_of_muon_are_handed_on() -> None:
    plan = parts_plan(("wide",), options={"momentum": 0.8, "nesterov": False})
    ours, theirs = parts(plan), parts(plan)
    made = _file(plan).make_optimizer(theirs)
    assert apart(trained_parts(theirs, made), trained_parts(ours, plan.optimizer(ours)))["wide"] < 1e-4


def test_a_factor_that_dion_does_not_have_is_said_of_tall_matrices_alone() -> None:
    (said,) = [
        note
        for note in parts_plan(("wide", "tall"), "muon-original").export("dion").notes
        if "dion has no factor √max(1, out/in)" in note
    ]
    assert said.endswith("decays of tall.")


def test_the_example_lets_dion_compile_for_many_shapes() -> None:
    raised = "    torch._dynamo.config.recompile_limit = 100\n    optimizer = make_optimizer("
    assert raised in parts_plan(("wide",)).export("dion").text
    assert any("dion compiles its iteration" in note for note in parts_plan(("wide",)).export("dion").notes)
    assert "recompile_limit" not in gpt_plan().export("dion").text  # AdamW's step compiles for all shapes


def test_eps_is_of_summed_gradients() -> None:
    (group,) = _file(parts_plan(("wide",), options={"momentum": 0.9})).param_groups(
        parts(parts_plan(("wide",)))
    )
    assert (group["mu"], group["epsilon"]) == (0.9, pytest.approx(1e-6))


def test_a_kernel_with_inputs_first_is_refused_by_name() -> None:
    with pytest.raises(UseError, match=r"dion cannot train kernel_back \(4, 12, 3, 3\) \(matrices 12×36\)"):
        parts_plan(("wide", "kernel_back")).export("dion")
    with pytest.raises(UseError, match=r"dion cannot train kernel_last \(3, 4, 10\) \(matrices 10×12\)"):
        parts_plan(("wide", "kernel_last")).export("dion")


def test_lion_is_one_of_its_algorithms() -> None:
    (group, *_) = _file(gpt_plan("lion")).param_groups(gpt_plan("lion").build(seed=0))
    assert (group["algorithm"], group["beta1"], group["beta2"]) == ("lion", 0.9, 0.99)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in REFUSED])
@pytest.mark.parametrize("rule", ["muon", "muon-kimi", "muon-spectral"])
def test_dions_own_muon_takes_the_plans_steps(name: str, rule: str) -> None:
    pytest.importorskip("dion", reason="dion is not installed: its schema is checked above")
    torch._dynamo.reset()  # it compiles for each shape, and torch allows few of them
    row = parts_plan((name,), rule).rows[name]
    rows = {one: dataclasses.replace(row, name=one) for one in ("first", "second")}
    plan = dataclasses.replace(parts_plan((name,), rule), rows=rows)
    ours, theirs = parts(plan), parts(plan)
    made = run(plan.export("dion").text).make_optimizer(theirs, newton_schulz_func=orthogonal)
    one, two = trained_parts(theirs, made), trained_parts(ours, plan.optimizer(ours))
    if (name, rule) in INEXACT:
        assert float(one["first"].norm() / two["first"].norm()) == pytest.approx(1, rel=0.1)
    else:
        assert max(apart(one, two).values()) < 0.02  # dion sends momenta in bfloat16
