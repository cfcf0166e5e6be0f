"""Laws and their intervals, on runs whose law is known."""

import math

import numpy as np
import pytest

from theodolite import UseError
from theodolite.forecasting.law import (
    LossInterval,
    coverage_of,
    form_for,
    law_of,
    needed_factor,
    require_form,
    require_within,
)

from .worlds import sized_runs, surface

TARGET = 4e6, 4e8


def bent(num, tokens):
    """Not of Chinchilla's form: the two terms act together."""
    return 1.5 + math.hypot(20 * num**-0.4, 30 * tokens**-0.35)


def test_a_law_without_noise_forecasts_the_truth_in_a_narrow_interval():
    runs, _ = sized_runs(surface, noise=0.0)
    told = law_of(runs, "chinchilla", draws=20).forecast(*TARGET, 6 * TARGET[0] * TARGET[1])
    assert told.value == pytest.approx(surface(*TARGET), rel=1e-5)
    assert told.holds(surface(*TARGET) * (1 + 1e-7))
    assert told.high / told.low < 1.001


def coverage_in_worlds(law, worlds, **shape):
    raw = calibrated = 0
    factors = []
    for seed in range(worlds):
        runs, generator = sized_runs(law, seed=seed, **shape)
        actual = law(*TARGET) * np.exp(shape["noise"] * generator.standard_normal())
        told = law_of(runs, "chinchilla", draws=100, seed=seed).forecast(*TARGET, 6 * math.prod(TARGET))
        factors.append(coverage_of(runs, "chinchilla", seed=seed).factor)
        raw += told.holds(actual)
        calibrated += told.widened(factors[-1]).holds(actual)
    return raw / worlds, calibrated / worlds, float(np.median(factors))


def test_the_interval_of_a_single_run_holds_it_about_as_often_as_it_says():
    raw, calibrated, factor = coverage_in_worlds(surface, 12, noise=0.004)
    assert raw >= 0.8  # 95 % of 12 is 11
    assert calibrated >= 0.9
    assert factor < 1.5  # by being right, not by being endless


def test_a_law_of_another_form_is_noticed_and_its_interval_widened():
    _, calibrated, factor = coverage_in_worlds(bent, 4, noise=0.001, seeds=2)
    assert factor > 1.5
    assert calibrated == 1


def test_the_spread_of_runs_around_the_law_is_part_of_the_interval():
    runs, _ = sized_runs(surface, num=5, long=5, seeds=4, noise=0.02)
    law = law_of(runs, "chinchilla", draws=100)
    inside = runs[len(runs) // 2]
    told = law.forecast(inside.parameters, inside.tokens, inside.flop)
    assert math.log(told.high / told.low) == pytest.approx(2 * 1.96 * 0.02, rel=0.3)


def test_held_out_runs_are_larger_than_all_that_their_law_has_seen():
    runs, _ = sized_runs(surface, noise=0.003)
    found = coverage_of(runs, "chinchilla")
    assert found.num_forecasts >= 20
    assert found.num_cells < 16
    assert found.enough
    assert found.reach > 10
    largest = max(run.flop for run in runs)
    shifted = [
        run if run.flop < largest / 2 else type(run)(**{**vars(run), "loss": 1.3 * run.loss}) for run in runs
    ]
    missed = coverage_of(shifted, "chinchilla")
    assert missed.raw < found.raw
    assert missed.factor > 5
    assert missed.bias < -0.02


def test_a_law_whose_forecasts_are_all_too_high_is_noticed():
    def faster(num, tokens):
        """Ever faster, as at the start of training."""
        return 3 - 0.01 * math.log10(num * tokens / 1e9) ** 2

    runs, _ = sized_runs(faster, noise=0.0005)
    found = coverage_of(runs, "chinchilla")
    assert found.one_sided > 0.95
    assert found.bias > 0.005
    assert found.raw < 0.5


def test_too_few_sizes_for_a_held_out_forecast_are_none():
    runs, _ = sized_runs(surface, num=3, long=3, seeds=1)
    found = coverage_of(runs[:7], "chinchilla")
    assert (found.num_forecasts, found.factor) == (0, 1.0)
    assert not found.enough


@pytest.mark.parametrize(
    "distances, factor",
    [
        (np.linspace(0.05, 0.95, 40), 1.0),  # never narrower
        (np.arange(1.0, 41.0), 39.0),  # the ⌈0.95 · 41⌉-th
        (np.array([0.5, 3.0, 1.0]), 3.0),  # too few: all of them
    ],
)
def test_the_factor_is_the_quantile_that_would_have_covered(distances, factor):
    assert needed_factor(distances) == factor


def test_an_interval_is_widened_in_logarithms_and_knows_how_far_off_a_loss_is():
    one = LossInterval(2.0, 1.0, 8.0)
    assert one.widened(0.5) == LossInterval(2.0, pytest.approx(math.sqrt(2)), pytest.approx(4.0))
    assert one.distance(4.0) == pytest.approx(0.5)
    assert one.distance(0.5) == pytest.approx(2.0)
    assert one.widened(one.distance(16.0)).high == pytest.approx(16.0)


def in_line(num, tokens):
    runs, _ = sized_runs(surface, num=6, long=6, seeds=1)
    by = {(run.width, int(run.identity[2])): run for run in runs}
    return [by[i, j] for i, j in zip(num, tokens, strict=True)]


@pytest.mark.parametrize(
    "num, tokens, form",
    [
        ([0, 1, 2, 3], [2, 2, 2, 2], "parameters"),
        ([1, 1, 1, 1], [0, 2, 3, 5], "tokens"),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], "compute"),
        ([0, 0, 1, 1, 2, 2, 2], [0, 1, 0, 2, 0, 1, 2], "chinchilla"),
        ([0, 1, 2], [2, 2, 2], None),
        ([0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1], None),
    ],
)
def test_the_form_is_the_one_that_the_runs_can_tell(num, tokens, form):
    runs = in_line(num, tokens)
    assert form_for(runs) == form
    if form is None:
        with pytest.raises(
            UseError, match=r"cannot tell a law.*theodolite sweep mine --widths .* --axis steps"
        ):
            require_form(runs, "mine")


def test_a_target_that_differs_in_what_no_runs_differ_in_is_refused():
    alone = law_of(in_line([0, 1, 2, 3], [2, 2, 2, 2]), "parameters", draws=20)
    seen = alone.runs[0].tokens
    require_within(alone, 10**7, seen, "mine")
    with pytest.raises(UseError, match=r"every run has seen .* tokens.*--axis steps"):
        require_within(alone, 10**7, 2 * seen, "mine")
    longer = law_of(in_line([1, 1, 1, 1], [0, 2, 3, 5]), "tokens", draws=20)
    with pytest.raises(UseError, match=r"every run has .* parameters.*--widths"):
        require_within(longer, 2 * longer.runs[0].parameters, 10**8, "mine")
    step = law_of(in_line([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), "compute", draws=20)
    require_within(step, 10**7, 10**9, "mine")
    with pytest.raises(UseError, match=r"tokens grow with the parameters.*give about tokens=1e\+09"):
        require_within(step, 10**7, 10**8, "mine")
