"""Slopes of values that follow a known power of the size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from theodolite import Size
from theodolite.probes.scaling.coordinates import Coordinates, Slope, fit_slopes, worst_first
from theodolite.probes.scaling.first_steps import Track


def track(width: int, depth: int, value: float, seed: int = 0, expected: float = 0.0) -> Track:
    return Track(Size(width, depth), seed, "finished", {"q": (9.0, value)}, {"q": expected}, (), ())


def along(slopes: tuple[Slope, ...], axis: str) -> Slope:
    (found,) = (slope for slope in slopes if slope.axis == axis)
    return found


def test_a_power_law_has_its_power() -> None:
    tracks = [track(width, 4, 3 * width**0.5) for width in (64, 128, 512)]
    (slope,) = fit_slopes(tracks)
    assert slope.value == pytest.approx(0.5)
    assert slope.at_ten_times == pytest.approx(10**0.5)
    assert not slope.within(0.1)
    assert fit_slopes(tracks, step=0)[0].value == 0  # all are 9 there


def test_each_line_of_sizes_has_a_level_of_its_own() -> None:
    tracks = [track(w, d, w**0.25 / d) for w in (32, 64, 128) for d in (2, 8)] + [track(4096, 3, 1e9)]
    slopes = fit_slopes(tracks)
    assert along(slopes, "width").value == pytest.approx(0.25)
    assert along(slopes, "depth").value == pytest.approx(-1)


def test_what_should_follow_the_depth_is_judged_by_that() -> None:
    slope = along(fit_slopes([track(64, d, 1 / d, expected=-1.0) for d in (2, 4, 8)]), "depth")
    assert slope.within(0.01)
    assert slope.at_ten_times == pytest.approx(1)


def test_the_interval_is_the_t_interval_over_seeds() -> None:
    powers = (0.1, 0.2, 0.4)
    tracks = [track(w, 2, w**power, seed) for seed, power in enumerate(powers) for w in (32, 64, 256)]
    (slope,) = fit_slopes(tracks)
    mean = sum(powers) / 3
    error = math.sqrt(sum((power - mean) ** 2 for power in powers) / 2 / 3)
    assert slope.value == pytest.approx(mean)
    assert (slope.low, slope.high) == pytest.approx((mean - 4.302653 * error, mean + 4.302653 * error))
    assert math.isnan(fit_slopes(tracks[:3])[0].low)


def test_a_run_that_diverged_is_off_whatever_the_tolerance() -> None:
    (slope,) = fit_slopes([track(32, 2, 1.0), track(64, 2, math.nan)])
    assert not slope.within(1e9)
    assert "diverged" in str(slope)
    assert worst_first([Slope("q", "width", 5.0, 0, 0, 0), slope])[0] is slope


def test_what_stays_zero_is_flat() -> None:
    assert fit_slopes([track(32, 2, 0.0), track(64, 2, 0.0)])[0].value == 0
    assert math.isnan(fit_slopes([track(32, 2, 0.0), track(64, 2, 1.0)])[0].value)


def test_results_print_and_are_read_back(tmp_path: Path) -> None:
    tracks = tuple(track(width, 4, 3 * width**0.5) for width in (64, 128))
    made = Coordinates("plan", "adamw", 0.01, Size(64, 4), 1, tracks)
    assert [line.split() for line in str(made).splitlines()[2:]] == [
        ["quantity", "axis", "slope", "expected"],
        ["─" * 32],
        ["q", "width", "+0.50", "0"],
    ]
    assert Coordinates.load(made.save(tmp_path / "made.json")) == made
    assert Track.load(tracks[0].save(tmp_path / "track.json")) == tracks[0]
    assert "q" in str(tracks[0])
    slope = Slope("q", "depth", 0.5, 0.25, 0.75, expected=1.0)
    assert Slope.load(slope.save(tmp_path / "slope.json")) == slope
    assert (
        made.save(tmp_path / "made.csv").read_text().startswith("quantity,axis,slope,95 % from,to,expected\n")
    )
