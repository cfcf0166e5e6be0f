"""The covariance of the stream's gradient, against numpy and against autograd example by example."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from theodolite.probes import signal
from theodolite.probes.signal import gradient_statistics
from theodolite.probes.signal.gradient_statistics import BINS, QUANTILES, describe

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
