"""Traces against closed forms, errors that cover, and the way that is cheaper."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

from theodolite.core.errors import UseError
from theodolite.probes.curvature.trace import trace

from .explicit import explicit_of
from .matrices import Matrix, semicircle, with_spectrum, with_spikes
from .networks import case

FLAT = torch.linspace(0.5, 1.5, 800).double()
SPIKED = torch.cat([torch.full((790,), 0.1), torch.linspace(20, 60, 10)]).double()


@pytest.mark.parametrize("spectrum", [FLAT, SPIKED], ids=["flat", "spiked"])
def test_error_is_as_asked_and_covers_the_truth(spectrum):
    truth, inside, sure = float(spectrum.sum()), 0, 0
    operator = with_spectrum(spectrum)
    for seed in range(20):
        found = trace(operator, rtol=0.01, seed=seed)
        assert found.converged, found.status
        assert found.error <= 0.01 * found.value
        inside += found.low <= truth <= found.high
        sure += abs(found.value - truth) <= 0.03 * truth
    assert inside >= 16
    assert sure == 20


def test_xtrace_is_taken_where_few_eigenvalues_are_large_and_hutchinson_where_none_is():
    spiked, flat = trace(with_spectrum(SPIKED)), trace(with_spectrum(FLAT), rtol=0.002)
    assert spiked.method == "xtrace"
    assert flat.method == "hutchinson"
    # Of signs ωᵀHω has at most the variance 2‖H‖_F²: what Hutchinson would take for the spikes.
    hutchinson = 2 * float(SPIKED.square().sum()) / (0.01 * float(SPIKED.sum())) ** 2
    assert spiked.products < hutchinson / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_is_exact_once_its_range_is_caught(dtype):
    spectrum = torch.cat([torch.zeros(495), torch.tensor([1.0, 2.0, 3.0, 50.0, -20.0])])
    found = trace(with_spectrum(spectrum, dtype=dtype), rtol=1e-3)
    assert found.converged
    assert found.method == "xtrace"
    assert found.products <= 40
    assert found.value == pytest.approx(36.0, rel=1e-5)


def test_frobenius_norm_comes_from_the_same_products():
    spectrum = torch.linspace(-1, 2, 600).double()
    found = trace(with_spectrum(spectrum), rtol=0.02)
    truth = float(spectrum.square().sum().sqrt())
    assert found.frobenius.error < 0.05 * truth
    assert abs(found.frobenius.value - truth) < 4 * found.frobenius.error


def test_identity_takes_the_pilot_alone_and_a_small_operator_its_diagonal():
    identity = trace(Matrix(3 * torch.eye(1000)))
    assert (identity.value, identity.error, identity.products) == (3000, 0, 10)
    matrix = semicircle(18)
    small = trace(Matrix(matrix))
    assert small.method == "exact"
    assert small.exact
    assert small.products == 18
    assert small.value == pytest.approx(float(matrix.trace()), rel=1e-12)
    assert small.frobenius.value == pytest.approx(float(matrix.norm()), rel=1e-12)


def test_the_diagonal_is_summed_where_sampling_would_take_longer():
    matrix = semicircle(120)  # its trace is small, and a share of it takes very many samples
    found = trace(Matrix(matrix))
    assert found.method == "exact"
    assert found.value == pytest.approx(float(matrix.trace()), rel=1e-10)
    assert found.products <= 120 + 20


@pytest.mark.parametrize("name", ["layer norm", "causal attention"])
def test_of_networks_as_of_their_explicit_hessians(name):
    made, truth = case(name), explicit_of(name).hessian
    found = trace(made.model, made.loss, made.batch, rtol=0.02)
    assert abs(found.value - float(truth.trace())) <= max(4 * found.error, 1e-6 * float(truth.norm()))
    assert abs(found.frobenius.value - float(truth.norm())) <= max(4 * found.frobenius.error, 1e-6)


def test_a_trace_of_zero_says_to_give_an_absolute_tolerance():
    bulk = semicircle(1200).float()
    bulk -= torch.eye(1200) * bulk.trace() / 1200
    found = trace(Matrix(bulk), most_products=200)
    assert not found.converged
    assert "cannot be told from 0" in found.status
    assert "atol" in found.status
    given = trace(Matrix(bulk), atol=3.0, most_products=2000)
    assert given.converged
    assert given.error <= 3.0
    assert abs(given.value) < 12


def test_too_few_products_says_how_many_would_do():
    found = trace(with_spectrum(FLAT), rtol=1e-4, most_products=100)
    assert not found.converged
    assert found.products == 100
    assert "most_products" in found.status
    needed = int(found.status.split("to about ")[1].split(",")[0])
    # Of the spectrum alone: Var ≈ 2(‖H‖_F² − Σ H_ii²), and H_ii ≈ 1.
    variance = 2 * (float(FLAT.square().sum()) - 800)
    assert needed == pytest.approx(variance / (1e-4 * 800) ** 2, rel=0.5)


def test_memory_for_xtrace_is_bounded(monkeypatch):
    module = import_module("theodolite.probes.curvature.trace")
    monkeypatch.setattr(module, "MOST_BYTES", 3 * 800 * 8 * 9)
    found = trace(with_spectrum(SPIKED), rtol=0.05)
    assert found.method == "hutchinson"
    assert found.converged


def test_spread_of_xtrace_is_that_between_seeds():
    operator = with_spikes(semicircle(400, 1.0) + 0.5 * torch.eye(400), [50.0, 30.0, 20.0])
    found = [trace(operator, rtol=0.03, seed=seed) for seed in range(30)]
    values = torch.tensor([one.value for one in found if one.method == "xtrace"])
    errors = torch.tensor([one.error for one in found if one.method == "xtrace"])
    assert len(values) >= 20
    truth = float(operator.matrix.trace())
    assert abs(float(values.mean()) - truth) < 3 * float(values.std()) / math.sqrt(len(values))
    assert 0.5 < float(values.std() / errors.mean()) < 2


def test_same_seed_same_answer_and_products_are_counted():
    operator = with_spectrum(SPIKED)
    first, second = trace(operator, seed=1), trace(operator, seed=1)
    assert first == second
    assert first.products + second.products == operator.products
    assert trace(operator, seed=2).value != first.value


def test_progress_ends_at_one():
    seen = []
    trace(with_spectrum(FLAT), rtol=0.002, progress=lambda title, done: seen.append(done))
    assert 0 <= seen[0] < 1
    assert seen[-1] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rtol": -1.0}, "rtol is -1"),
        ({"rtol": 0.0}, "both 0"),
        ({"atol": float("nan")}, "atol is nan"),
        ({"most_products": 0}, "most_products is 0"),
    ],
)
def test_bad_options_are_named(options, said):
    with pytest.raises(UseError, match=said):
        trace(with_spectrum(FLAT), **options)


def test_products_that_are_not_finite_are_refused():
    matrix = torch.eye(50)
    matrix[3, 4] = float("nan")
    with pytest.raises(UseError, match="not finite"):
        trace(Matrix(matrix))
