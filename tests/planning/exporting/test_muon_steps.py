"""Learning rates for other Muons: the planned step in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.planning.exporting.made import LAYOUTS, parts_plan

from theodolite.planning.exporting.muon_steps import (
    Seen,
    planned_matrices,
    split_sizes,
    step_for,
)

RULES = {
    "muon": lambda fan_in, fan_out: 1.0,
    "muon-original": lambda fan_in, fan_out: math.sqrt(max(1, fan_out / fan_in)),
    "muon-kimi": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_in, fan_out)),
    "muon-spectral": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
}
MATRICES = {  # (count, in, out) of each block, by hand
    "wide": [(1, 20, 12)],
    "tall": [(1, 10, 30)],
    "transposed": [(1, 10, 30)],
    "fused": [(1, 10, 14), (1, 10, 8), (1, 10, 8)],
    "equal": [(1, 10, 10)] * 3,
    "interleaved": [(1, 10, 12)] * 2,
    "experts": [(3, 16, 8)],
    "experts_back": [(3, 8, 16)],
    "kernel": [(1, 36, 12)],
    "kernel_back": [(1, 36, 12)],
    "kernel_1d": [(1, 12, 12)],
    "kernel_last": [(1, 12, 10)],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_matrices_of_every_layout(name: str, rule: str) -> None:
    found = planned_matrices(parts_plan(rule=rule).rows[name])
    assert [(one.count, one.fan_in, one.fan_out) for one in found] == MATRICES[name]
    assert [one.factor for one in found] == pytest.approx(
        [RULES[rule](fan_in, fan_out) for _, fan_in, fan_out in MATRICES[name]]
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("factor", [0.3, 1.0, 7.0])
def test_a_factor_goes_out_of_the_learning_rate_and_into_the_decay(rule: str, factor: float) -> None:
    row = parts_plan(rule=rule).rows["tall"]
    step = step_for(row, [Seen(1, 10, 30, factor)])
    assert step.exact
    assert step.lr * factor == pytest.approx(row.lr * RULES[rule](10, 30))
    assert step.lr * step.weight_decay == pytest.approx(row.lr * row.weight_decay)


def test_the_transposed_matrix_has_the_same_step() -> None:
    assert step_for(parts_plan().rows["transposed"], [Seen(1, 30, 10, 1.0)]).exact


def test_the_factor_of_the_same_convention_changes_no_digit() -> None:
    row = parts_plan(rule="muon-original").rows["tall"]
    assert step_for(row, [Seen(1, 10, 30, math.sqrt(3))]) == (row.lr, row.weight_decay, True)


def test_blocks_that_are_seen_as_one_keep_the_size_of_the_step() -> None:
    # Three orthogonal 10×10 blocks have the norm √30; one 30×10 matrix, as seen, has √10 times its factor.
    row = parts_plan().rows["equal"]
    step = step_for(row, [Seen(1, 10, 30, 1.0)])
    assert not step.exact
    assert step.lr == pytest.approx(row.lr * math.sqrt(3))
    assert step.lr * step.weight_decay == pytest.approx(row.lr * row.weight_decay)


def test_jordans_factor_is_right_for_blocks_of_one_size() -> None:
    row = parts_plan().rows["equal"]
    assert step_for(row, [Seen(1, 10, 30, math.sqrt(3))]).lr == pytest.approx(row.lr)


def test_factors_whose_ratios_differ_between_blocks_are_not_exact() -> None:
    row = parts_plan(rule="muon-original").rows["fused"]  # √1.4, 1, 1
    blocks = [Seen(1, 10, 14, 1.0), Seen(1, 10, 8, 1.0), Seen(1, 10, 8, 1.0)]
    step = step_for(row, blocks)
    assert not step.exact
    assert step.lr == pytest.approx(row.lr * math.sqrt((10 * 1.4 + 8 + 8) / 26))


def test_a_stack_of_another_number_is_another_step() -> None:
    assert not step_for(parts_plan().rows["experts"], [Seen(2, 16, 8, 1.0)]).exact


@pytest.mark.parametrize(
    "name, sizes", [("fused", (14, 8, 8)), ("equal", (10, 10, 10)), ("interleaved", None), ("tall", None)]
)
def test_split_sizes_are_of_blocks_that_follow_each_other(name: str, sizes: tuple[int, ...] | None) -> None:
    assert split_sizes(parts_plan().rows[name]) == sizes


def test_blocks_in_another_order_have_no_split_sizes() -> None:
    row = parts_plan().rows["fused"]
    assert split_sizes(replace(row, rows=row.rows[::-1])) is None


def test_a_stack_that_is_seen_as_one_matrix_keeps_the_size_of_the_step() -> None:
    """Three orthogonal matrices 8×16 have a squared norm of 3·8, one of 24×16 has 16."""
    row = parts_plan(("experts",)).rows["experts"]
    step = step_for(row, [Seen(1, 16, 24)])
    assert (step.exact, step.lr) == (False, pytest.approx(row.lr * math.sqrt(24 / 16)))
