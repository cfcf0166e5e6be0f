"""Hessian, Gauss–Newton and residual against explicit matrices in float64, through every kind of layer."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from theodolite.probes.curvature.operator import hessian

from .explicit import apart, between, explicit, explicit_of, sketch
from .networks import CASES, Case, case, next_token

names = pytest.mark.parametrize("name", CASES)
some = pytest.mark.parametrize("name", ["layer norm", "causal attention", "tied", "dropout"])
few = pytest.mark.parametrize("name", ["causal attention", "dropout"])


def dense(operator):
    """All columns, by a block of products with the identity."""
    return operator @ torch.eye(operator.size, dtype=operator.dtype)


def operator(made, **options):
    torch.manual_seed(12345)  # which is not what a dropout mask may come from
    return hessian(made.model, made.loss, made.batch, **options)


@names
def test_hessian_is_that_of_finite_differences_and_the_residual_is_what_gauss_newton_leaves(name):
    expected, found = explicit_of(name), operator(case(name))
    assert found.names == expected.names
    assert 30 < found.size < 400
    whole, first, rest = sketch(found), sketch(found.gauss_newton), sketch(found.residual)
    assert apart(whole, sketch(expected.hessian)) < 1e-6
    assert apart(found.gradient, expected.gradient) < 1e-12
    assert found.loss == pytest.approx(expected.loss, rel=1e-13)
    assert apart(first, sketch(expected.gauss_newton)) < 1e-6
    assert apart(rest, sketch(expected.residual)) < 1e-6
    for products in (whole, first):
        seen = between(products)
        assert apart(seen.T, seen) < 1e-9
    assert apart(first + rest, whole) < 1e-12
    # Neither part is negligible, so none of the above is idle.
    assert min(first.norm(), (whole - first).norm()) > 0.05 * whole.norm()


@some
def test_gauss_newton_is_positive(name):
    first = dense(operator(case(name)).gauss_newton)
    assert apart(first.T, first) < 1e-9
    eigenvalues = torch.linalg.eigvalsh((first + first.T) / 2)
    assert eigenvalues[0] >= -1e-10 * eigenvalues[-1]


@some
def test_vectors_blocks_and_dicts_give_the_same_products(name):
    found = operator(case(name))
    for each in (found, found.gauss_newton, found.residual):
        block = torch.randn(each.size, 2, dtype=torch.float64)
        products = each @ block
        assert products.shape == block.shape
        for column, product in zip(block.T, products.T, strict=True):
            torch.testing.assert_close(each @ column, product, rtol=1e-12, atol=1e-12)
            by_name = each @ each.split(column)
            assert {key: value.shape for key, value in by_name.items()} == each.shapes
            torch.testing.assert_close(each.flat(by_name), product, rtol=1e-12, atol=1e-12)
        assert each.products == 2 + 2 + 2


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("tanh", ["0.*"]),
        ("layer norm", ["1.*"]),
        ("gpt", ["readout.weight", "embed.weight"]),
        ("gpt", "blocks.*"),
        ("tied", ["readout.weight"]),
        ("multihead attention", ["attention.*"]),
    ],
)
def test_some_parameters_are_a_block_of_all(name, patterns):
    expected, found = explicit_of(name), operator(case(name), parameters=patterns)
    assert 0 < len(found.names) < len(expected.names)
    rows = expected.rows(found.names)
    assert apart(sketch(found), sketch(expected.hessian[rows][:, rows])) < 1e-6
    assert apart(sketch(found.gauss_newton), sketch(expected.gauss_newton[rows][:, rows])) < 1e-6
    assert apart(found.gradient, expected.gradient[rows]) < 1e-12


def test_frozen_parameters_are_left_out_and_still_count():
    made = case("layer norm")
    for parameter in made.model[0].parameters():
        parameter.requires_grad_(False)
    expected, found = explicit_of("layer norm"), operator(made)
    assert found.names == ("1.weight", "1.bias", "3.weight", "3.bias")
    rows = expected.rows(found.names)
    assert apart(dense(found), expected.hessian[rows][:, rows]) < 1e-6


@pytest.mark.parametrize("name", ["layer norm", "batch norm, train", "causal attention"])
def test_several_batches_are_their_mean_by_examples(name):
    made = case(name)
    inputs, targets = made.batch
    half = len(targets) // 2
    more = (torch.roll(inputs, 1, 1)[:half], torch.roll(targets, 1, 0)[:half])
    first, second = explicit_of(name), explicit(Case(made.model, made.loss, more))
    found = hessian(made.model, made.loss, [made.batch, more])
    for seen, one, other in (
        (sketch(found), sketch(first.hessian), sketch(second.hessian)),
        (sketch(found.gauss_newton), sketch(first.gauss_newton), sketch(second.gauss_newton)),
        (sketch(found.residual), sketch(first.residual), sketch(second.residual)),
        (found.gradient, first.gradient, second.gradient),
        (torch.tensor(found.loss), torch.tensor(first.loss), torch.tensor(second.loss)),
    ):
        mean = 2 / 3 * one + 1 / 3 * other
        assert apart(seen, mean) < 1e-6
        assert apart(mean, (one + other) / 2) > 1e-3


def test_a_loader_gives_the_hessian_of_all_its_examples():
    made = case("rms norm")
    pairs = torch.utils.data.TensorDataset(*made.batch)
    found = hessian(made.model, made.loss, torch.utils.data.DataLoader(pairs, batch_size=4))
    assert apart(dense(found), explicit_of("rms norm").hessian) < 1e-6


@pytest.mark.parametrize(
    ("name", "temperature"), [("layer norm", 0.2), ("dropout", 0.2), ("causal attention", 5.0), ("tied", 5.0)]
)
def test_a_temperature_divides_the_logits(name, temperature):
    made = case(name)
    expected = explicit(made, temperature=temperature)
    found = operator(made, temperature=temperature)
    assert apart(sketch(found), sketch(expected.hessian)) < 1e-6
    assert apart(sketch(found.gauss_newton), sketch(expected.gauss_newton)) < 1e-6
    assert apart(sketch(found.residual), sketch(expected.residual)) < 1e-6


@few
def test_a_product_is_of_the_weights_that_the_model_has_now(name):
    made = case(name)
    found = operator(made)
    before = sketch(found)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(1.1)
    after, expected = sketch(found), explicit(made)
    assert apart(before, after) > 1e-2
    assert apart(after, sketch(expected.hessian)) < 1e-6
    assert apart(sketch(found.residual), sketch(expected.residual)) < 1e-6


@pytest.mark.parametrize(
    ("name", "dtype", "close"),
    [
        ("layer norm", torch.float32, 1e-4),
        ("batch norm, train", torch.float32, 1e-4),
        ("batch norm, train", torch.bfloat16, 0.1),
        ("causal attention", torch.bfloat16, 0.1),
    ],
)
def test_lower_precision_is_accepted_and_near(name, dtype, close):
    made = case(name)
    model = copy.deepcopy(made.model).to(dtype)
    inputs, targets = made.batch
    batch = (inputs.to(dtype) if inputs.is_floating_point() else inputs, targets)
    # Of the weights and inputs as they are after rounding.
    rounded = inputs.to(dtype).double() if inputs.is_floating_point() else inputs
    expected = explicit(Case(copy.deepcopy(model).double(), made.loss, (rounded, targets)))
    found = hessian(model, made.loss, batch)
    assert found.dtype is dtype
    assert sketch(found).dtype is dtype
    assert apart(sketch(found).double(), sketch(expected.hessian)) < close
    assert apart(sketch(found.gauss_newton).double(), sketch(expected.gauss_newton)) < close


def test_a_linear_network_has_no_residual():
    model = nn.Linear(4, 3).double()
    batch = torch.randn(5, 4).double(), torch.arange(5) % 3
    found = hessian(model, F.cross_entropy, batch)
    assert dense(found).norm() > 0.1
    assert torch.equal(dense(found.residual), torch.zeros(15, 15).double())


def test_compiled_model_is_differentiated_as_it_was_written():
    made = case("gpt")
    compiled = torch.compile(made.model, backend="eager")
    compiled(made.batch[0])
    found = hessian(compiled, next_token, made.batch)
    assert found.names == explicit_of("gpt").names
    assert apart(sketch(found), sketch(explicit_of("gpt").hessian)) < 1e-6


def test_a_product_is_of_the_mode_and_the_statistics_that_the_model_has_now():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    batch = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    H = hessian(model, F.cross_entropy, batch)
    v = torch.randn(H.size, dtype=torch.float64)
    seen = [H @ v]
    model.eval()
    seen.append(H @ v)
    model[1].running_var.mul_(3.0)
    seen.append(H @ v)
    model[0].weight.data = model[0].weight.data * 2
    seen.append(H @ v)
    for one, other in itertools.pairwise(seen):
        assert not torch.allclose(one, other)
    assert torch.equal(seen[-1], hessian(model, F.cross_entropy, batch) @ v)
