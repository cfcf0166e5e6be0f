"""The largest steps that the curvature at the start allows, by gradient descent and by AdamW."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from theodolite.core.errors import UseError
from theodolite.probes.curvature.density import Density, density
from theodolite.probes.curvature.eigenvalues import eigenvalues
from theodolite.probes.curvature.operator import Operator, hessian
from theodolite.surveying.curvature_setup import Spot
from theodolite.surveying.site import Site
from theodolite.surveying.trials import LR

BETA, EPS = 0.9, 1e-8
"""Of AdamW."""
ADAM_EDGE = 2 * (1 + BETA) / (1 - BETA)
"""38: with a fixed preconditioner P, steps of size η diverge on a quadratic loss if the largest eigenvalue of
`P^{-1/2} H P^{-1/2}` is above 38/η (Cohen et al., Adaptive gradient methods at the edge of stability)."""
BATCHES = 8
"""Whose gradients make P. By one alone some entries of P are tiny by chance, and the edge would be theirs."""
RTOL = 0.01
MORE = 2
"""Further eigenvalues that are looked for, so that the first is not passed over by a poor start."""
MOST_STEPS = 20_000
"""Of a schedule, to see how high it goes."""


@dataclass(frozen=True)
class Ends:
    """The two ends of a spectrum."""

    largest: float
    smallest: float
    errors: tuple[float, float]
    converged: bool


@dataclass(frozen=True)
class Edges:
    """Learning rates from which on the loss goes up, as its curvature at the start has it."""

    ends: Ends
    """Of the Hessian."""
    preconditioned: float
    """The largest eigenvalue of `P^{-1/2} H P^{-1/2}`."""
    first: float
    """AdamW's first step overshoots beyond this."""
    converged: bool
    """Are all eigenvalues found, to a hundredth?"""

    @property
    def descent(self) -> float:
        """Of gradient descent, `2/λ_max`."""
        return _over(2.0, self.ends.largest)

    @property
    def settled(self) -> float:
        """Of AdamW, when it has seen some batches: 38 over its own sharpness."""
        return _over(ADAM_EDGE, self.preconditioned)


@dataclass(frozen=True)
class Rates:
    """Of the learning rates that are planned."""

    first: float
    highest: float


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


def find_spectrum(spot: Spot) -> tuple[Ends, Density]:
    """The ends and the density. Either may have reached farther out; the farther one is right."""
    seed = spot.site.seed
    spot.spend(spot.effort.eigenvalues + spot.effort.probes * spot.effort.steps)
    ends = eigenvalues(
        spot.hessian,
        which="ends",
        rtol=RTOL,
        most_products=spot.effort.eigenvalues,
        seed=seed,
        progress=lambda *_: spot.spend(0),
    )
    spectrum = density(
        spot.hessian,
        probes=spot.effort.probes,
        steps=spot.effort.steps,
        seed=seed,
        progress=lambda *_: spot.spend(0),
    )
    largest, smallest = float(ends.values[0]), float(ends.values[-1])
    errors = float(ends.errors[0]), float(ends.errors[-1])
    found = Ends(
        max(largest, spectrum.largest), min(smallest, spectrum.smallest), errors, converged=ends.converged
    )
    return found, spectrum


def find_edges(spot: Spot, ends: Ends) -> Edges:
    """The edges of gradient descent and of AdamW."""
    spot.spend(1 + BATCHES + spot.effort.eigenvalues)
    slope = spot.hessian.gradient
    step = slope / (slope.abs() + EPS)
    bend = float(step @ (spot.hessian @ step))
    k = min(1 + MORE, spot.hessian.size)
    found = eigenvalues(
        Preconditioned(spot.hessian, second_moment(spot).sqrt() + EPS),
        k=k,
        rtol=RTOL,
        most_products=spot.effort.eigenvalues,
        seed=spot.site.seed,
        progress=lambda *_: spot.spend(0),
    )
    return Edges(
        ends,
        float(found.values[0]),
        _over(2 * float(slope @ step), bend),
        converged=ends.converged and found.converged,
    )


def second_moment(spot: Spot) -> Tensor:
    """The mean square of the gradient at the start over a few batches, (P,): Adam's after as many steps."""
    total = torch.zeros_like(spot.hessian.gradient)
    for step in range(BATCHES):
        batch = spot.batch if step == 0 else spot.draw(step)
        found = hessian(spot.model, spot.workload.loss, batch, parameters=spot.parameters)
        try:
            total += found.gradient.square()
        except UseError as error:
            raise UseError(f"batch({spot.site.seed}, {step}): {error}") from error
    return total / BATCHES


def planned_rates(site: Site) -> Rates:
    """The first and the highest learning rate: the trials', or what the workload's schedule makes of it."""
    if site.workload.schedule is None:
        return Rates(LR, LR)
    # Some want another optimizer, or a loss at every step, or warn of the order of calls: the section on
    # schedules sees to that.
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        rates = list(_followed(site.workload.schedule))
        return Rates(rates[0], max(rates))
    return Rates(LR, LR)


def _followed(attach: Callable[[Optimizer], LRScheduler]) -> Iterator[float]:
    """The learning rates of a schedule, to its end as far as it tells it."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = attach(optimizer)
    yield float(optimizer.param_groups[0]["lr"])
    end = getattr(schedule, "T_max", None) or getattr(schedule, "total_steps", None) or MOST_STEPS // 20
    for _ in range(min(int(end), MOST_STEPS) - 1):
        optimizer.step()  # without gradients it moves nothing
        schedule.step()
        yield float(optimizer.param_groups[0]["lr"])


def _over(bound: float, sharpness: float) -> float:
    if not (math.isfinite(bound) and math.isfinite(sharpness)):
        raise UseError(f"the curvature along a step is not finite ({sharpness:g}), so that no edge is known")
    return bound / sharpness if sharpness > 0 else math.inf
