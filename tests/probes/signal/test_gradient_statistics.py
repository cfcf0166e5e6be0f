"""The covariance of the stream's gradient against numpy and autograd, Theorem 5 against simulations."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from theodolite import UseError
from theodolite.probes import signal
from theodolite.probes.signal import gradient_statistics
from theodolite.probes.signal.gradient_statistics import (
    BINS,
    QUANTILES,
    alignment_bound,
    describe,
    mean_interval,
)

from .growable import batch_for, loss_for, network


def gradients_at(name: str, point: int) -> np.ndarray:
    """For each of ten examples the gradient of its loss by the stream at a point, summed over positions."""
    model, (inputs, targets) = network(name).eval(), batch_for(name, 10)
    found = []
    for example in range(10):
        kept: list[Tensor] = []
        stop = model.blocks[point - 1].register_forward_hook(
            lambda module, args, output, kept=kept: kept.append(output)
        )
        loss = loss_for(name)(model(inputs[example : example + 1]), targets[example : example + 1])
        stop.remove()
        (gradient,) = torch.autograd.grad(loss, kept[0])
        found.append(gradient[0].sum((1, 2)) if gradient.ndim == 4 else gradient[0].sum(0))
    return torch.stack(found).numpy()


@pytest.mark.parametrize("name", ["pre", "resnet"])
def test_covariance_and_alignment_are_those_of_the_units_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets = batch_for(name, 10)
    asked: list[dict[str, float]] = []
    monkeypatch.setattr(
        sys.modules["theodolite.probes.signal.signal"],
        "alignment_bound",
        lambda n, m, **estimates: asked.append({"n": n, "m": m, **estimates}) or 0.25,
    )
    halves = (inputs[:6], targets[:6]), (inputs[6:], targets[6:])
    one = signal(network(name), loss_for(name), *halves).points[1]
    examples = gradients_at(name, 1)
    expected = np.cov(examples.T)
    assert one.covariance.examples == 10
    np.testing.assert_allclose(one.covariance.matrix, expected, rtol=1e-9, atol=1e-15)
    first, second = examples[:6].mean(0), examples[6:].mean(0)
    assert one.gradient == pytest.approx(np.linalg.norm(first))
    assert one.alignment == pytest.approx(first @ second)
    products = examples[6:] @ first
    # 3.1824 is the 97.5 % quantile of Student's t with 3 degrees of freedom, from a table.
    reach = 3.1824 * products.std(ddof=1) / 2
    assert one.alignment_interval == pytest.approx((first @ second - reach, first @ second + reach), rel=1e-4)
    largest, trace = np.linalg.eigvalsh(expected)[-1], np.trace(expected)
    size = max(first @ second, 0) ** 0.5
    assert asked[1] == pytest.approx({"n": 6, "m": 4, "norm_mu": size, "lambda_max": largest, "trace": trace})
    assert one.alignment_bound == 0.25


def test_a_description_is_numpys() -> None:
    draws = np.random.default_rng(0)
    examples = draws.standard_normal((300, 12)) @ draws.standard_normal((12, 12))
    matrix, beside = np.cov(examples.T), np.triu_indices(12, 1)
    found = describe(torch.from_numpy(matrix), 300)
    correlations = np.corrcoef(examples.T)[beside]
    assert found.correlations == pytest.approx(np.quantile(correlations, QUANTILES))
    assert found.covariances == pytest.approx(np.quantile(matrix[beside], QUANTILES))
    assert found.variances == pytest.approx(np.quantile(matrix.diagonal(), QUANTILES))
    assert found.counts == tuple(np.histogram(correlations, BINS, (-1, 1))[0])
    assert found.beyond == pytest.approx(np.mean(np.abs(correlations) > 2 / np.sqrt(300)))
    assert found.effective == pytest.approx(12 * np.linalg.eigvalsh(matrix)[-1] / np.trace(matrix))


def test_chance_is_what_channels_without_correlations_show(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = np.random.default_rng(1).standard_normal((400, 100))
    matrix = torch.from_numpy(np.cov(examples.T))
    found = describe(matrix, 400)
    assert found.chance == pytest.approx(2.25, abs=0.01)  # (1 + √¼)²
    assert found.effective == pytest.approx(found.chance, rel=0.05)
    assert found.beyond == pytest.approx(0.0455, abs=0.01)  # two sigma of a normal number
    monkeypatch.setattr(gradient_statistics, "DENSE", 50)
    assert describe(matrix, 400).largest == pytest.approx(found.largest, rel=1e-9)
    common = torch.from_numpy(np.cov((examples + 2 * examples[:, :1]).T))
    assert describe(common, 400).effective > 10 * found.effective


def test_only_small_matrices_are_kept() -> None:
    large = torch.eye(129, dtype=torch.float64)
    assert describe(large, 10).matrix is None
    assert describe(large, 10, keep=True).matrix is not None
    still = describe(torch.zeros(3, 3, dtype=torch.float64), 10)
    assert (still.largest, still.beyond) == (0.0, 0.0)


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
