"""Densities against closed forms: semicircle, identity, moments, and the criteria that follow from them."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch
from scipy.stats import semicircular

from theodolite.core.errors import UseError
from theodolite.probes.curvature.density import density

from .explicit import explicit_of
from .matrices import Matrix, semicircle, with_spectrum
from .networks import case


def test_semicircle_is_a_semicircle():
    found = density(Matrix(semicircle(2000).float()), probes=4, steps=40)
    places = torch.linspace(-1.2, 1.2, 60).double()
    truth = torch.from_numpy(semicircular.cdf(places.clamp(-1, 1).numpy()))
    assert (found.cumulative(places) - truth).abs().max() < 0.03
    inner = torch.linspace(-0.9, 0.9, 40).double()
    smooth = found.values(inner, width=0.08)
    assert (smooth - torch.from_numpy(semicircular.pdf(inner.numpy()))).abs().max() < 0.05


def test_integrates_to_one_and_each_probe_has_weight_one():
    found = density(with_spectrum(torch.logspace(-2, 1, 300)), probes=3, steps=20)
    places = found.grid()
    assert float(torch.trapezoid(found.values(places), places)) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(3).double())
    assert found.cumulative(places)[[0, -1]].tolist() == pytest.approx([0, 1])


def test_moments_are_exact_for_each_probe():
    # vᵀHᵖv of the very vectors that were drawn.
    operator = with_spectrum(torch.linspace(-1, 4, 200))
    found = density(operator, probes=3, steps=6, seed=5)
    bits = torch.randint(
        0, 2, (3, 200), generator=torch.Generator().manual_seed(5), dtype=torch.int8
    )  # all of them are drawn in one go or one by one: the same numbers
    vectors = (2 * bits.double() - 1) / math.sqrt(200)
    power = vectors
    for degree in range(1, 12):
        power = power @ operator.matrix
        moment = (found.weights * found.nodes**degree).sum(1)
        torch.testing.assert_close(moment, (power * vectors).sum(1), rtol=1e-10, atol=1e-12)


def test_trace_and_frobenius_norm_agree_with_the_spectrum():
    spectrum = torch.linspace(-1, 2, 500).double()
    found = density(with_spectrum(spectrum), probes=40, steps=10)
    for estimate, truth in ((found.trace, spectrum.sum()), (found.frobenius, spectrum.norm())):
        assert estimate.error < 0.1 * float(truth)
        assert abs(estimate.value - float(truth)) < 3.5 * estimate.error


def test_spread_between_probes_is_the_error_of_their_mean():
    operator = with_spectrum(torch.linspace(-1, 1, 300))
    place = torch.tensor([0.3])
    means = [density(operator, probes=5, steps=15, seed=seed) for seed in range(25)]
    values = torch.stack([one.values(place, 0.2) for one in means])
    errors = torch.stack([one.errors(place, 0.2) for one in means])
    assert 0.6 < float(values.std() / errors.mean()) < 1.6


def test_extreme_nodes_are_the_extreme_eigenvalues_and_give_r_e():
    spectrum = torch.cat([torch.linspace(-0.5, 0.5, 296), torch.tensor([-2.0, 4.0, 6.0, 8.0])])
    found = density(with_spectrum(spectrum), probes=3, steps=30)
    assert found.largest == pytest.approx(8, rel=1e-10)
    assert found.smallest == pytest.approx(-2, rel=1e-10)
    assert found.r_e.value == pytest.approx(0.25, rel=1e-10)
    assert found.r_e.error < 1e-10


def test_k_h1_is_the_negative_part_of_the_trace_over_the_positive():
    spectrum = torch.cat([torch.full((100,), -1.0), torch.full((300,), 2.0)])
    found = density(with_spectrum(spectrum), probes=60, steps=5).k_hn(1)
    assert found.error < 0.02
    assert abs(found.value - 100 / 600) < 3.5 * found.error


def test_k_h1_is_not_too_high_where_the_positive_part_is_a_single_outlier():
    spectrum = torch.cat([torch.tensor([40.0]), torch.full((59,), 0.2), torch.full((40,), -0.5)])
    operator = with_spectrum(spectrum)
    found = [density(operator, probes=16, steps=8, seed=seed).k_hn(1) for seed in range(40)]
    values = torch.tensor([one.value for one in found])
    # 0.39 is the truth. The weight of the outlier is a squared normal number, often near zero: the mean of
    # the ratios of single probes is 0.77.
    assert abs(float(values.mean()) - 20 / 51.8) < 0.06
    assert 0.6 < float(values.std()) / float(torch.tensor([one.error for one in found]).mean()) < 1.6


def test_k_hn_of_two_nodes_by_hand():
    found = density(Matrix(torch.diag(torch.tensor([-1.0, 3.0]))), probes=2, steps=5)
    # Signs have the same weight, 1/2, on both eigenvalues.
    assert found.k_hn(1).value == pytest.approx(1 / 3)
    assert found.k_hn(2).value == pytest.approx(1 / 9)
    assert found.k_hn(2).error == pytest.approx(0, abs=1e-12)
    with pytest.raises(UseError, match="n is 0: give a positive finite number"):
        found.k_hn(0)


def test_identity_and_zero_and_rank_one_spend_their_space_early():
    identity = density(Matrix(2 * torch.eye(50)), probes=2, steps=20)
    assert identity.nodes.min() == identity.nodes.max() == pytest.approx(2)
    assert identity.weights.sum(1).tolist() == pytest.approx([1, 1])
    zero = density(Matrix(torch.zeros(50, 50)), probes=2, steps=20)
    assert zero.nodes.abs().max() == 0
    assert zero.cumulative(torch.tensor([-1.0, 1.0])).tolist() == pytest.approx([0, 1])
    vector = torch.ones(50).double()
    vector[::3] = -2
    one = density(Matrix(torch.outer(vector, vector)), probes=400, steps=20)
    half = float(vector @ vector) / 2
    assert one.cumulative(torch.tensor([half])).item() == pytest.approx(0.98, abs=0.005)
    assert one.largest == pytest.approx(2 * half)


def test_more_steps_than_parameters_gives_the_eigenvalues():
    spectrum = torch.tensor([-1.0, 0.5, 2.0, 7.0])
    found = density(with_spectrum(spectrum), probes=2, steps=64)
    torch.testing.assert_close(found.nodes, spectrum.double().expand(2, 4))


def test_an_eigenvalue_counts_at_its_own_place():
    found = density(Matrix(torch.diag(torch.tensor([0.0, 0.0, 4.0, 4.0]))), probes=1)
    assert found.cumulative(found.nodes[0, :2]).tolist() == pytest.approx([0.5, 1.0])


def test_orthogonality_is_kept_in_float32_after_many_steps():
    # Without it the large eigenvalues come back as ghosts, and take weight from the bulk.
    spectrum = torch.cat([torch.linspace(-1, 1, 990), torch.logspace(1, 3, 10)])
    found = density(with_spectrum(spectrum, dtype=torch.float32), probes=1, steps=80)
    outside = found.nodes[0][found.nodes[0] > 5]
    assert len(outside) == 10


@pytest.mark.parametrize("name", ["layer norm", "causal attention"])
def test_of_networks_as_of_their_explicit_hessians(name):
    made = case(name)
    truth = torch.linalg.eigvalsh(explicit_of(name).hessian)
    found = density(made.model, made.loss, made.batch, probes=12, steps=20)
    scale = float(truth.abs().max())
    assert found.largest == pytest.approx(float(truth[-1]), abs=1e-4 * scale)
    assert found.smallest == pytest.approx(float(truth[0]), abs=1e-3 * scale)
    place = torch.tensor([0.1 * scale])
    share = float((truth <= place).double().mean())
    assert float(found.cumulative(place)) == pytest.approx(share, abs=0.08)


def test_progress_products_and_seed():
    operator, seen = with_spectrum(torch.linspace(0, 1, 100)), []
    found = density(operator, probes=3, steps=7, seed=2, progress=lambda title, done: seen.append(done))
    assert found.products == operator.products == 21
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1)
    assert torch.equal(density(operator, probes=3, steps=7, seed=2).nodes, found.nodes)
    assert not torch.equal(density(operator, probes=3, steps=7, seed=3).nodes, found.nodes)


def test_probes_side_by_side_are_the_same_as_one_by_one(monkeypatch):
    operator = with_spectrum(torch.linspace(0, 1, 100))
    single = density(operator, probes=5, steps=7)
    module = import_module("theodolite.probes.curvature.density")
    monkeypatch.setattr(module, "_probes_at_once", lambda products, steps: 2)
    torch.testing.assert_close(density(operator, probes=5, steps=7).nodes, single.nodes)


@pytest.mark.parametrize(("options", "said"), [({"probes": 0}, "probes is 0"), ({"steps": 0}, "steps is 0")])
def test_bad_options_are_named(options, said):
    with pytest.raises(UseError, match=said):
        density(with_spectrum(torch.ones(5)), **options)


def test_bad_width_and_products_that_are_not_finite_are_refused():
    found = density(with_spectrum(torch.ones(5)), probes=1, steps=1)
    with pytest.raises(UseError, match="width is 0"):
        found.values(torch.zeros(1), 0)
    with pytest.raises(UseError, match="not finite"):
        density(Matrix(torch.full((5, 5), float("nan"))))
