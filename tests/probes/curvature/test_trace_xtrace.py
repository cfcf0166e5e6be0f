"""XTrace against its definition, in which each basis is made anew without one test vector."""

from __future__ import annotations

import pytest
import torch

from theodolite.probes.curvature.sampling import Products, mean_of
from theodolite.probes.curvature.trace import XTrace

from .matrices import semicircle, with_spikes


def by_definition(matrix, tests):
    """A sample for each test vector (a row): the others give Q, it samples what Q leaves."""
    samples = []
    for index, own in enumerate(tests):
        others = torch.cat([tests[:index], tests[index + 1 :]])
        basis, _ = torch.linalg.qr(matrix @ others.T)
        rest = own - basis @ (basis.T @ own)
        samples.append(torch.trace(basis.T @ matrix @ basis) + rest @ matrix @ rest)
    return mean_of(torch.stack(samples))


@pytest.fixture
def grown():
    """Twelve test vectors, in two parts, the second of which is added to the first."""
    operator = with_spikes(semicircle(80) + 0.3 * torch.eye(80), [30.0, 20.0, -10.0])
    tests = torch.randn(12, 80).double().sign()
    xtrace = XTrace(Products(operator))
    for part in (tests[:6], tests[6:]):
        xtrace.add(part, part @ operator.matrix)
    return operator.matrix, tests, xtrace, operator.products


def test_is_what_its_definition_says(grown):
    matrix, tests, xtrace, products = grown
    expected = by_definition(matrix, tests)
    found = xtrace.estimate()
    assert found.value == pytest.approx(expected.value, rel=1e-10)
    assert xtrace.of_first().error == pytest.approx(expected.error, rel=1e-8)
    assert products == 12  # with the basis; those with the test vectors were made before


def test_error_is_at_least_what_the_second_half_changed(grown):
    matrix, tests, xtrace, _ = grown
    half, whole = by_definition(matrix, tests[:6]), by_definition(matrix, tests)
    assert xtrace.estimate().error == pytest.approx(max(whole.error, abs(whole.value - half.value)), rel=1e-8)
