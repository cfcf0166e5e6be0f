"""Which runs a law goes through, and at which base learning rate."""

import math

import pytest

from theodolite import UseError
from theodolite.forecasting.runs import (
    at_own_best,
    at_rate,
    best_rate,
    better_rate_at_largest,
    checked_rate,
    larger_half,
    of_smallest,
    recipe,
    rises,
    sized,
    tokens_of,
)


def row(width=8, steps=100, lr=0.1, loss=2.0, seed=0, **more):
    usual = {
        "identity": f"{width}-{steps}-{lr}-{seed}",
        "workload": "mine",
        "width": width,
        "depth": 1,
        "optimizer": "adamw",
        "parameterization": "plan",
        "lr": lr,
        "seed": seed,
        "status": "finished" if math.isfinite(loss) else "diverged",
        "held_out": loss if math.isfinite(loss) else None,
        "steps": steps,
        "weight_decay": 0.0,
        "base_width": 8,
        "warmup": 0,
        "parameters": width**2,
        "tokens": 10 * steps,
    }
    return usual | more


def test_failed_runs_and_those_of_other_parameterizations_and_optimizers_are_left_out():
    rows = [row(), row(parameterization="standard"), row(status="failed"), row(optimizer="sgd")]
    assert recipe(rows, "plan", optimizer="adamw", where={}) == [rows[0]]
    assert recipe(rows, "own", optimizer=None, where={}) == []


@pytest.mark.parametrize(
    "other", [{"weight_decay": 0.1}, {"base_width": 16}, {"options.betas": (0.9, 0.99)}, {"optimizer": "sgd"}]
)
def test_runs_of_two_recipes_are_refused_until_one_is_chosen(other):
    ((name, value),) = other.items()
    rows = [row(**{name: "first"}), row(**other, seed=1)]
    with pytest.raises(UseError, match=rf"differ in {name}: first and .*--where {name}=first"):
        recipe(rows, "plan", optimizer=None, where={})
    assert recipe(rows, "plan", optimizer=None, where={name: value}) == [rows[1]]
    assert recipe(rows, "plan", optimizer=None, where={name: str(value)}) == [rows[1]]


def test_steps_warmup_and_batch_go_with_the_size():
    rows = [row(), row(steps=200, warmup=20, batch=64, width=16)]
    assert recipe(rows, "plan", optimizer=None, where={}) == rows


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(UseError, match=r"no column 'weight_decy'\. Did you mean 'weight_decay'"):
        recipe([row()], "plan", optimizer=None, where={"weight_decy": 1})


def test_the_rate_is_the_best_on_average_over_these_sizes_and_none_that_diverges():
    losses = {
        (8, 0.1): 2.0,
        (8, 0.2): 1.5,
        (8, 0.4): 1.0,
        (16, 0.1): 1.9,
        (16, 0.2): 1.3,
        (16, 0.4): 1.5,
        (32, 0.1): 1.8,
        (32, 0.2): 1.2,
        (32, 0.4): math.inf,
    }
    rows = [
        row(width, lr=lr, loss=loss, seed=seed) for (width, lr), loss in losses.items() for seed in (0, 1)
    ]
    assert larger_half(rows) == [((16, 1), 100), ((32, 1), 100)]
    assert best_rate(rows, larger_half(rows)) == 0.2
    assert of_smallest(rows) == [((8, 1), 100)]
    assert best_rate(rows, of_smallest(rows)) == 0.4
    assert better_rate_at_largest(rows, 0.2) is None
    assert better_rate_at_largest(rows, 0.1) == (0.2, pytest.approx(1 / 3))
    assert {one["lr"] for one in at_own_best(rows) if one["width"] == 16} == {0.2}


def test_a_rate_that_was_run_at_few_sizes_is_not_chosen():
    rows = [row(width, lr=0.1, loss=2.0) for width in (8, 16, 32)] + [row(32, lr=0.2, loss=1.0)]
    assert best_rate(rows, larger_half(rows)) == 0.1


def test_a_rate_that_was_not_run_is_refused_and_those_that_were_are_named():
    rows = [row(lr=2**-7), row(lr=2**-6)]
    assert checked_rate(rows, 2**-7 * (1 + 1e-9)) == 2**-7
    with pytest.raises(UseError, match=r"lr is 0\.5.*0\.007812, 0\.01562"):
        checked_rate(rows, 0.5)


def test_runs_carry_their_parameters_targets_and_flop_and_are_ordered_by_these():
    rows = [row(16, steps=300, loss=1.5, **{"reading.tokens": 2990, "tokens": 3000}), row(8, loss=1.7)]
    small, large = sized(rows, {(8, 1): 100.0, (16, 1): 400.0})
    assert (small.parameters, small.tokens, small.flop, small.loss) == (64, 1000, 1e5, 1.7)
    assert (large.tokens, large.flop) == (2990, 400.0 * 2990)  # those seen, not those planned
    assert tokens_of(rows[1]) == 1000
    with pytest.raises(UseError, match="no readings of its parameters and tokens"):
        sized([row(tokens=0)], {(8, 1): 1.0})


def test_diverged_runs_are_of_no_law():
    rows = [row(lr=0.1), row(lr=0.1, loss=math.inf, seed=1), row(lr=0.2)]
    assert at_rate(rows, 0.1) == [rows[0]]


def test_a_loss_that_rises_with_size_is_said():
    flop = {(8, 1): 1.0, (16, 1): 2.0, (32, 1): 3.0}
    falling = sized([row(8, loss=3.0), row(16, loss=2.0), row(32, loss=1.5)], flop)
    rising = sized([row(8, loss=3.0), row(16, loss=2.0), row(32, loss=2.5)], flop)
    assert rises(falling) is None
    assert "from 2 at 256 parameters to 2.5 at 1,024 parameters" in rises(rising)
