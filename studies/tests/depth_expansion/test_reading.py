"""What is read of a trained network."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from theodolite.probes.signal.signal import signal
from theodolite_studies.depth_expansion.reading import (
    alignment,
    block_gradients,
    candidates,
    correlations,
    moments,
    outcome,
    read,
)
from theodolite_studies.depth_expansion.training import images_of

from .networks import READER, network


def test_the_gradient_before_the_readout_is_autograds():
    model, images = network(0).eval(), images_of("templates", "test", num=7, side=8, dtype=torch.float64)
    found = outcome(model, images, 3)
    seen = []
    handle = model.readout.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    losses = F.cross_entropy(model(images.plain(torch.arange(7))), images.labels, reduction="none")
    handle.remove()
    (gradients,) = torch.autograd.grad(losses.sum(), seen[0], retain_graph=True)
    (bias,) = torch.autograd.grad(losses.mean(), model.readout.bias)
    assert torch.allclose(found.gradients, gradients, rtol=1e-10)
    assert found.loss == pytest.approx(losses.mean().item(), rel=1e-12)
    assert found.bias == pytest.approx(bias.norm().item(), rel=1e-10)
    assert torch.allclose(gradients.mean(0), bias @ model.readout.weight, rtol=1e-10, atol=1e-14)


def test_ten_classes_leave_nine_directions_before_the_readout():
    """`Wᵀ(p − y)`, and p − y adds up to zero: `trΣ ≤ 9λ`, so C ≥ d/9 however wide the network is."""
    model, images = network(0, width=8).eval(), images_of("templates", "test", num=64, side=8)
    found = moments(outcome(model.float(), images, 64).gradients)
    assert found.dims == 32
    assert found.spread >= 32 / 9


def test_the_gradient_at_a_block_is_that_of_a_shift_of_its_channels():
    model, images = network(0).eval(), images_of("templates", "test", num=8, side=8, dtype=torch.float64)
    shifts, entries = block_gradients(model, images, READER)
    for place, block in enumerate(model.blocks):
        shift = torch.zeros(8, shifts[place].shape[1], 1, 1, dtype=torch.float64, requires_grad=True)
        handle = block.register_forward_hook(lambda module, inputs, output, shift=shift: output + shift)
        loss = F.cross_entropy(model(images.plain(torch.arange(8))), images.labels, reduction="sum")
        (expected,) = torch.autograd.grad(loss, shift)
        handle.remove()
        assert expected.abs().max() > 0
        assert torch.allclose(shifts[place], expected[:, :, 0, 0], rtol=1e-9, atol=1e-14)
        assert entries[place].shape == (8, 6)
    # Behind the last block is a mean over positions: a shift of its channels is one of what is read out.
    assert torch.allclose(shifts[-1], outcome(model, images, 8).gradients, rtol=1e-9)


def test_reading_leaves_no_trace():
    model, images = network(0).eval(), images_of("templates", "test", num=8, side=8, dtype=torch.float64)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    read(model, images, images, READER, whole=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(block._forward_hooks for block in model.blocks)


def test_moments_are_numpys():
    values = np.random.default_rng(0).standard_normal((50, 4)) @ np.diag([1, 2, 3, 4]) + 1
    covariance = np.cov(values.T, bias=True)
    found = moments(torch.from_numpy(values))
    assert found.norm == pytest.approx(np.linalg.norm(values.mean(0)), rel=1e-4)
    assert found.trace == pytest.approx(np.trace(covariance), rel=1e-4)
    assert found.top == pytest.approx(np.linalg.eigvalsh(covariance)[-1], rel=1e-4)
    assert found.spread == pytest.approx(4 * found.top / found.trace, rel=1e-4)


def test_correlations_are_numpys_and_what_does_not_vary_is_left_out():
    values = np.random.default_rng(0).standard_normal((400, 5))
    values[:, 1] = values[:, 0] + 0.01 * values[:, 1]
    values[:, 4] = 7
    matrix = np.corrcoef(values[:, :4].T)
    pairs = np.abs(matrix[np.triu_indices(4, 1)])
    found = correlations(torch.from_numpy(values), whole=True)
    assert found["alive"] == 4
    assert np.allclose(found["matrix"], matrix, atol=1e-3)
    assert found["near"] == pytest.approx((pairs <= 0.1).mean(), rel=1e-4)
    assert found["quantiles"] == pytest.approx(np.quantile(pairs, [0.5, 0.9, 0.99]), rel=1e-3)
    assert found["counts"][-1] == 1  # the one pair that is nearly the same
    assert sum(found["counts"]) == 6


def test_of_uncorrelated_coordinates_one_pair_in_twenty_is_beyond_the_noise():
    values = torch.randn(1000, 100, generator=torch.Generator().manual_seed(0))
    found = correlations(values, whole=False)
    assert found["beyond"] == pytest.approx(0.0455, abs=0.01)
    assert found["near"] > 0.99
    assert found["top"] == pytest.approx(found["edge"], rel=0.1)
    assert "matrix" not in found


def test_two_samples_of_numbers_fail_to_align_as_often_as_their_signs_differ():
    """Means of n Gaussians have the wrong sign with q = Φ(−√n μ/σ); one of two, with 2q(1 − q)."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, 1, generator=random, dtype=torch.float64)
    values = (values - values.mean()) / values.std() + 0.3
    reader = dataclasses.replace(READER, sizes=(4, 16, 256), draws=4000)
    found = alignment(-values, values, reader)
    for place, size in enumerate(reader.sizes):
        q = stats.norm.cdf(-math.sqrt(size) * 0.3)
        assert found["fresh"][place] == pytest.approx(2 * q * (1 - q), abs=0.025)
        assert found["crossed"][place] == pytest.approx(1 - 2 * q * (1 - q), abs=0.025)
        noise = 1 / (size * 0.3**2)
        assert found["bound"][place] == pytest.approx(min(1, 8 * noise + 4 * noise**2), rel=1e-3)


def test_candidates_are_estimated_on_train_images_and_judged_by_test_images():
    model = network(0).eval()
    images = [
        images_of("templates", split, num=6, side=8, dtype=torch.float64) for split in ("train", "test")
    ]
    batches = [(each.plain(torch.arange(5)), each.labels[:5]) for each in images]
    expected = signal(model, F.cross_entropy, batches[0], batches[1])
    found = candidates(model, *images, 5)
    assert found["gain"] == pytest.approx([one.gain for one in expected.points], rel=1e-4)
    assert found["preconditioned_error"] == pytest.approx(
        [one.preconditioned_error for one in expected.points], rel=1e-4
    )
    assert found["squared"] == pytest.approx([one.norm**2 for one in expected.points], rel=1e-4)
