"""What a class of networks costs in generalization: Γ, and what the theorems on depth expansion make of it.

The class holds all networks whose branches have parameters θ_k within a ball of radius R. If the output moves
by at most `A_k‖Δθ_k‖`, a net over the balls is one over the class (Lemma 1), and with probability 1 − δ no
network in it has a mean loss on n units further from its risk than (Corollary 2)

    Γ_n(δ) = 2L_ℓ/√n + 2B√(2p ln(3LRA√n)/n) + 3B√(ln(4/δ)/(2n))

References:
    A qualitative test-risk mechanism for scaling behavior in normalized residual networks, 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from theodolite.core.errors import UseError

MOST_UNITS = 1e300


@dataclass(frozen=True)
class Complexity:
    """The constants of Γ."""

    layers: int
    """L."""
    parameters: int
    """p, of the branches."""
    radius: float
    """R, the largest norm of one branch's parameters."""
    log_amplification: float
    """ln A, A the largest of all A_k."""
    loss_lipschitz: float
    """L_ℓ."""
    loss_bound: float
    """B."""

    def gamma(self, n: float, delta: float) -> float:
        """Γ_n(δ).

        >>> small = Complexity(10, 100_000, 10.0, 23.0, 2**0.5, 2.5)
        >>> round(small.gamma(50_000, 0.05))
        58
        """
        if not (n >= 1 and 0 < delta < 1):
            raise UseError(f"n is {n} and delta {delta}: n is a number of units, delta lies between 0 and 1")
        size = self.layers * self.radius
        cover = math.log(3 * size) + self.log_amplification + math.log(n) / 2 if size > 0 else -math.inf
        return (
            2 * self.loss_lipschitz / math.sqrt(n)
            + 2 * self.loss_bound * math.sqrt(2 * self.parameters * max(cover, 0.0) / n)
            + 3 * self.loss_bound * math.sqrt(math.log(4 / delta) / (2 * n))
        )

    def theorems(
        self, margin: float, n: float, m: float, delta: float, training: float = 0.0
    ) -> tuple[Theorem, ...]:
        """The right-hand sides of Theorems 1 to 3.

        Args:
            margin: how much lower the loss of the jumped model is than that of the old one: Δ_pop for the
                first two, Δ_te for the third. The second says nothing unless it is above 0.
            n: units to train on.
            m: units to test on.
            delta: δ.
            training: Δ_opt, what training took off the training loss after the jump.
        """
        refuse_rise(training)
        cost = 2 * self.gamma(n, delta)
        rate = 2 * (margin / 8) ** 2 / self.loss_bound**2 if self.loss_bound else math.inf
        tail = 6 * math.exp(-m * rate) if margin > 0 and rate > 0 else 1.0
        settled = math.ceil(math.log(6 / delta) / rate) if margin > 0 and rate > 0 else math.inf
        return (
            Theorem(
                1,
                "risk",
                cost - margin - training,
                delta,
                _least(lambda n: 2 * self.gamma(n, delta), margin + training),
                delta,
            ),
            Theorem(
                2,
                "test loss, through the risk",
                cost - margin / 2 - training,
                min(1.0, delta + tail),
                max(settled, _least(lambda n: 2 * self.gamma(n, delta), margin / 2 + training)),
                delta,
            ),
            Theorem(
                3,
                "test loss, directly",
                cost + 2 * self.gamma(m, delta) - margin - training,
                min(1.0, 2 * delta),
                _least(lambda n: 4 * self.gamma(n, delta), margin + training),
                delta,
            ),
        )


@dataclass(frozen=True)
class Theorem:
    """What one theorem says for given margins."""

    number: int
    about: str
    change: float
    """new − old is at most this: the theorem shows that the new model is better if it is below 0."""
    failure: float
    """The chance that this is not so."""
    needed: float
    """Units it takes until a gain is shown, as many to test on as to train on; inf: no number would."""
    delta: float

    @property
    def shows_gain(self) -> bool:
        """Is the new model shown to be better, but for a chance of 2δ?"""
        return self.change < 0 and self.failure < 1 and self.failure <= 2 * self.delta * (1 + 1e-9)


def refuse_rise(training: float) -> None:
    """Raise if training made the training loss worse: the theorems keep the better of the two models."""
    if not training >= 0:
        raise UseError(
            f"training is {training}: it is how much training took off the training loss, at least 0, as the "
            "model before it is kept where training made it worse"
        )


def _least(cost: Callable[[float], float], gain: float) -> float:
    """The least n at which a cost that falls with n is below a gain."""
    if gain <= 0 or cost(MOST_UNITS) >= gain:
        return math.inf
    low, high = 0.0, math.log(MOST_UNITS)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(math.exp(middle)) < gain else (middle, high)
    return float(math.ceil(math.exp(high))) if high < 30 else math.exp(high)
