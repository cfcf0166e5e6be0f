"""What differs between two plans, and by which factor."""

from dataclasses import replace

import pytest

from theodolite.planning import PlanDiff

from .zoo import BASE, TARGET, zoo_plan

pytestmark = pytest.mark.usefixtures("one_dissection")


def lines_of(diff):
    return [line for line in str(diff).splitlines() if line]


def test_it_is_read_back(tmp_path):
    diff = zoo_plan().diff(zoo_plan(lr=2**-5))
    assert PlanDiff.load(diff.save(tmp_path / "diff.json")) == diff


def test_equal_plans_are_the_same():
    assert str(zoo_plan().diff(zoo_plan())) == "the plans are the same"


def test_twice_the_learning_rate_is_a_factor_of_two_everywhere():
    lines = lines_of(zoo_plan().diff(zoo_plan(lr=2**-5)))
    assert lines[0] == "base lr: 0.0156 → 0.0312 (× 2)"
    told = [line for line in lines[1:] if not line.startswith("    ")]
    assert told
    assert all(line.startswith("lr ") and line.endswith("(× 2)") and "," not in line for line in told)
    patterns = {line.strip() for line in lines[1:] if line.startswith("    ")}
    assert {"first.weight", "blocks.*.up.weight", "last.bias"} <= patterns
    assert len(patterns) == 20


def test_only_what_differs_is_named():
    plan = zoo_plan()
    changed = {
        name: replace(plan[name], lr=plan[name].lr / 4) for name in ("last.weight", "blocks.5.gate.bias")
    }
    lines = lines_of(plan.diff(replace(plan, rows={**plan.rows, **changed})))
    assert lines == [
        "lr 0.0156 → 0.00391 (× 0.25)",
        "    blocks.5.gate.bias",
        "lr 0.00195 → 0.000488 (× 0.25)",
        "    last.weight",
    ]


def test_another_depth_says_which_blocks_are_there_once():
    text = "\n".join(lines_of(zoo_plan().diff(zoo_plan(size=replace(TARGET, depth=4)))))
    assert text.splitlines()[0] == "size: 128 × 6 → 128 × 4"
    _, _, alone = text.partition("only in the first\n")
    assert "    blocks.*.up.weight (4–5)" in alone.splitlines()
    assert "only in the second" not in text
    assert "only in the second" in zoo_plan(size=replace(TARGET, depth=4)).diff(zoo_plan()).tensors


def test_another_width_another_rule_and_zeros():
    text = "\n".join(lines_of(zoo_plan().diff(zoo_plan(size=replace(TARGET, width=256)))))
    assert "\ninit uniform 0.018 → uniform 0.00902 (× 0.5), lr 0.00195 → 0.000977 (× 0.5), decay" in text
    assert "shape" not in text
    text = "\n".join(lines_of(zoo_plan().diff(zoo_plan(optimizer="muon"))))
    assert text.startswith("optimizer: adamw → muon\n")
    assert "rule adamw → muon" in text
    text = "\n".join(lines_of(zoo_plan(options={"betas": (0.9, 0.95)}).diff(zoo_plan(init={"last.*": 0}))))
    assert "options: {'betas': (0.9, 0.95)} → {}" in text
    assert "init uniform 0.018 → 0\n" in text


def test_differences_too_small_for_three_digits_are_seen():
    plan = zoo_plan(size=BASE)
    row = replace(plan["last.bias"], lr=0.015625000001)
    text = "\n".join(lines_of(plan.diff(replace(plan, rows={**plan.rows, "last.bias": row}))))
    assert text == "lr 0.015625 → 0.015625000001\n    last.bias"


def test_what_no_optimizer_reads_makes_no_difference():
    plan = zoo_plan(optimizer="sgd")
    row = replace(plan["last.bias"], eps=1.0, extent=3.0)
    assert str(plan.diff(replace(plan, rows={**plan.rows, "last.bias": row}))) == "the plans are the same"


def test_another_network_of_the_same_size_shows_its_shapes():
    plan = zoo_plan(size=BASE)
    row = replace(plan["last.weight"], shape=(5, 16), fan_out=5)
    text = "\n".join(lines_of(plan.diff(replace(plan, rows={**plan.rows, "last.weight": row}))))
    assert text == "shape 3×16 → 5×16\n    last.weight"
