"""Inversion with steps at multiples of FlowOpt's bound, and the bound of close and of random pairs."""

# B noises, D dimensions

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from theodolite.data import generator
from theodolite.flows import Inversion, field_of, invert, sample, step_bound
from theodolite.flows.inversion import Sampler
from theodolite_studies.framework.records import Record, short
from theodolite_studies.guidance.fields import EXACT, LAYOUTS, trained

STEPS = 20
"""Of the sampler."""
TOLERANCE = 1e-3
LONG, BRIEF = 500, 200
"""Iterations."""
SAFE, BEYOND = 0.9, 1.1
"""Steps below and above the bound, in units of it."""
MULTIPLES = (SAFE, BEYOND, 3.0, 10.0, 100.0)
RANDOM_PAIRS = 20_000


def inversions(
    layout: str,
    kind: str,
    seed: int,
    *,
    num_noises: int = 1000,
    num_targets: int = 200,
    multiples: Sequence[float] = MULTIPLES,
    iterations: int = LONG,
) -> Iterator[Record]:
    """The bound of both kinds of pairs, then inversions at multiples of it and with steps of their own."""
    sampler, mixture = sampler_of(layout, kind, seed), LAYOUTS[layout]
    noise = _normal("noise", seed, num_noises, mixture.centres.shape[1])
    bound = step_bound(sampler, noise, seed=seed)
    random = random_bound(sampler, _normal("pairs", seed, 2 * num_noises, mixture.centres.shape[1]), seed)
    yield {
        "kind": "bound",
        "close": short(bound.least),
        "median": short(bound.quantiles[-1][1]),
        "opposed": short(bound.opposed),
        "random": short(random),
    }
    target, _ = mixture.sample(num_targets, "targets", seed, dtype=torch.float64)
    for multiple in multiples:
        step = multiple * bound.positive
        found = invert(
            sampler, target, step=step, iterations=iterations, tolerance=TOLERANCE, patience=LONG, seed=seed
        )
        yield {"kind": "steps", "multiple": multiple, **_shares(found)}
    found = invert(sampler, target, iterations=BRIEF, tolerance=TOLERANCE, patience=BRIEF, seed=seed)
    yield {"kind": "auto", **_shares(found)}


def sampler_of(layout: str, kind: str, seed: int) -> Sampler:
    """Euler's method along the field without a label."""
    mixture = LAYOUTS[layout]
    if kind == EXACT:
        field = mixture.field()
    else:
        model = trained(layout, int(kind.split()[0]), seed)
        narrow = field_of(model, len(mixture.centres))

        def field(x: Tensor, t: Tensor) -> Tensor:
            return narrow(x.float(), t.float()).to(x.dtype)

    return lambda noise: sample(field, noise, steps=STEPS)


def random_bound(sampler: Sampler, noise: Tensor, seed: int, pairs: int = RANDOM_PAIRS) -> float:
    """The least ratio `2⟨dz, df⟩/|df|²` of random pairs of noises."""
    places = generator("guidance", "random pairs", seed).integers(len(noise), size=(2, pairs))
    first, second = torch.from_numpy(places[:, places[0] != places[1]])
    samples = sampler(noise)
    shifts_BD, changes_BD = noise[second] - noise[first], samples[second] - samples[first]
    ratios = 2 * (shifts_BD * changes_BD).sum(1) / changes_BD.square().sum(1)
    return ratios.min().item()


def _shares(found: Inversion) -> Record:
    """Shares of targets that have converged, after `BRIEF` iterations and at the end, or end further away."""
    residuals = found.residuals
    early = residuals[: BRIEF + 1].min(0).values <= TOLERANCE
    return {
        "early": short(early.double().mean().item()),
        "converged": short(found.converged),
        "diverged": short((residuals[-1] > residuals[0]).double().mean().item()),
        "iterations": found.iterations,
        "median residual": short(residuals.min(0).values.median().item()),
    }


def _normal(word: str, seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(generator("guidance", "inversion", word, seed).standard_normal(shape))
