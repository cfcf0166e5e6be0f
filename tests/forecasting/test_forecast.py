"""Forecasts from ledgers whose law is known."""

import math

import numpy as np
import pytest
from scipy import optimize

import theodolite as th
from theodolite import Size, UseError
from theodolite.core.size import rounded
from theodolite.fleet.ledger import Ledger

from .worlds import (
    BATCH,
    BEST,
    STEPS,
    WIDTHS,
    known_ledger,
    off_best,
    outcome,
    parameters,
    planned,
    standard,
    surface,
    write,
)

TARGET = Size(128, 1, tokens=4 * STEPS[-1] * BATCH)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    return known_ledger(tmp_path_factory.mktemp("known") / "ledger", with_standard=True)


@pytest.fixture(scope="module")
def made(ledger):
    return th.forecast(ledger, TARGET, tflops=1e-3, draws=200)


def test_the_loss_of_the_known_law_lies_in_the_interval(made):
    truth = surface(parameters(128), TARGET.tokens)
    assert made.loss.low < truth < made.loss.high
    assert made.loss.value == pytest.approx(truth, rel=0.03)
    assert made.loss.high / made.loss.low < 1.3
    assert made.form == "chinchilla"
    assert made.parameters == parameters(128)


def test_the_rate_is_the_one_that_is_best_at_the_larger_sizes(made, ledger):
    assert made.lr == BEST
    assert {run.loss for run in made.runs} < {row["held_out"] for row in Ledger.read(ledger).rows()}
    assert len(made.runs) == 2 * len(WIDTHS) * len(STEPS)
    assert not any("better by" in note or "were too" in note for note in made.notes)


def test_at_another_rate_it_is_the_loss_at_that_rate(ledger):
    made = th.forecast(ledger, TARGET, lr=2**-7, draws=50)
    truth = surface(parameters(128), TARGET.tokens) * off_best(2**-7)
    assert made.loss.value == pytest.approx(truth, rel=0.03)
    assert any(f"2^-6 is better by {1 - 1 / 1.02:.0%}"[:18] in note for note in made.notes)


def test_it_costs_what_its_matrix_products_take(made):
    weights = 32 * 128 + 2 * 128 * 128 + 128 * 10  # inputs, a block of two, classes
    per_token = 6 * weights - 2 * 32 * 128  # no gradient of the inputs
    assert made.flop == per_token * TARGET.tokens
    assert made.hours == pytest.approx(made.flop / 1e9 / 3600)
    largest = 6 * (32 * 64 + 2 * 64 * 64 + 640) - 2 * 32 * 64
    assert made.extrapolation == pytest.approx(made.flop / (largest * STEPS[-1] * BATCH))


def test_the_best_split_of_the_flop_is_where_a_search_on_the_fitted_law_finds_it(made):
    c = {name: one.value for name, one in made.constants.items()}
    product = made.parameters * made.tokens

    def loss(log_n):
        n = math.exp(log_n)
        return c["E"] + c["A"] * n ** -c["alpha"] + c["B"] * (product / n) ** -c["beta"]

    best = optimize.minimize_scalar(loss, bounds=(3, 25), method="bounded", options={"xatol": 1e-9})
    (split,) = [one for one in made.alternatives if "split" in one.what]
    assert split.parameters.value == pytest.approx(math.exp(best.x), rel=1e-3)
    assert split.parameters.low < split.parameters.value < split.parameters.high
    assert split.parameters.value * split.tokens.value == pytest.approx(product)
    assert split.loss.value == pytest.approx(best.fun, rel=1e-6)
    assert split.loss.value <= made.loss.value
    assert f"best split of the FLOP: {rounded(round(split.parameters.value))} (" in str(made)


def test_standard_runs_are_forecast_at_the_rate_of_the_smallest_and_at_their_own(made):
    standard = [one for one in made.alternatives if one.what.startswith("standard")]
    notes = [note for note in made.notes if note.startswith("standard")]
    assert len(standard) + len(notes) == 2
    own = next(one for one in standard if "each size" in one.what)
    assert own.loss.value > made.loss.value + 0.1  # 0.2 and a smaller network
    assert own.loss.low > made.loss.high


def test_without_standard_runs_they_are_left_out_and_it_is_said(tmp_path):
    path = known_ledger(tmp_path / "alone", rates=(BEST,), seeds=1)
    made = th.forecast(path, TARGET, draws=50)
    assert not any(one.what.startswith("standard") for one in made.alternatives)
    assert any("--parameterization plan,standard" in note for note in made.notes)


def test_a_standard_loss_that_rises_with_size_is_no_law(tmp_path):
    made_of = []
    for width in WIDTHS:
        for steps in STEPS:
            loss = surface(parameters(width), steps * BATCH)
            made_of += [
                outcome(planned(width, steps), loss),
                outcome(standard(width, steps), loss * width**0.4),
            ]
    made = th.forecast(write(tmp_path / "rising", made_of), TARGET, draws=50)
    (note,) = [note for note in made.notes if note.startswith("standard, 2^-6, best at the smallest")]
    assert "its loss rises with size" in note
    assert not any(one.what.startswith("standard") for one in made.alternatives)


def test_a_standard_rate_that_diverges_at_larger_sizes_has_no_law(tmp_path):
    made_of = []
    for width in WIDTHS:
        for steps in STEPS:
            loss, ended = surface(parameters(width), steps * BATCH), "diverged" if width == 64 else "finished"
            made_of += [outcome(planned(width, steps), loss)]
            made_of += [outcome(standard(width, steps), loss, ended=ended)]
    made = th.forecast(write(tmp_path / "diverging", made_of), TARGET, draws=50)
    (note,) = [note for note in made.notes if "best at the smallest" in note]
    assert note.endswith(f"{len(STEPS)} runs diverged, so there is no law of it.")
    alone = [outcome(planned(width, steps), 2.0 + width**-0.5) for width in WIDTHS for steps in STEPS]
    lost = [outcome(standard(width), 2.0, ended="diverged") for width in WIDTHS]
    made = th.forecast(write(tmp_path / "lost", [*alone, *lost]), TARGET, draws=50)
    assert any("The standard parameterization is left out" in note for note in made.notes)


def test_the_interval_is_that_of_the_law_widened_by_what_larger_runs_needed(made):
    assert made.coverage.num_forecasts >= 20
    assert made.coverage.reach >= made.extrapolation / 4
    assert made.loss == made.raw.widened(made.coverage.factor)
    text = " ".join(str(made).split())
    assert f"{made.coverage.raw:.0%} of {made.coverage.num_forecasts} held-out forecasts" in text
    assert f"{made.coverage.calibrated:.0%} do" in text


def bent(num, tokens):
    return 1.5 + math.hypot(20 * num**-0.4, 30 * tokens**-0.35)


def test_a_law_of_another_form_gets_an_interval_that_still_holds_the_truth(tmp_path):
    path = known_ledger(tmp_path / "bent", law=bent, rates=(BEST,), noise=0.0005)
    made = th.forecast(path, TARGET, draws=100)
    assert made.coverage.factor > 1.3
    assert made.loss.low < bent(parameters(128), TARGET.tokens) < made.loss.high


def test_held_out_forecasts_that_are_all_too_high_are_said(tmp_path):
    def faster(num, tokens):
        return 3 - 0.02 * math.log10(num * tokens / 1e6) ** 2

    path = known_ledger(tmp_path / "faster", law=faster, rates=(BEST,), noise=0.0005)
    made = th.forecast(path, TARGET, draws=50)
    assert any("of the held-out forecasts were too high" in note for note in made.notes)
    assert made.loss.value > faster(parameters(128), TARGET.tokens)


@pytest.mark.parametrize(
    "shape, target, form",
    [
        ({"steps": (400,)}, Size(128, 1), "parameters"),
        ({"widths": (16,), "steps": (100, 400, 1600, 6400)}, Size(16, 1, tokens=10**7), "tokens"),
    ],
)
def test_where_one_quantity_varies_the_law_is_in_that_one(tmp_path, shape, target, form):
    path = known_ledger(tmp_path / "one", rates=(BEST,), noise=0.0002, **shape)
    made = th.forecast(path, target, draws=100)
    tokens = target.tokens or 400 * BATCH
    truth = surface(parameters(target.width), tokens)
    assert (made.form, made.tokens) == (form, tokens)
    assert made.loss.value == pytest.approx(truth, rel=0.02)
    assert f"L = E + A·{form}^−α" in str(made)
    assert any("best split of the budget is not known" in note for note in made.notes)


def test_where_both_grow_in_step_the_law_is_in_flop(tmp_path):
    pairs = [(8, 100), (16, 240), (32, 700), (64, 2300), (96, 4900)]
    made_of = [
        outcome(planned(width, steps), surface(parameters(width), steps * BATCH)) for width, steps in pairs
    ]
    path = write(tmp_path / "step", made_of)
    usual = round(20 * 100 * BATCH * parameters(128) / parameters(8) / 20)
    made = th.forecast(path, Size(128, 1, tokens=usual), draws=50)
    assert made.form == "compute"
    assert made.loss.value == pytest.approx(surface(parameters(128), usual), rel=0.02)


def test_seeds_are_replicates_and_too_few_forecasts_are_said(tmp_path):
    path = known_ledger(tmp_path / "few", steps=(400,), rates=(BEST,), seeds=1)
    made = th.forecast(path, Size(128, 1), draws=50)
    assert any("The coverage of the interval is not checked" in note for note in made.notes)
    assert "not checked" in str(made)


def test_runs_that_diverged_are_counted_and_left_out(tmp_path):
    kept = known_ledger(tmp_path / "kept", rates=(BEST,), seeds=1)
    rows = [planned(width, steps, seed=0) for width in WIDTHS for steps in STEPS]
    losses = {row["identity"]: row["held_out"] for row in Ledger.read(kept).rows()}
    made_of = [outcome(run, losses[run.identity]) for run in rows]
    made_of.append(outcome(planned(32, 100, seed=7), 0.0, ended="diverged"))
    made = th.forecast(write(tmp_path / "with", made_of), TARGET, draws=50)
    assert any(note.startswith("1 run at this learning rate diverged") for note in made.notes)
    assert len(made.runs) == len(rows)


def test_an_open_ledger_and_a_workload_that_is_given_do_as_well(ledger, made):
    mine = th.workload("mlp-mixture")
    with Ledger.read(ledger) as opened:
        again = th.forecast(opened, TARGET, workload=mine, draws=200, tflops=1e-3)
    assert again.loss == made.loss
    assert again.flop == made.flop


def test_another_seed_of_the_bootstrap_moves_the_interval_and_not_the_forecast(ledger, made):
    other = th.forecast(ledger, TARGET, draws=200, seed=1)
    assert other.loss.value == made.loss.value
    assert other.raw != made.raw


def test_progress_is_told_and_ends_at_one(tmp_path):
    path, told = known_ledger(tmp_path / "told", rates=(BEST,), seeds=1), []
    th.forecast(path, TARGET, draws=20, progress=lambda title, done: told.append(done))
    assert told == sorted(told)
    assert told[-1] == 1


def test_it_works_on_a_ledger_of_a_sweep(tmp_path):
    th.sweep(
        "mlp-mixture",
        widths=[4, 8, 16],
        depths=[1],
        lr=[2**-6, 2**-5],
        seeds=1,
        parameterization="plan",
        axes={"steps": [2, 4, 8]},
        warmup=0,
        held_out=1,
        out=tmp_path / "sweep",
        engine="serial",
    )
    made = th.forecast(tmp_path / "sweep", Size(32, 1, tokens=16 * 128), draws=20)
    assert len(made.runs) == 9
    assert made.form == "chinchilla"
    assert np.isfinite([made.loss.low, made.loss.value, made.loss.high]).all()
    assert made.settings["workload"] == "mlp-mixture"


@pytest.mark.parametrize(
    "asked, words",
    [
        (lambda path: th.forecast(path, 128), "target is 128: give a Size"),
        (
            lambda path: th.forecast(path, Size(128, 1)),
            "the target has no tokens, and the runs have seen 12800",
        ),
        (lambda path: th.forecast(path, TARGET, lr=0.5), "lr is 0.5, at which no run"),
        (lambda path: th.forecast(path, TARGET, optimizer="sgd"), "optimizer is 'sgd'.* one of adamw"),
        (
            lambda path: th.forecast(path, TARGET, where={"seed": 9}),
            "no finished runs of the parameterization",
        ),
        (lambda path: th.forecast(path, TARGET, where={"width": 8, "steps": 100}), "cannot tell a law"),
        (lambda path: th.forecast(path, TARGET, tflops=-1), "tflops is -1"),
        (lambda path: th.forecast(path, TARGET, draws=1), "draws is 1"),
        (lambda path: th.forecast(path / "nowhere", TARGET), "nowhere"),
    ],
)
def test_what_cannot_be_forecast_is_named(ledger, asked, words):
    with pytest.raises(UseError, match=words):
        asked(ledger)
