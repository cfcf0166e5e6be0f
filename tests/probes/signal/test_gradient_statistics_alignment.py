"""Theorem 5 against simulated samples."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from theodolite import UseError
from theodolite.probes.signal.gradient_statistics import alignment_bound, mean_interval


@pytest.mark.parametrize(("n", "m", "size"), [(20, 20, 1.0), (200, 20, 0.8), (40, 200, 0.5), (1000, 10, 1.2)])
def test_means_fail_to_align_less_often_than_the_bound(n: int, m: int, size: float) -> None:
    deviations = torch.linspace(0.3, 2.0, 12)
    mean = torch.zeros(12)
    mean[-1] = size  # along the noisiest direction
    # Means of Gaussian vectors are Gaussian: their distribution is drawn from itself.
    first = mean + deviations / n**0.5 * torch.randn(20_000, 12)
    second = mean + deviations / m**0.5 * torch.randn(20_000, 12)
    failures = float(((first * second).sum(1) <= 0).double().mean())
    variances = deviations.square()
    bound = alignment_bound(n, m, size, float(variances.max()), float(variances.sum()))
    assert 0 < failures <= bound <= 1


def test_it_is_the_sum_of_three_terms() -> None:
    found = alignment_bound(300, 500, norm_mu=2.0, lambda_max=3.0, trace=70.0)
    assert found == pytest.approx(4 * 3 / (300 * 4) + 4 * 3 / (500 * 4) + 4 * 3 * 70 / (300 * 500 * 16))


def test_without_a_mean_nothing_is_known_and_without_noise_everything() -> None:
    assert alignment_bound(10, 10, 0.0, 1.0, 1.0) == 1.0
    assert alignment_bound(10, 10, 1.0, 0.0, 0.0) == 0.0
    assert alignment_bound(10, 10, 1e-200, 1.0, 1.0) == 1.0


@pytest.mark.parametrize("wrong", [{"n": 0}, {"norm_mu": -1.0}, {"lambda_max": float("nan")}])
def test_bad_input_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UseError, match=next(iter(wrong))):
        alignment_bound(**{"n": 1, "m": 1, "norm_mu": 1.0, "lambda_max": 1.0, "trace": 1.0, **wrong})


def test_the_interval_is_students() -> None:
    values = torch.randn(15).double()
    mean, low, high = mean_interval(values, level=0.9)
    expected = stats.t.interval(0.9, 14, loc=float(values.mean()), scale=stats.sem(values.numpy()))
    assert (low, high) == pytest.approx(expected)
    assert mean == pytest.approx(float(values.mean()))
    with pytest.raises(UseError, match="at least 2"):
        mean_interval(torch.ones(1))
