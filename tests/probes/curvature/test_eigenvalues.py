"""Eigenvalues against explicit spectra, bounds that hold, and what is said where they are not found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.probes.curvature.eigenvalues import eigenvalues
from theodolite.probes.curvature.operator import hessian

from .explicit import explicit_of
from .matrices import Matrix, semicircle, with_spectrum
from .networks import case

SPREAD = torch.cat([torch.linspace(-3, 1, 395), torch.tensor([5.0, 6.5, 7.0, 9.0, 20.0])]).double()


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("largest", [20.0, 9.0, 7.0]),
        ("smallest", SPREAD[:3].tolist()),
        ("magnitude", [20.0, 9.0, 7.0]),
        ("ends", [20.0, 9.0, 7.0, SPREAD[2].item(), SPREAD[1].item(), -3.0]),
    ],
)
def test_both_ends_of_a_known_spectrum_are_found(which, expected):
    found = eigenvalues(with_spectrum(SPREAD), k=3, which=which, rtol=1e-9)
    assert found.converged, found.status
    torch.testing.assert_close(found.values, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=0)


def test_magnitude_finds_large_negative_eigenvalues():
    spectrum = torch.cat([torch.linspace(-1, 1, 97), torch.tensor([-8.0, 6.0, -5.0])]).double()
    found = eigenvalues(with_spectrum(spectrum), k=3, which="magnitude")
    torch.testing.assert_close(found.values, torch.tensor([-8.0, 6.0, -5.0]).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("which", ["largest", "smallest", "ends"])
def test_semicircle_edge_is_found_through_many_restarts(which):
    # The edge of a bulk has no gaps to speak of, and twelve vectors have to be let go again and again.
    matrix = semicircle(500)
    truth = torch.linalg.eigvalsh(matrix)
    found = eigenvalues(Matrix(matrix), k=3, which=which, rtol=1e-7, most_vectors=14)
    expected = {"largest": truth[-3:].flip(0), "smallest": truth[:3]}
    expected["ends"] = torch.cat([expected["largest"], expected["smallest"].flip(0)])
    assert found.converged, found.status
    assert found.products > 50
    torch.testing.assert_close(found.values, expected[which], rtol=1e-6, atol=0)


def test_memory_is_bounded_by_most_vectors(monkeypatch):
    asked = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **options: asked.append(shape) or empty(*shape, **options)
    )
    found = eigenvalues(Matrix(semicircle(500)), k=2, most_vectors=12)
    assert found.converged
    assert found.products > 24
    assert asked == [(13, 500)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rtol", [1e-2, 1e-4])
def test_errors_are_as_small_as_asked_and_residuals_are_bounds(dtype, rtol):
    spectrum = torch.cat([torch.linspace(-1, 1, 290), torch.logspace(0.1, 2, 10)]).double()
    for seed in range(5):
        operator = with_spectrum(spectrum, dtype=dtype, seed=seed)
        found = eigenvalues(operator, k=5, rtol=rtol, seed=seed)
        assert found.converged, found.status
        truth = torch.linalg.eigvalsh(operator.matrix.double())
        off = (found.values - truth[-5:].flip(0)).abs()
        assert (off <= rtol * found.values).all()
        nearest = (found.values[:, None] - truth[None]).abs().amin(1)
        assert (nearest <= found.residuals).all()
        measured = (operator.matrix.double() @ found.vectors.double()) - found.vectors.double() * found.values
        torch.testing.assert_close(measured.norm(dim=0), found.residuals, rtol=0.1, atol=2e-6 * 100)


def test_errors_are_of_the_size_of_the_real_ones():
    # Of an eigenvalue that stands apart the value is known far better than the residual says.
    spectrum = torch.cat([torch.linspace(-1, 1, 290), torch.tensor([2.0, 2.5, 3.0, 4.0])]).double()
    over, residual_over = [], []
    for seed in range(10):
        found = eigenvalues(with_spectrum(spectrum, seed=seed), k=3, rtol=1e-3, seed=seed)
        off = (found.values - torch.tensor([4.0, 3.0, 2.5]).double()).abs()
        assert (off <= found.errors).all()
        over.append(found.errors[2] / off[2])
        residual_over.append(found.residuals[2] / off[2])
    assert torch.stack(over).median() < 10
    assert torch.stack(residual_over).median() > 30


@pytest.mark.parametrize("name", ["layer norm", "causal attention", "tied"])
def test_of_networks_as_of_their_explicit_hessians(name):
    made = case(name)
    truth = torch.linalg.eigvalsh(explicit_of(name).hessian)
    found = eigenvalues(made.model, made.loss, made.batch, k=3, which="ends", rtol=1e-7)
    expected = torch.cat([truth[-3:], truth[:3]]).sort(descending=True).values
    assert found.converged, found.status
    torch.testing.assert_close(found.values, expected, rtol=1e-5, atol=1e-6 * float(truth.abs().max()))


def test_vectors_are_columns_in_the_order_of_the_operator():
    made = case("layer norm")
    operator = hessian(made.model, made.loss, made.batch)
    found = eigenvalues(operator, k=3, rtol=1e-10)
    assert found.vectors.shape == (operator.size, 3)
    torch.testing.assert_close(operator @ found.vectors, found.vectors * found.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(3, dtype=torch.float64))


def test_of_parts_of_the_hessian():
    made = case("layer norm")
    operator = hessian(made.model, made.loss, made.batch)
    explicit = explicit_of("layer norm")
    for part, truth in (
        (operator.gauss_newton, explicit.gauss_newton),
        (operator.residual, explicit.residual),
    ):
        found = eigenvalues(part, k=2, rtol=1e-7)
        expected = torch.linalg.eigvalsh(truth)[-2:].flip(0)
        torch.testing.assert_close(found.values, expected, rtol=1e-5, atol=1e-6)


def test_identity_and_zero_and_rank_one():
    identity = eigenvalues(Matrix(torch.eye(100).double()), k=3)
    assert identity.values.tolist() == pytest.approx([1, 1, 1], rel=1e-12)
    zero = eigenvalues(Matrix(torch.zeros(100, 100)), k=2, which="ends")
    assert zero.values.tolist() == [0, 0, 0, 0]
    vector = torch.arange(100).double()
    one = eigenvalues(Matrix(torch.outer(vector, vector)), k=3)
    assert one.values.tolist() == pytest.approx([float(vector @ vector), 0, 0], rel=1e-12, abs=1e-8)
    assert identity.converged
    assert zero.converged
    assert one.converged
    assert max(identity.products, zero.products, one.products) <= 8


def test_small_operators_are_found_whole_with_all_copies():
    spectrum = torch.tensor([3.0, 3.0, 3.0, 1.0, 1.0, -2.0])
    for k in (2, 6):
        found = eigenvalues(with_spectrum(spectrum), k=k)
        torch.testing.assert_close(found.values, spectrum[:k].double())
        assert found.products == 6


def test_eigenvectors_of_float32_are_float32_and_of_bfloat16_too_fine_to_be_bfloat16():
    assert eigenvalues(with_spectrum(SPREAD, dtype=torch.float32)).vectors.dtype == torch.float32
    half = with_spectrum(SPREAD, dtype=torch.bfloat16)
    found = eigenvalues(half, rtol=1e-2)
    assert found.vectors.dtype == torch.float32
    assert found.values[0] == pytest.approx(20.0, rel=0.02)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_very_small_and_very_large_operators_in_float32(scale):
    operator = Matrix((with_spectrum(SPREAD).matrix * scale).float())
    found = eigenvalues(operator, k=2)
    assert found.converged
    assert (found.values / scale).tolist() == pytest.approx([20.0, 9.0], rel=1e-5)


def test_same_seed_same_answer_and_few_products():
    operator = with_spectrum(SPREAD)
    first, second = eigenvalues(operator, k=3, seed=3), eigenvalues(operator, k=3, seed=3)
    assert torch.equal(first.values, second.values)
    assert torch.equal(first.vectors, second.vectors)
    assert first.products + second.products == operator.products
    assert first.products < 30


def test_random_numbers_of_the_caller_are_left_alone():
    before = torch.get_rng_state()
    eigenvalues(with_spectrum(SPREAD), k=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_too_few_products_is_said_and_still_bounded():
    matrix = semicircle(500)
    found = eigenvalues(Matrix(matrix), k=2, most_products=20)
    truth = torch.linalg.eigvalsh(matrix)
    assert not found.converged
    assert found.products == 20
    assert "not converged after 20 products" in found.status
    assert "most_products" in found.status
    assert ((found.values[:, None] - truth).abs().amin(1) <= found.residuals).all()


def test_an_operator_that_is_not_symmetric_is_noticed():
    matrix = with_spectrum(SPREAD).matrix
    odd = matrix + 0.01 * torch.randn_like(matrix)
    found = eigenvalues(Matrix(odd), k=2)
    assert not found.converged
    assert "symmetric" in found.status


def test_more_than_float32_can_tell_is_not_said_to_be_found():
    found = eigenvalues(with_spectrum(SPREAD, dtype=torch.float32), k=2, rtol=1e-9)
    assert not found.converged
    assert "float32" in found.status
    assert found.products < 30


def test_progress_goes_up_to_one():
    seen = []
    eigenvalues(with_spectrum(SPREAD), k=3, progress=lambda title, done: seen.append(done))
    assert seen[0] == 0
    assert seen[-1] == 1
    assert all(0 <= share <= 1 for share in seen)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 401}, "k is 401.*only 400"),
        ({"k": 201, "which": "ends"}, "402 eigenvalues"),
        ({"which": "biggest"}, "'biggest'.*largest, smallest, magnitude, ends"),
        ({"rtol": 0.0}, "rtol is 0"),
        ({"rtol": float("nan")}, "rtol is nan"),
        ({"k": 5, "most_products": 4}, "most_products is 4.*at least 5"),
    ],
)
def test_bad_options_are_named(options, said):
    with pytest.raises(UseError, match=said):
        eigenvalues(with_spectrum(SPREAD), **options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_products_that_are_not_finite_are_refused(bad):
    matrix = torch.eye(50)
    matrix[7, 7] = bad
    with pytest.raises(UseError, match="not finite"):
        eigenvalues(Matrix(matrix))


def test_a_quadratic_has_the_spectrum_of_its_inputs():
    x = torch.randn(200, 60).double()
    model = nn.Linear(60, 1, bias=False).double()
    found = eigenvalues(model, nn.functional.mse_loss, (x, torch.zeros(200, 1).double()), k=3)
    truth = torch.linalg.svdvals(x).square()[:3] * 2 / 200
    torch.testing.assert_close(found.values, truth, rtol=1e-5, atol=0)
