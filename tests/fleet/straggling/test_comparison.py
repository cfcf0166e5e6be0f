"""`stragglers`: times in closed form, parameters of the first half, intervals, and where the best changes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from theodolite import UseError
from theodolite.fleet import StragglerReport, stragglers

SCHEMES = ["wait for all", "leave out", "backup workers", "GC", "SR-SGC", "M-SGC"]


def rotating(workers: int, rounds: int, slow: float) -> np.ndarray:
    """In each round another worker is late."""
    times = np.ones((rounds, workers))
    times[np.arange(rounds), np.arange(rounds) % workers] = slow
    return times


def by_name(report: StragglerReport) -> dict[str, float]:
    return {one.scheme: one.ratio for one in report.schemes}


def test_where_nobody_is_late_every_code_costs_its_load() -> None:
    report = stragglers(np.ones((8, 4)), overhead=0.25, models=2)
    # Three workers for four: 4/3. GC and SR-SGC with s = 1: 2. M-SGC with B = 1, W = 2, λ = 1: two of
    # 4 + 2 parts for each of 4 workers; larger λ cost more.
    assert by_name(report) == pytest.approx(
        {
            "wait for all": 1.0,
            "leave out": 0.25 + 0.75 * 4 / 3,
            "backup workers": 0.25 + 0.75 * 4 / 3,
            "GC": 0.25 + 0.75 * 2,
            "SR-SGC": 0.25 + 0.75 * 2,
            "M-SGC": 0.25 + 0.75 * 4 * 2 / 6,
        }
    )
    assert report.best().scheme == "wait for all"
    assert report.waiting == 1.0


def test_one_late_worker_a_round_is_covered_by_every_code() -> None:
    report = stragglers(rotating(6, 60, 5.0), overhead=0.4, sending=0.1, models=3)
    # Nobody waits for it, so that only the load and the gradients sent count, against 5 seconds.
    codes = {one.scheme: one for one in report.schemes if one.scheme not in ("wait for all", "leave out")}
    for one in codes.values():
        assert one.seconds == pytest.approx(0.4 + 0.1 * one.sends + 0.5 * one.load)
        assert one.ratio == pytest.approx(one.seconds / 5)
        assert (one.low, one.high) == pytest.approx((one.ratio, one.ratio))
    assert codes["backup workers"].load == 6 / 5
    assert codes["GC"].load == 2
    assert codes["M-SGC"].sends >= 2
    assert codes["M-SGC"].models <= 3
    # Five of six workers, with 6/5 of the work each, of which one is late in five of six rounds.
    assert report["leave out"].ratio == pytest.approx((0.4 + 0.1 + 0.5 * 6 / 5) * (5 * 5 + 1) / 6 / 5)
    assert report.waiting == pytest.approx(5)


def test_a_worker_that_is_always_slow_is_to_be_left_out() -> None:
    times = np.ones((40, 5))
    times[:, 3] = 4.0
    report = stragglers(times)
    assert report.best().name == "leave out (without 3)"
    assert report.best().ratio == pytest.approx(5 / 4 / 4)
    assert (report.slowest, report.slowest_share) == ("3", 1.0)
    assert "Worker 3 is the slowest in 100% of the rounds: repair or replace it first." in report.advice


def test_parameters_come_from_the_first_half_and_the_verdict_from_the_second() -> None:
    random = np.random.default_rng(0)
    first, second = rotating(12, 50, 6.0), 1 + 0.01 * random.random((50, 12))
    hopeful = stragglers(np.concatenate([first, first]), overhead=0.8)
    deceived = stragglers(np.concatenate([first, second]), overhead=0.8)
    assert [(one.scheme, one.setting) for one in hopeful.schemes] == [
        (one.scheme, one.setting) for one in deceived.schemes
    ]
    assert [one.chosen_at for one in hopeful.schemes] == pytest.approx(
        [one.chosen_at for one in deceived.schemes], rel=1e-12
    )
    assert hopeful.best().helps
    assert deceived.best().scheme == "wait for all"
    assert deceived.advice[0].startswith("None of them helps: wait for all workers.")
    others = [one for one in deceived.schemes if one.scheme in ("GC", "SR-SGC", "M-SGC")]
    assert all(one.ratio > 1 for one in others)


def test_a_scheme_that_only_fits_the_first_half_does_not_hide_one_that_helps_on_both() -> None:
    first = np.ones((40, 6))
    first[:, 0] = 6.0  # always late: without this worker a round takes 6/5 s
    report = stragglers(np.concatenate([first, rotating(6, 40, 6.0)]), models=1)
    by_first_half = min(report.schemes, key=lambda one: one.chosen_at)
    assert by_first_half.scheme in ("leave out", "backup workers")
    assert report["leave out"].ratio > 1
    assert (report["GC"].chosen_at, report["GC"].ratio) == pytest.approx((2.0, 2 / 6))
    assert report.best() == report["GC"]
    # And one that only fits the second half is not used either.
    report = stragglers(np.concatenate([np.ones((40, 6)), rotating(6, 40, 6.0)]), models=1)
    assert report["GC"].helps
    assert report.best().scheme == "wait for all"


def test_the_best_scheme_switches_where_a_code_costs_what_it_saves() -> None:
    # Waiting takes 1.5; GC with s = 1 takes 2 − overhead, which is less from one half on.
    report = stragglers(rotating(8, 64, 1.5), models=1)
    assert [one.scheme for one in report.by_overhead] == ["wait for all", "GC"]
    assert report.by_overhead[0].high == pytest.approx(0.5)
    assert report.by_overhead[1].low == pytest.approx(0.51)
    assert report.curves["GC"] == pytest.approx([(2 - place / 20) / 1.5 for place in range(21)])


def test_the_interval_is_that_of_a_mean_where_rounds_are_independent() -> None:
    random = np.random.default_rng(3)
    times = np.exp(0.3 * random.standard_normal((2000, 2)))
    found = stragglers(times, overhead=1.0)["GC"]  # the faster of two over the slower
    fast, slow = times[1000:].min(1), times[1000:].max(1)
    ratio = fast.mean() / slow.mean()
    error = (fast - ratio * slow).std() / slow.mean() / math.sqrt(1000)  # of a ratio of means
    assert found.ratio == pytest.approx(ratio)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.2)
    assert (found.high + found.low) / 2 == pytest.approx(ratio)


def test_bursts_widen_the_interval() -> None:
    random = np.random.default_rng(4)
    slow = 4.0 ** (random.random(40) < 0.3)
    apart = np.ones((800, 3))
    apart[:, 0] = random.permutation(np.repeat(slow, 20))
    bursts = np.ones((800, 3))
    bursts[:, 0] = np.repeat(slow, 20)
    one, other = (stragglers(times, overhead=1.0)["GC"] for times in (apart, bursts))
    assert other.high - other.low > 2 * (one.high - one.low)


def test_the_interval_is_that_of_sums_over_blocks_of_rounds() -> None:
    slow = [1, 1, 3, 3, 1, 1, 1, 5, 1]  # of worker 0 in the second half
    times = np.ones((18, 2))
    times[9:, 0], times[:9, 0] = slow, [1, 2, 1, 1, 3, 1, 1, 1, 1]
    found = stragglers(times, overhead=1.0, models=1)["GC"]  # 1 s in every round, against `slow`
    ratio = 9 / 17
    gaps = [1 - ratio * one for one in slow]
    sums = [sum(gaps[(first + place) % 9] for place in range(3)) for first in range(9)]
    variance = sum(one**2 for one in sums) / 9 / 3**2 / (3 - 1)  # of a mean over three blocks
    reach = 4.303 * math.sqrt(variance) / (17 / 9)  # Student's t with two degrees of freedom
    assert found.ratio == pytest.approx(ratio)
    assert found.high == pytest.approx(ratio + reach, rel=1e-3)
    assert found.low == pytest.approx(max(0, ratio - reach), abs=1e-3)


def test_the_interval_has_the_long_run_ratio_about_as_often_as_it_says() -> None:
    """Late steps in bursts of 1.7 rounds; 19 of 20 of the intervals should, up to the luck of 60 of them."""
    random = np.random.default_rng(7)
    late, slow = np.zeros((60, 6), dtype=bool), np.empty((4000, 60, 6))
    for now in slow:
        change = random.random(late.shape)
        late = np.where(late, change > 0.6, change < 0.04)
        now[:] = np.where(late, 4.0, 1.0)
    inside, pairs = 0, slow.reshape(-1, 6)
    ratio = np.maximum.reduce([pairs[:, place::3].min(1) for place in range(3)]).mean() / pairs.max(1).mean()
    for place in range(60):
        found = stragglers(slow[:800, place], overhead=1.0, models=1, mu=0.0)["GC"]
        if found.setting == "s = 1":
            inside += found.low <= ratio <= found.high
        else:
            inside += 1
    assert inside >= 50


def test_with_one_model_the_advice_leaves_out_what_needs_several() -> None:
    report = stragglers(rotating(8, 80, 4.0))
    assert report.best().scheme == "M-SGC"
    assert report.best(1).scheme == "GC"
    assert report.advice[0].startswith("With 4 models trained in turn: M-SGC (")
    assert report.advice[1].startswith("With one model: GC (s = 1) would have saved 50% (50% to 50%)")
    alone = stragglers(rotating(8, 80, 4.0), models=1)
    assert [one.scheme for one in alone.schemes] == ["wait for all", "leave out", "backup workers", "GC"]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"overhead": 1.5}, "overhead is 1.5: give a finite number from 0 to 1"),
        ({"overhead": 0.6, "sending": 0.6}, "overhead and sending are 1.2 together: shares of one step"),
        ({"models": 0}, "models is 0: give an integer, at least 1, at most 64"),
        ({"mu": []}, "mu is empty: give at least one value"),
        ({"mu": [0, -1]}, "mu is -1: give a finite number, at least 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, said: str) -> None:
    with pytest.raises(UseError) as error:
        stragglers(np.ones((4, 2)), **options)
    assert str(error.value).startswith(said)


def test_the_report_names_its_schemes_and_can_be_read_back(tmp_path) -> None:
    report = stragglers(rotating(4, 30, 2.0))
    assert [one.scheme for one in report.schemes] == SCHEMES
    assert StragglerReport.load(report.save(tmp_path / "stragglers.json")) == report
    assert "Only 15 rounds could be judged" in report.advice[-1]
    with pytest.raises(UseError, match="there is no 'gc'; there are wait for all, leave out"):
        report["gc"]


def test_every_line_of_the_figure_has_its_name_beside_it() -> None:
    panel = stragglers(rotating(8, 40, 4.0), overhead=0.3).figure().panels[1]
    labels = panel.layout["annotations"]
    assert {one["text"] for one in labels} == {one["name"] for one in panel.data}
    tops = sorted(one["y"] for one in labels)
    height = max(max(one["y"]) for one in panel.data)
    assert all(after - before > 0.08 * height for before, after in itertools.pairwise(tops))
