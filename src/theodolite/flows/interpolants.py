"""Interpolants between noise and data, and conversions between data, noise, score and velocity."""

# B batch

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from theodolite.core.arguments import did_you_mean, one_of
from theodolite.core.errors import UseError

Quantity = Literal["data", "noise", "score", "velocity"]
"""What a network predicts at `(x_t, t)`: a mean given x_t, or the score of the density of x_t."""

Schedule = Callable[[Tensor], Tensor]
"""A coefficient of an interpolant as a function of time."""

CUT = 1e-3
"""Distance from an end of time at which a quantity is infinite."""

FEWEST_BETA, MOST_BETA = 0.1, 20.0
"""The noise rate of the variance-preserving SDE at data and at noise."""


@dataclass(frozen=True)
class Interpolant:
    """A path from noise `x_0 ~ N(0, I)` at t = 0 to data `x_1` at t = 1: `x_t = α(t) x_1 + σ(t) x_0`.

    Args:
        name: its name in messages.
        alpha: the coefficient α of the data, increasing to 1.
        sigma: the coefficient σ of the noise, decreasing to 0.
        alpha_rate: the derivative of α with respect to t.
        sigma_rate: the derivative of σ.

    >>> t = torch.tensor([0.25])
    >>> LINEAR.between(torch.tensor([[4.0]]), torch.tensor([[8.0]]), t)
    tensor([[5.]])
    >>> LINEAR.velocity(torch.tensor([[4.0]]), torch.tensor([[8.0]]), t)
    tensor([[4.]])
    """

    name: str
    alpha: Schedule
    sigma: Schedule
    alpha_rate: Schedule
    sigma_rate: Schedule

    def between(self, noise: Tensor, data: Tensor, t: Tensor) -> Tensor:
        """The point `x_t` between each noise and its data, at times t of shape (B,)."""
        check_times(t, data)
        return along(self.alpha(t), data) * data + along(self.sigma(t), data) * noise

    def velocity(self, noise: Tensor, data: Tensor, t: Tensor) -> Tensor:
        """The derivative `α′ x_1 + σ′ x_0` of that point with respect to time."""
        check_times(t, data)
        alpha_rate, sigma_rate = self.alpha_rate(t), self.sigma_rate(t)
        refuse_infinite(t, (alpha_rate, sigma_rate), f"the velocity of the {self.name} path")
        return along(alpha_rate, data) * data + along(sigma_rate, data) * noise


# Functions with names, so that a path can be sent to another process.


def _linear_alpha(t: Tensor) -> Tensor:
    return t


def _linear_sigma(t: Tensor) -> Tensor:
    return 1 - t


def _linear_sigma_rate(t: Tensor) -> Tensor:
    return -torch.ones_like(t)


def _sine(t: Tensor) -> Tensor:
    return (math.pi / 2 * t).sin()


def _cosine(t: Tensor) -> Tensor:
    """Exactly 0 at t = 1, unlike a rounded cosine."""
    return _sine(1 - t)


def _sine_rate(t: Tensor) -> Tensor:
    return math.pi / 2 * _cosine(t)


def _cosine_rate(t: Tensor) -> Tensor:
    return -math.pi / 2 * _sine(t)


def _log_alpha(t: Tensor) -> Tensor:
    """log α of the variance-preserving SDE: minus half of the integral of β from the data, at t = 1."""
    distance = 1 - t
    return -distance * (distance * (MOST_BETA - FEWEST_BETA) / 4 + FEWEST_BETA / 2)


def _preserving_alpha(t: Tensor) -> Tensor:
    return _log_alpha(t).exp()


def _preserving_sigma(t: Tensor) -> Tensor:
    return (-(2 * _log_alpha(t)).expm1()).sqrt()


def _preserving_alpha_rate(t: Tensor) -> Tensor:
    return _preserving_alpha(t) * ((1 - t) * (MOST_BETA - FEWEST_BETA) + FEWEST_BETA) / 2


def _preserving_sigma_rate(t: Tensor) -> Tensor:
    return -_preserving_alpha(t) * _preserving_alpha_rate(t) / _preserving_sigma(t)


LINEAR = Interpolant("linear", _linear_alpha, _linear_sigma, torch.ones_like, _linear_sigma_rate)
"""`α = t`, `σ = 1 − t`: flow matching and rectified flows."""

TRIGONOMETRIC = Interpolant("trigonometric", _sine, _cosine, _sine_rate, _cosine_rate)
"""`α = sin(πt/2)`, `σ = cos(πt/2)`: constant variance for data of unit variance."""

VARIANCE_PRESERVING = Interpolant(
    "variance-preserving",
    _preserving_alpha,
    _preserving_sigma,
    _preserving_alpha_rate,
    _preserving_sigma_rate,
)
"""The SDE of DDPM, `dx = −β x/2 dτ + √β dB` with β from 0.1 to 20, in reversed time `t = 1 − τ`.

`α = exp(−½ ∫β)`, `σ = √(1 − α²)`. At t = 0, α is 0.0066 and not 0. At t = 1, σ′ is infinite.
"""

INTERPOLANTS = {path.name: path for path in (LINEAR, TRIGONOMETRIC, VARIANCE_PRESERVING)}
"""By name."""


def find_interpolant(path: str | Interpolant) -> Interpolant:
    """An interpolant by its name, or itself.

    >>> find_interpolant("linear").sigma(torch.tensor(0.25))
    tensor(0.7500)
    >>> find_interpolant("linar")
    Traceback (most recent call last):
    theodolite.UseError: path is 'linar'. Did you mean 'linear'? Give linear, ... or an Interpolant
    """
    if isinstance(path, Interpolant):
        return path
    if isinstance(path, str) and path in INTERPOLANTS:
        return INTERPOLANTS[path]
    near = did_you_mean(path, INTERPOLANTS)
    raise UseError(f"path is {path!r}.{near} Give {', '.join(INTERPOLANTS)} or an Interpolant")


def convert(
    value: Tensor,
    x: Tensor,
    t: Tensor,
    source: Quantity,
    target: Quantity,
    path: str | Interpolant = LINEAR,
) -> Tensor:
    """Convert a prediction at `(x_t, t)` from one quantity to another.

    With the means `X = E[x_1 | x_t]` (data) and `ε = E[x_0 | x_t]` (noise):
    `x_t = α X + σ ε`, `score = −ε/σ`, `velocity = α′ X + σ′ ε`. All conversions follow; each is linear in
    `x_t` and in the value.

    Args:
        value: the prediction, (B, ...).
        x: the point x_t, (B, ...).
        t: times from 0 to 1, (B,).
        source: what `value` is.
        target: what it shall be.
        path: the interpolant or its name.

    Raises a `UseError` at times where the conversion divides by zero: from noise or score to data or velocity
    where α = 0, and from data to all others, or from any to the score, where σ = 0.

    >>> x, t = torch.tensor([[2.0]]), torch.tensor([0.75])
    >>> convert(torch.tensor([[8.0]]), x, t, "velocity", "data")  # x + (1 − t) v
    tensor([[4.]])
    >>> convert(torch.tensor([[8.0]]), x, t, "velocity", "noise")  # x − t v
    tensor([[-4.]])

    References:
        The principles of diffusion models, 2025. Ma et al., SiT, 2024.
    """
    path = find_interpolant(path)
    for name, quantity in (("source", source), ("target", target)):
        one_of(name, quantity, get_args(Quantity))
    check_times(t, x)
    if value.shape != x.shape:
        raise UseError(
            f"value has the shape {tuple(value.shape)} and x {tuple(x.shape)}: give one value for each x"
        )
    if source == target:
        return value
    on_x, on_value = _coefficients(t, source, target, path)
    refuse_infinite(t, (on_x, on_value), f"the {target} from the {source} on the {path.name} path")
    return along(on_x, x) * x + along(on_value, value) * value


def _coefficients(t: Tensor, source: Quantity, target: Quantity, path: Interpolant) -> tuple[Tensor, Tensor]:
    """p and q of `target = p x + q value`, each (B,)."""
    alpha, sigma = path.alpha(t), path.sigma(t)
    alpha_rate, sigma_rate = path.alpha_rate(t), path.sigma_rate(t)
    zero, one, wronskian = (
        torch.zeros_like(alpha),
        torch.ones_like(alpha),
        alpha * sigma_rate - alpha_rate * sigma,
    )
    data, noise = {
        "data": ((zero, one), (1 / sigma, -alpha / sigma)),
        "noise": ((1 / alpha, -sigma / alpha), (zero, one)),
        "score": ((1 / alpha, sigma**2 / alpha), (zero, -sigma)),
        "velocity": (
            (sigma_rate / wronskian, -sigma / wronskian),
            (-alpha_rate / wronskian, alpha / wronskian),
        ),
    }[source]
    if target == "data":
        return data
    if target == "noise":
        return noise
    if target == "score":
        return -noise[0] / sigma, -noise[1] / sigma
    return (
        alpha_rate * data[0] + sigma_rate * noise[0],
        alpha_rate * data[1] + sigma_rate * noise[1],
    )


def finite_times(predict: Quantity, path: Interpolant) -> tuple[float, float]:
    """The times at which the target of training is finite: 0 and 1, or `CUT` away from them.

    >>> finite_times("velocity", LINEAR), finite_times("score", LINEAR)
    ((0.0, 1.0), (0.0, 0.999))
    """
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    sizes = {
        "data": torch.ones_like(ends),
        "noise": torch.ones_like(ends),
        "score": 1 / path.sigma(ends),
        "velocity": path.alpha_rate(ends) + path.sigma_rate(ends),
    }[predict]
    first, last = sizes.isfinite().tolist()
    return (0.0 if first else CUT), (1.0 if last else 1 - CUT)


def along(values: Tensor, x: Tensor) -> Tensor:
    """Values of shape (B,) as (B, 1, …, 1), to be multiplied with x, in its dtype."""
    return values.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))


def check_times(t: Any, x: Tensor, name: str = "t") -> Tensor:
    """A tensor of times from 0 to 1, one for each example of x."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise UseError(
            f"{name} is {t!r}: give a tensor of times from 0 (noise) to 1 (data), one for each example"
        )
    if t.shape != x.shape[:1]:
        raise UseError(
            f"{name} has the shape {tuple(t.shape)} for x {tuple(x.shape)}: give one time for each x"
        )
    if not ((t >= 0) & (t <= 1)).all():
        wrong = t[~((t >= 0) & (t <= 1))][0].item()
        raise UseError(f"{name} holds {wrong:g}: times go from 0 (noise) to 1 (data)")
    return t


class InfiniteError(UseError):
    """A quantity is infinite or undefined at a time; `instead` is the nearest time to take."""

    def __init__(self, what: str, time: float) -> None:
        self.problem, self.time = f"at t = {time:g}, {what} is infinite or undefined", time
        self.instead = CUT if time < 0.5 else 1 - CUT
        super().__init__(f"{self.problem}: take t = {self.instead:g} instead")


def refuse_infinite(t: Tensor, coefficients: tuple[Tensor, ...], what: str) -> None:
    """Raise an `InfiniteError` if a coefficient of a quantity is not finite at one of the times."""
    bad = ~torch.stack([one.isfinite() for one in coefficients]).all(0)
    if bad.any():
        raise InfiniteError(what, t[bad][0].item())
