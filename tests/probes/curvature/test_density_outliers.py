"""Outliers of planted spectra are counted; a bulk alone has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.probes.curvature.density import outliers
from theodolite.probes.curvature.operator import hessian

from .matrices import Matrix, semicircle, with_spectrum, with_spikes


@pytest.mark.parametrize(("num", "seed"), [(1, 0), (3, 1), (9, 2)])
def test_spikes_over_a_semicircle_are_counted(num, seed):
    operator = with_spikes(semicircle(300, seed=seed), [2.0 + 0.5 * index for index in range(num)])
    truth = torch.linalg.eigvalsh(operator.matrix)
    found = outliers(operator, seed=seed)
    assert found.converged
    assert (len(found.above), len(found.below)) == (num, 0)
    torch.testing.assert_close(found.above, truth[-num:].flip(0), rtol=1e-3, atol=0)
    assert found.bulk[1] == pytest.approx(float(truth[-num - 1]), rel=2e-3)
    assert found.bulk[0] == pytest.approx(float(truth[0]), rel=2e-3)
    assert abs(found.by_density.value - num) < 4 * (2 * num / 4) ** 0.5


def test_both_sides_are_looked_at():
    found = outliers(with_spikes(semicircle(300), [3.0, -2.0, -2.5]))
    assert (len(found.above), len(found.below), found.num) == (1, 2, 3)
    assert found.below[0] < found.below[1] < -1.5


@pytest.mark.parametrize(
    "spectrum",
    [
        torch.linspace(-1, 1, 200),
        torch.linspace(0, 1, 200),
        torch.arange(1, 201).float().reciprocal(),
        torch.arange(1, 201).float() ** -2,
        torch.logspace(-3, 0, 200),
    ],
    ids=["uniform", "positive", "power law", "steep power law", "geometric"],
)
def test_a_bulk_alone_has_no_outliers_above(spectrum):
    assert len(outliers(with_spectrum(spectrum), most=10).above) == 0


def test_the_edge_of_random_matrices_is_no_outlier():
    found = [outliers(Matrix(semicircle(300, seed=seed)), most=10, seed=seed) for seed in range(4)]
    assert sum(one.num for one in found) == 0


def test_where_the_bulk_lies_does_not_matter():
    bulk = semicircle(300)
    here = outliers(with_spikes(bulk, [3.0, 2.0]))
    there = outliers(with_spikes(bulk + 200 * torch.eye(300), [3.0, 2.0]))
    assert (len(here.above), len(there.above)) == (2, 2)


def test_a_gap_among_the_outliers_does_not_end_them():
    assert len(outliers(with_spikes(semicircle(300), [10.0, 9.5, 3.0, 2.8])).above) == 4


def test_low_rank_stands_out_of_zero():
    spectrum = torch.cat([torch.zeros(200), torch.tensor([1.0, 2.0, 5.0])])
    found = outliers(with_spectrum(spectrum))
    assert found.above.tolist() == pytest.approx([5, 2, 1], rel=1e-3)
    assert found.bulk[1] == pytest.approx(0, abs=1e-6)


def test_copies_are_seen_by_the_density():
    operator = with_spectrum(torch.cat([torch.linspace(-1, 1, 300), torch.full((40,), 4.0)]))
    found = outliers(operator)
    assert len(found.above) < 20
    assert found.by_density.value == pytest.approx(40, rel=0.3)


def test_more_than_asked_for_are_not_looked_for():
    operator = with_spikes(semicircle(300), [2.0 + 0.5 * index for index in range(9)])
    assert len(outliers(operator, most=9).above) == 9
    assert len(outliers(operator, most=3).above) <= 3


def classifier(classes):
    """A network trained for a while on overlapping classes."""
    centres = torch.randn(classes, 12)
    targets = torch.arange(300) % classes
    inputs = centres[targets] + 3 * torch.randn(300, 12)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, nn.functional.cross_entropy, (inputs, targets)


@pytest.mark.parametrize("classes", [3, 6])
def test_of_a_classifier_they_and_the_edge_of_the_bulk_are_those_of_its_explicit_hessian(classes):
    # How many there are is not asserted: it is a finding about a network, and docs/spectrum.md has numbers.
    model, loss, batch = classifier(classes)
    operator = hessian(model, loss, batch)
    truth = torch.linalg.eigvalsh((operator @ torch.eye(operator.size)).double()).flip(0)
    found = outliers(model, loss, batch, most=10)
    torch.testing.assert_close(found.above, truth[: len(found.above)], rtol=2e-3, atol=0)
    assert found.bulk[1] == pytest.approx(float(truth[len(found.above)]), rel=2e-3)


def test_too_small_an_operator_is_refused():
    with pytest.raises(UseError, match="15 eigenvalues, too few"):
        outliers(with_spectrum(torch.ones(15)))
    with pytest.raises(UseError, match="most is 0"):
        outliers(with_spectrum(torch.ones(50)), most=0)


def test_progress_goes_from_the_density_to_the_eigenvalues():
    seen = []
    outliers(with_spikes(semicircle(300), [3.0]), progress=lambda title, done: seen.append(done))
    assert 0 < seen[0] < 0.1
    assert 0.5 in seen
    assert seen[-1] == 1
