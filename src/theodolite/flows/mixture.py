"""Gaussian mixtures, for which velocity, score, flow map and the least loss are known exactly."""

# B batch, K components, D dimensions, R dimensions that the centres span, N nodes of a quadrature

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.core.arguments import number, positive, whole
from theodolite.core.errors import UseError
from theodolite.data.batches import generator
from theodolite.flows.fields import Field, PathField
from theodolite.flows.interpolants import (
    LINEAR,
    Interpolant,
    check_times,
    find_interpolant,
    finite_times,
    refuse_infinite,
)

FEWEST_STEPS, MOST_STEPS = 32, 2**14
"""Steps of the solver of `flow_map`, doubled until the tolerance is met."""

NODES = {1: 128, 2: 64, 3: 24}
"""Nodes in each dimension of the Gauss–Hermite rule of `floor`, by the number of dimensions."""


@dataclass(frozen=True, eq=False)
class GaussianMixture:
    """Data `x_1 ~ Σ_k w_k N(m_k, std² I)`, with all that a flow from noise to it consists of.

    With `x_t = α x_1 + σ x_0` and `ν = α² std² + σ²`, component k of x_t is `N(α m_k, ν I)`. Given x_t and k,
    the mean of the data is `m_k + α std² (x_t − α m_k)/ν` and that of the noise `σ (x_t − α m_k)/ν`. The
    components are weighted with their posterior probabilities.

    Methods take points x (B, D) and times t (B,), and compute in the dtype and on the device of x. With
    `label`, an integer, they are those of that component alone. `path` is an interpolant or its name.

    Args:
        centres: (K, D).
        std: the standard deviation of each component, in each dimension.
        weights: of the components; equal if not given.

    >>> one = GaussianMixture([[3.0, 0.0]], std=1.0)
    >>> one.velocity(torch.zeros(1, 2), torch.zeros(1))  # at t = 0: the mean of the data minus x
    tensor([[3., 0.]])
    >>> round(one.floor(), 6), round(math.pi / 2, 6)
    (1.570796, 1.570796)
    """

    centres: Tensor
    std: float
    weights: Any = None

    def __post_init__(self) -> None:
        centres = torch.as_tensor(self.centres, dtype=torch.float64)
        if centres.ndim != 2 or not centres.numel() or not centres.isfinite().all():
            raise UseError(f"centres have the shape {tuple(centres.shape)}: give finite numbers (K, D)")
        weights = [1.0] * len(centres) if self.weights is None else self.weights
        shares = torch.as_tensor(weights, dtype=torch.float64)
        if shares.shape != centres.shape[:1] or not (shares > 0).all() or not shares.isfinite().all():
            raise UseError(f"weights are {shares.tolist()}: give {len(centres)} positive numbers")
        positive("std", self.std)
        object.__setattr__(self, "centres", centres)
        object.__setattr__(self, "weights", shares / shares.sum())

    def sample(
        self, num: int, *words: str | int, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Data (num, D) and labels (num,), which depend on the words alone, such as a seed and a step."""
        rng = generator("gaussian mixture", *words)
        labels = rng.choice(len(self.centres), size=whole("num", num, least=1), p=self.weights.numpy())
        centres = self.centres.numpy()[labels]
        data = centres + self.std * rng.standard_normal(centres.shape)
        return torch.from_numpy(data).to(dtype), torch.from_numpy(labels)

    def log_density(
        self, x: Tensor, t: Tensor, label: int | None = None, path: str | Interpolant = LINEAR
    ) -> Tensor:
        """The logarithm of the density of x_t, (B,)."""
        at = self._at(x, t, label, path)
        return at.joint.logsumexp(1) - x.shape[1] / 2 * (2 * math.pi * at.variance).log()

    def score(
        self, x: Tensor, t: Tensor, label: int | None = None, path: str | Interpolant = LINEAR
    ) -> Tensor:
        """The gradient of the logarithm of the density with respect to x, (B, D)."""
        at = self._at(x, t, label, path)
        return -at.deviation / at.variance[:, None]

    def denoised(
        self, x: Tensor, t: Tensor, label: int | None = None, path: str | Interpolant = LINEAR
    ) -> Tensor:
        """The mean of the data given x_t, (B, D)."""
        at = self._at(x, t, label, path)
        return at.centre + (at.alpha * self.std**2 / at.variance)[:, None] * at.deviation

    def velocity(
        self, x: Tensor, t: Tensor, label: int | None = None, path: str | Interpolant = LINEAR
    ) -> Tensor:
        """The mean of `α′ x_1 + σ′ x_0` given x_t, (B, D): the field that turns noise into data."""
        path = find_interpolant(path)
        at = self._at(x, t, label, path)
        t = t.to(x.dtype)
        alpha_rate, sigma_rate = path.alpha_rate(t), path.sigma_rate(t)
        refuse_infinite(t, (alpha_rate, sigma_rate), f"the velocity of the {path.name} path")
        growth = (at.alpha * alpha_rate * self.std**2 + path.sigma(t) * sigma_rate) / at.variance
        return alpha_rate[:, None] * at.centre + growth[:, None] * at.deviation

    def field(self, label: int | None = None, path: str | Interpolant = LINEAR) -> Field:
        """The velocity as a `field(x, t)`, for `sample` and guidance."""
        path = find_interpolant(path)
        return PathField(lambda x, t: self.velocity(x, t, label, path), path)

    def flow_map(
        self,
        x: Tensor,
        s: float | Tensor,
        t: float | Tensor,
        label: int | None = None,
        path: str | Interpolant = LINEAR,
        *,
        atol: float = 1e-6,
    ) -> Tensor:
        """Where the velocity carries the points x from time s to time t, (B, D).

        Closed for one component: `α(t) m + √(ν(t)/ν(s)) (x − α(s) m)`. For several, a Runge–Kutta method of
        order 4 in float64, whose number of steps is doubled until its error is estimated below `atol`. Every
        path gives the map of the linear path in other units, since `x_t/(α + σ)` lies on the linear path at
        the time `α/(α + σ)`. So t = 1 can be reached on every path.

        Args:
            x: points at time s.
            s: the first time, a number or (B,).
            t: the last one, before or after s.
            label: the component, or all.
            path: the interpolant or its name.
            atol: largest error of a coordinate.

        >>> one = GaussianMixture([[3.0]], std=0.5)
        >>> one.flow_map(torch.tensor([[0.0], [1.0]]), 0.0, 1.0)
        tensor([[3.0000],
                [3.5000]])
        """
        path = find_interpolant(path)
        (alpha_s, sigma_s), (alpha_t, sigma_t) = (
            (path.alpha(time)[:, None], path.sigma(time)[:, None]) for time in (_times(s, x), _times(t, x))
        )
        centres, _ = self._components(label)
        if len(centres) == 1:
            nu_s, nu_t = (a**2 * self.std**2 + b**2 for a, b in ((alpha_s, sigma_s), (alpha_t, sigma_t)))
            moved = alpha_t * centres.to(x.device) + (nu_t / nu_s).sqrt() * (
                x.double() - alpha_s * centres.to(x.device)
            )
            return moved.to(x.dtype)
        first, last = alpha_s / (alpha_s + sigma_s), alpha_t / (alpha_t + sigma_t)
        moved = self._integrate(x.double() / (alpha_s + sigma_s), first, last, positive("atol", atol))
        return (moved * (alpha_t + sigma_t)).to(x.dtype)

    def _integrate(self, x: Tensor, first: Tensor, last: Tensor, atol: float) -> Tensor:
        """The map of the linear path, in float64, with times (B, 1)."""
        field, before, steps = self.field(), None, FEWEST_STEPS
        while steps <= MOST_STEPS:
            after = _runge_kutta(field, x, first, last, steps)
            if before is not None:
                error = (after - before) / 15
                if error.abs().max() <= atol:
                    return after + error
            before, steps = after, 2 * steps
        raise UseError(
            f"{MOST_STEPS} steps do not reach atol = {atol:g}: give a larger atol, or a larger std"
        )

    def floor(self, path: str | Interpolant = LINEAR, *, labelled: bool = False) -> float:
        """The least possible `velocity_loss` of a network, a mean over dimensions and uniform times.

        It is `E|α′ x_1 + σ′ x_0 − v(x_t, t)|²/D`: what x_t leaves open about the pair of data and noise. With
        `ω = α σ′ − α′ σ` it is the mean over t and x_t of `ω² (std²/ν + σ²/ν² V/D)`, where V is the posterior
        variance of the centre. By Gauss–Legendre quadrature in t, and Gauss–Hermite quadrature in the
        dimensions that the centres span, to about 1e-5. If these are more than 3, by quasi-Monte Carlo, to
        about 1e-3.

        Args:
            path: the interpolant or its name. Times are those of `noisy`, which leaves out the end of
                the variance-preserving path.
            labelled: does the network know the component? Then V is 0.
        """
        path = find_interpolant(path)
        low, high = finite_times("velocity", path)
        places, shares = (torch.from_numpy(one) for one in np.polynomial.legendre.leggauss(64))
        t = low + (high - low) * (places + 1) / 2
        alpha, sigma = path.alpha(t), path.sigma(t)
        nu = alpha**2 * self.std**2 + sigma**2
        wronskian = alpha * path.sigma_rate(t) - path.alpha_rate(t) * sigma
        spread = torch.zeros_like(t) if labelled else self._posterior_variance(alpha, nu)
        inside = wronskian**2 * (self.std**2 / nu + sigma**2 / nu**2 * spread / self.centres.shape[1])
        return float((shares / 2 * inside).sum())

    def _posterior_variance(self, alpha: Tensor, nu: Tensor) -> Tensor:
        """The mean over x_t of the posterior variance of the centre, at each time."""
        middle = self.weights @ self.centres
        _, sizes, basis_RD = torch.linalg.svd(self.centres - middle, full_matrices=False)
        centres_KR = (self.centres - middle) @ basis_RD[sizes > 1e-12 * (1 + sizes.max())].T
        if not centres_KR.shape[1]:
            return torch.zeros_like(alpha)
        nodes_NR, shares_N = _gaussian_nodes(centres_KR.shape[1])
        found = []
        for one, variance in zip(alpha, nu, strict=True):
            x_KNR = one * centres_KR[:, None] + variance.sqrt() * nodes_NR
            distances = (x_KNR[..., None, :] - one * centres_KR).square().sum(-1)
            posterior_KNK = (self.weights.log() - distances / (2 * variance)).softmax(-1)
            second = posterior_KNK @ centres_KR.square().sum(1)
            spread_KN = second - (posterior_KNK @ centres_KR).square().sum(-1)
            found.append(self.weights @ (spread_KN @ shares_N))
        return torch.stack(found)

    def _components(self, label: int | None) -> tuple[Tensor, Tensor]:
        """Centres and weights of all components, or of one."""
        if label is None:
            return self.centres, self.weights
        one = whole("label", label, least=0, most=len(self.centres) - 1)
        return self.centres[one : one + 1], torch.ones(1, dtype=torch.float64)

    def _at(self, x: Tensor, t: Tensor, label: int | None, path: str | Interpolant) -> _Posterior:
        path = find_interpolant(path)
        if x.ndim != 2 or x.shape[1] != self.centres.shape[1]:
            raise UseError(f"x has the shape {tuple(x.shape)}: give (B, {self.centres.shape[1]})")
        check_times(t, x)
        centres, weights = (one.to(x) for one in self._components(label))
        t = t.to(x.dtype)
        alpha = path.alpha(t)
        variance = alpha**2 * self.std**2 + path.sigma(t) ** 2
        distances_BK = (x[:, None] - alpha[:, None, None] * centres).square().sum(2)
        joint_BK = weights.log() - distances_BK / (2 * variance[:, None])
        centre = joint_BK.softmax(1) @ centres
        return _Posterior(alpha, variance, joint_BK, centre, x - alpha[:, None] * centre)


@dataclass(frozen=True)
class _Posterior:
    """What x_t says of the component it is from."""

    alpha: Tensor
    variance: Tensor
    """ν of each x_t in each dimension, given the component, (B,)."""
    joint: Tensor
    """Log weight and log density of each component, up to a constant in k, (B, K)."""
    centre: Tensor
    """The posterior mean of the centre, (B, D)."""
    deviation: Tensor
    """x_t minus α times that, (B, D)."""


def three_gaussians() -> GaussianMixture:
    """Three components of standard deviation 0.2 in the plane, with centres at distance 1.2 from the origin.

    >>> three_gaussians().centres.norm(dim=1)
    tensor([1.2000, 1.2000, 1.2000], dtype=torch.float64)
    """
    angles = 2 * math.pi * torch.arange(3, dtype=torch.float64) / 3 + math.pi / 2
    return GaussianMixture(1.2 * torch.stack([angles.cos(), angles.sin()], 1), std=0.2)


def _times(time: float | Tensor, x: Tensor) -> Tensor:
    """A time for each point, in float64."""
    if not isinstance(time, Tensor):
        return torch.full(
            (len(x),), number("time", time, least=0, most=1), dtype=torch.float64, device=x.device
        )
    return check_times(time.double().expand(len(x)) if time.ndim == 0 else time.double(), x)


def _runge_kutta(
    field: Callable[[Tensor, Tensor], Tensor], x: Tensor, first: Tensor, last: Tensor, steps: int
) -> Tensor:
    """The classical method of order 4, from times `first` to `last`, (B, 1)."""
    length = (last - first) / steps

    def slope(x: Tensor, place: float) -> Tensor:
        return field(x, (first + place * length).clamp(0, 1)[:, 0])

    for step in range(steps):
        k1 = slope(x, step)
        k2 = slope(x + length / 2 * k1, step + 0.5)
        k3 = slope(x + length / 2 * k2, step + 0.5)
        k4 = slope(x + length * k3, step + 1)
        x = x + length / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x


def _gaussian_nodes(dimensions: int) -> tuple[Tensor, Tensor]:
    """Points (N, R) and weights (N,) for means over a standard normal distribution."""
    if dimensions in NODES:
        points, shares = (
            torch.from_numpy(one) for one in np.polynomial.hermite_e.hermegauss(NODES[dimensions])
        )
        shares = shares / shares.sum()
        grid = [torch.cartesian_prod(*[one] * dimensions).reshape(-1, dimensions) for one in (points, shares)]
        return grid[0], grid[1].prod(1)
    from scipy.stats import qmc  # takes a second to import

    drawn = qmc.MultivariateNormalQMC(np.zeros(dimensions), rng=0).random(2**12)
    return torch.from_numpy(drawn), torch.full((2**12,), 2.0**-12, dtype=torch.float64)
