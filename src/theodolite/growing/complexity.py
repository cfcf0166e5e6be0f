"""The generalization cost Γ of a class of networks, and the theorems on depth expansion.

The class holds all networks whose branches have parameters θ_k in a ball of radius R. If the output moves by
at most `A_k‖Δθ_k‖`, a net over the balls is one over the class (Lemma 1). Then with probability 1 − δ, every
network in the class has a mean loss on n examples within this distance of its risk (Corollary 2):

    Γ_n(δ) = 2L_ℓ/√n + 2B√(2p ln(3LRA√n)/n) + 3B√(ln(4/δ)/(2n))

References:
    A qualitative test-risk mechanism for scaling behavior in normalized residual networks, 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from theodolite.core.errors import UseError

MOST_EXAMPLES = 1e300


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
            raise UseError(
                f"n is {n} and delta {delta}: give a number of examples, and a delta between 0 and 1"
            )
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
            n: number of training examples.
            m: number of test examples.
            delta: δ.
            training: Δ_opt, by how much training then lowered the training loss.
        """
        refuse_rise(training)
        cost = 2 * self.gamma(n, delta)
        rate = 2 * (margin / 8) ** 2 / self.loss_bound**2 if self.loss_bound else math.inf
        decides = margin > 0 and rate > 0
        tail = 6 * math.exp(-m * rate) if decides else 1.0
        settled = math.ceil(math.log(6 / delta) / rate) if decides else math.inf

        def needed(gain: float, times: int = 2) -> float:
            return _least(lambda n: times * self.gamma(n, delta), gain + training)

        first, second = cost - margin - training, cost - margin / 2 - training
        third = cost + 2 * self.gamma(m, delta) - margin - training
        both = min(1.0, delta + tail)
        return (
            Theorem(1, "risk", first, delta, needed(margin), delta),
            Theorem(2, "test loss, through the risk", second, both, max(settled, needed(margin / 2)), delta),
            Theorem(3, "test loss, directly", third, min(1.0, 2 * delta), needed(margin, 4), delta),
        )


@dataclass(frozen=True)
class Theorem:
    """What one theorem says for given margins."""

    number: int
    about: str
    change: float
    """Upper bound of new − old: below 0, the new model is better."""
    failure: float
    """The probability that this is wrong."""
    needed: float
    """Examples needed to show a gain, as many to test on as to train on; inf if no number is enough."""
    delta: float

    @property
    def shows_gain(self) -> bool:
        """Is the new model shown to be better, up to a probability of 2δ?"""
        return self.change < 0 and self.failure < 1 and self.failure <= 2 * self.delta * (1 + 1e-9)


def refuse_rise(training: float) -> None:
    """Raise if training raised the training loss: the theorems keep the better of the two models."""
    if not training >= 0:
        raise UseError(
            f"training is {training}: give by how much training lowered the training loss, at least 0 (if it "
            "rose, the model before is kept)"
        )


def _least(cost: Callable[[float], float], gain: float) -> float:
    """The least n at which a cost that falls with n is below a gain."""
    if gain <= 0 or cost(MOST_EXAMPLES) >= gain:
        return math.inf
    low, high = 0.0, math.log(MOST_EXAMPLES)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(math.exp(middle)) < gain else (middle, high)
    return float(math.ceil(math.exp(high))) if high < 30 else math.exp(high)
