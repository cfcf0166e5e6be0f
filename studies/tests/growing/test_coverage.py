"""How often certificates are wrong."""

import dataclasses

import torch

from theodolite.growing import certificate
from theodolite_studies.growing import coverage

from .tiny import TINY


def test_the_direction_is_minus_the_gradient_by_the_inverse_moments():
    problem = coverage.CoverageProblem.drawn(1.0)
    sample = problem.sample("x", 200)
    change = torch.zeros(coverage.WIDTH, coverage.FEATURES, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(problem.losses(sample, 1, change).mean(), change)
    moments = sample.features[1].T @ sample.features[1] / 200
    moments += coverage.RIDGE * moments.diagonal().mean() * torch.eye(coverage.FEATURES)
    torch.testing.assert_close(problem.direction(sample, 1) @ moments, -gradient)


def test_without_anything_to_gain_every_block_harms_and_only_misuse_certifies_one(monkeypatch):
    monkeypatch.setattr(coverage, "POOL", 10_000)
    few = dataclasses.replace(TINY, repetitions=8)
    honest = list(coverage.covered(few, "nothing", coverage.SPLITS[0]))
    misused = list(coverage.covered(few, "nothing", coverage.SPLITS[2]))
    assert [one["issued"] for one in honest] == [0, 0]
    assert all(one["truth"] < 0 for one in honest)
    assert [one["wrong"] for one in misused] == [2, 2]


def test_the_tally_counts_what_it_says():
    found = certificate(torch.ones(400), torch.zeros(400) + 0.5 * torch.rand(400), bound=1.0)
    tally = coverage.CertificateTally()
    for truth, unclipped in (((found.lower + found.mean) / 2, 1.0), (found.lower / 2, -1.0), (-0.1, -1.0)):
        tally.add(found, truth, unclipped)
    counts = {"issued": 3, "wrong": 1, "harmful": 2, "above": 2}
    assert {name: tally.record()[name] for name in counts} == counts
