"""The largest stable learning rates at the start, of gradient descent and of AdamW, by curvature."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.probes.curvature.density import Density, density
from theodolite.probes.curvature.eigenvalues import eigenvalues
from theodolite.probes.curvature.operator import Operator, hessian
from theodolite.surveying.curvature_setup import CurvatureSetup

BETA, EPS = 0.9, 1e-8
"""Of AdamW."""
ADAM_EDGE = 2 * (1 + BETA) / (1 - BETA)
"""38: with a fixed preconditioner P, steps of size η diverge on a quadratic loss if the largest eigenvalue of
`P^{-1/2} H P^{-1/2}` is above 38/η (Cohen et al., Adaptive gradient methods at the edge of stability)."""
BATCHES = 8
"""Batches for P. With one alone some entries of P are tiny by chance and dominate the result."""
RTOL = 0.01
MORE = 2
"""Further eigenvalues to compute, so that a poor start does not miss the first."""


@dataclass(frozen=True)
class SpectrumEnds:
    """The two ends of a spectrum."""

    largest: float
    smallest: float
    errors: tuple[float, float]
    converged: bool


@dataclass(frozen=True)
class Edges:
    """Largest stable learning rates by the initial curvature."""

    ends: SpectrumEnds
    """Of the Hessian."""
    preconditioned: float
    """The largest eigenvalue of `P^{-1/2} H P^{-1/2}`."""
    first: float
    """AdamW's first step overshoots beyond this."""
    converged: bool
    """Have all eigenvalues converged, to a hundredth?"""

    @property
    def descent(self) -> float:
        """Of gradient descent, `2/λ_max`."""
        return _over(2.0, self.ends.largest)

    @property
    def settled(self) -> float:
        """Of AdamW after some batches: 38 over its preconditioned sharpness."""
        return _over(ADAM_EDGE, self.preconditioned)


class Preconditioned(Operator):
    """`P^{-1/2} H P^{-1/2}` for a diagonal P, (P,): its eigenvalues are those of `P⁻¹H`."""

    def __init__(self, inner: Operator, diagonal: Tensor) -> None:
        self._inner, self._root = inner, diagonal.rsqrt()
        self.names, self.shapes, self.size = inner.names, inner.shapes, inner.size
        self.dtype, self.device = inner.dtype, inner.device
        self.products = 0

    def __matmul__(self, vector: Tensor) -> Tensor:  # type: ignore[override]
        root = self._root if vector.ndim == 1 else self._root[:, None]
        self.products += 1 if vector.ndim == 1 else vector.shape[1]
        return root * (self._inner @ (root * vector))


def find_spectrum(setup: CurvatureSetup) -> tuple[SpectrumEnds, Density]:
    """The ends and the density. Of the two estimates of an end, the farther one is right."""
    seed, effort = setup.context.seed, setup.effort
    setup.spend(effort.eigenvalues + effort.probes * effort.steps)
    ends = eigenvalues(
        setup.hessian,
        which="ends",
        rtol=RTOL,
        most_products=effort.eigenvalues,
        seed=seed,
        progress=lambda *_: setup.spend(0),
    )
    spectrum = density(
        setup.hessian,
        probes=effort.probes,
        steps=effort.steps,
        seed=seed,
        progress=lambda *_: setup.spend(0),
    )
    largest, smallest = float(ends.values[0]), float(ends.values[-1])
    errors = float(ends.errors[0]), float(ends.errors[-1])
    found = SpectrumEnds(
        max(largest, spectrum.largest), min(smallest, spectrum.smallest), errors, converged=ends.converged
    )
    return found, spectrum


def find_edges(setup: CurvatureSetup, ends: SpectrumEnds) -> Edges:
    """The edges of gradient descent and of AdamW."""
    setup.spend(1 + BATCHES + setup.effort.eigenvalues)
    slope = setup.hessian.gradient
    step = slope / (slope.abs() + EPS)
    bend = float(step @ (setup.hessian @ step))
    found = eigenvalues(
        Preconditioned(setup.hessian, second_moment(setup).sqrt() + EPS),
        k=min(1 + MORE, setup.hessian.size),
        rtol=RTOL,
        most_products=setup.effort.eigenvalues,
        seed=setup.context.seed,
        progress=lambda *_: setup.spend(0),
    )
    return Edges(
        ends,
        float(found.values[0]),
        _over(2 * float(slope @ step), bend),
        converged=ends.converged and found.converged,
    )


def second_moment(setup: CurvatureSetup) -> Tensor:
    """The mean square of the gradient at the start over a few batches, (P,): Adam's after as many steps."""
    total = torch.zeros_like(setup.hessian.gradient)
    for step in range(BATCHES):
        batch = setup.batch if step == 0 else setup.draw(step)
        found = hessian(setup.model, setup.workload.loss, batch, parameters=setup.parameters)
        try:
            total += found.gradient.square()
        except UseError as error:
            raise UseError(f"batch({setup.context.seed}, {step}): {error}") from error
    return total / BATCHES


def _over(bound: float, sharpness: float) -> float:
    if not (math.isfinite(bound) and math.isfinite(sharpness)):
        raise UseError(f"the curvature along a step is not finite ({sharpness:g}), so no edge is known")
    return bound / sharpness if sharpness > 0 else math.inf
