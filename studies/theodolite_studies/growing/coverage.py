"""How often is a certificate wrong? A problem whose truth is known, estimated, chosen and certified anew.

The network is a readout of a stream, `U h`, and three blocks could be inserted, `h + Vφ_j(h)` with
`φ_j(h) = tanh(W_j h)`. Labels are drawn from `softmax(U(h + εAφ_0(h)))`: with ε = 0 the network is as good as
can be, and every block does harm. The stream is Student's with 4 degrees of freedom: some losses are large.
"""

# N units, D width, F features, K classes

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from theodolite import data
from theodolite.growing import Certificate, certificate, clip_from
from theodolite.growing.certificate import Method
from theodolite_studies.framework.records import Record
from theodolite_studies.growing.training import GrowingSetting

WIDTH, FEATURES, CLASSES, BLOCKS = 12, 64, 4, 3
UNITS = 1000
"""In each of the three splits."""
POOL = 50_000
"""Fresh units that the truth is read from."""
FREEDOM = 4
STEPS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of −MS⁻¹ that are tried on the second split."""
RIDGE = 0.01
"""What is added to S, in parts of its mean eigenvalue."""
MISUSED = 4
"""Where splits are misused, one in so many of the repetitions is made."""
DELTA = 0.05
METHODS: tuple[Method, ...] = get_args(Method)
REGIMES: Mapping[str, float] = {"nothing": 0.0, "little": 1.0, "much": 2.0}
"""The strength ε of the block that is missing."""
SPLITS = ("disjoint", "chosen on the third", "all on the third")
"""Three splits; the block and its step chosen on the split that certifies; the direction too from there."""


def covered(setting: GrowingSetting, regime: str, way: str) -> Iterator[Record]:
    """A record for each kind of bound: over many repetitions, how many certificates were issued and wrong."""
    problem = CoverageProblem.drawn(REGIMES[regime])
    pool = problem.sample("pool", POOL)
    known = problem.losses(pool)
    tallies = {method: CertificateTally() for method in METHODS}
    count = setting.repetitions if way == SPLITS[0] else -(-setting.repetitions // MISUSED)
    for repetition in range(count):
        splits = [problem.sample(f"{regime} {repetition} {split}", UNITS) for split in range(3)]
        if way == SPLITS[1]:
            splits[1] = splits[2]
        elif way == SPLITS[2]:
            splits = [splits[2]] * 3
        estimate, choose, certify = splits
        block, change = problem.chosen(estimate, choose)
        bound = clip_from(problem.losses(choose), problem.losses(choose, block, change))
        before, after = problem.losses(certify), problem.losses(certify, block, change)
        fresh = known - problem.losses(pool, block, change)
        for method, tally in tallies.items():
            found = certificate(before, after, delta=DELTA, bound=bound, method=method)
            tally.add(found, float(fresh.clamp(-bound, bound).mean()), float(fresh.mean()))
    for method, tally in tallies.items():
        yield {"method": method, "repetitions": count, **tally.record()}


@dataclass
class CertificateTally:
    """Certificates, counted."""

    issued: int = 0
    wrong: int = 0
    """Issued, and the clipped difference is no gain on fresh units."""
    harmful: int = 0
    """Issued, and the difference as it is is none, of which nothing was certified."""
    above: int = 0
    """The lower bound, issued or not, is above the truth."""
    lowers: list[float] = field(default_factory=list)
    truths: list[float] = field(default_factory=list)

    def add(self, found: Certificate, truth: float, unclipped: float) -> None:
        """One more."""
        self.issued += found.holds
        self.wrong += found.holds and truth <= 0
        self.harmful += found.holds and unclipped <= 0
        self.above += found.lower > truth
        self.lowers.append(found.lower)
        self.truths.append(truth)

    def record(self) -> Record:
        """Counts, and the mean bound beside the mean truth."""
        counts = {name: int(getattr(self, name)) for name in ("issued", "wrong", "harmful", "above")}
        means = {"lower": statistics.fmean(self.lowers), "truth": statistics.fmean(self.truths)}
        return {**counts, **{name: round(mean, 6) for name, mean in means.items()}}


@dataclass(frozen=True)
class UnitSample:
    """Units: what the network makes of them, the features of each block there, their labels."""

    logits_NK: Tensor
    features: tuple[Tensor, ...]
    labels_N: Tensor


@dataclass(frozen=True)
class CoverageProblem:
    """A network that lacks a block, or does not."""

    strength: float
    readout_KD: Tensor
    inner: tuple[Tensor, ...]
    missing_DF: Tensor

    @staticmethod
    def drawn(strength: float) -> CoverageProblem:
        """Always the same weights."""
        generator = data.generator("growing", "coverage")

        def normal(*shape: int) -> Tensor:
            return torch.from_numpy(generator.normal(size=shape)) * shape[-1] ** -0.5

        inner = tuple(normal(FEATURES, WIDTH) for _ in range(BLOCKS))
        return CoverageProblem(strength, normal(CLASSES, WIDTH), inner, normal(WIDTH, FEATURES))

    def sample(self, name: str, count: int) -> UnitSample:
        """Units drawn by name."""
        generator = data.generator("growing", "coverage", str(self.strength), name)
        stream = torch.from_numpy(generator.standard_t(FREEDOM, size=(count, WIDTH)))
        features = tuple(torch.tanh(stream @ inner.T) for inner in self.inner)
        logits = stream @ self.readout_KD.T
        truth = logits + self.strength * features[0] @ (self.readout_KD @ self.missing_DF).T
        noise = torch.from_numpy(generator.gumbel(size=(count, CLASSES)))
        return UnitSample(logits, features, (truth + noise).argmax(-1))

    def losses(self, sample: UnitSample, block: int = 0, change_DF: Tensor | None = None) -> Tensor:
        """The loss of each unit, with a block or without, (N,)."""
        logits = sample.logits_NK
        if change_DF is not None:
            logits = logits + sample.features[block] @ (self.readout_KD @ change_DF).T
        return torch.nn.functional.cross_entropy(logits, sample.labels_N, reduction="none")

    def direction(self, sample: UnitSample, block: int) -> Tensor:
        """`−MS⁻¹` of one of the blocks, (D, F): `M = E[gφᵀ]`, `S = E[φφᵀ]`."""
        features_NF = sample.features[block]
        error_NK = sample.logits_NK.softmax(-1) - torch.nn.functional.one_hot(sample.labels_N, CLASSES)
        signal_DF = (error_NK @ self.readout_KD).T @ features_NF / len(error_NK)
        moment_FF = features_NF.T @ features_NF / len(error_NK)
        moment_FF.diagonal().add_(RIDGE * moment_FF.diagonal().mean())
        return -torch.linalg.solve(moment_FF, signal_DF, left=False)

    def chosen(self, estimate: UnitSample, choose: UnitSample) -> tuple[int, Tensor]:
        """The block and the step along −MS⁻¹ that lower the loss of the second sample most."""
        tried = [
            (block, step * direction)
            for block in range(BLOCKS)
            for direction in [self.direction(estimate, block)]
            for step in STEPS
        ]
        return min(tried, key=lambda each: float(self.losses(choose, *each).mean()))
