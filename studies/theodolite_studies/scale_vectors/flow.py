"""The gradient flow of a scale vector before a linear map, as exact small experiments in float64.

`y = W(γ∘n)` is fitted to a linear teacher: `L = ½·mean‖(A − A*)n‖²` with `A = W diag γ` and `G = (A − A*)Σ`,
`Σ = mean n nᵀ`. The effective matrix flows as `dA/dt = −[G diag γ² + W diag(colsum(W∘G))]`, and
`c_j = γ_j² − ‖w_j‖²` stays; with decays μ of γ and λ of W it goes as `dc_j/dt = 2λ‖w_j‖² − 2μγ_j²`.
"""

# D columns, O outputs, R replicas

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.records import Record

WIDTH, OUTPUTS, SAMPLES = 8, 6, 256
TIME = 2.0
"""How long the flow without noise is followed."""
STEPS = tuple(2.0**-exponent for exponent in range(4, 12))
"""Of gradient descent."""
RATE = 0.3
"""Of decay, where there is any."""
NUDGE = 1e-5
"""By which the flow is followed to either side for a finite difference."""

DIMENSION, REPLICAS = 4, 256
NOISE_STEP, NOISE_TIME = 0.002, 64.0
NOISE, DECAY = 1.0, 1.0
"""q and λ of the flow with noise."""


@dataclass(frozen=True)
class FlowProblem:
    """A teacher, the second moments of the normed inputs, and where the flow starts."""

    target_OD: Array
    moments_DD: Array
    weight_OD: Array
    gain_D: Array

    @staticmethod
    def drawn(seed: int) -> FlowProblem:
        """Inputs are normed to a root mean square of one, as RMSNorm does."""
        generator = np.random.default_rng(seed)
        inputs = generator.normal(size=(SAMPLES, WIDTH)) * generator.uniform(0.5, 2.0, size=WIDTH)
        inputs /= np.sqrt((inputs**2).mean(1, keepdims=True))
        return FlowProblem(
            generator.normal(size=(OUTPUTS, WIDTH)),
            inputs.T @ inputs / SAMPLES,
            generator.normal(size=(OUTPUTS, WIDTH)) / np.sqrt(WIDTH),
            generator.uniform(0.5, 1.5, size=WIDTH),
        )

    def gradient(self, weight_OD: Array, gain_D: Array) -> Array:
        """`G`, of the effective matrix."""
        return (weight_OD * gain_D - self.target_OD) @ self.moments_DD

    def velocity(
        self, weight_OD: Array, gain_D: Array, *, on_weight: float = 0.0, on_gain: float = 0.0
    ) -> tuple[Array, Array]:
        """`dW/dt = −G diag γ − λW` and `dγ/dt = −colsum(W∘G) − μγ`."""
        gradient_OD = self.gradient(weight_OD, gain_D)
        return (
            -gradient_OD * gain_D - on_weight * weight_OD,
            -(weight_OD * gradient_OD).sum(0) - on_gain * gain_D,
        )


def experiments(seed: int) -> Iterator[Record]:
    """The records of one seed: each has `kind` and `seed`."""
    for record in (
        *_conservation(seed),
        _effective_flow(seed),
        *(
            _balance(seed, on_weight, on_gain)
            for on_weight, on_gain in ((RATE, 0.0), (RATE, RATE), (0.0, RATE))
        ),
        *(noisy_gain(seed, on_gain) for on_gain in (0.0, RATE)),
    ):
        yield {"part": "exact", "seed": seed, **record}


def balance(weight_OD: Array, gain_D: Array) -> Array:
    """`c_j = γ_j² − ‖w_j‖²`.

    >>> balance(np.array([[1.0, 0.0], [2.0, 3.0]]), np.array([3.0, 1.0]))
    array([ 4., -8.])
    """
    return gain_D**2 - (weight_OD**2).sum(0)


def gain_squared(conserved_D: Array, effective_OD: Array) -> Array:
    """`γ_j² = (c_j + √(c_j² + 4‖a_j‖²))/2`: what conservation makes of the gain when the map has grown to A.

    >>> gain_squared(np.array([3.0]), np.array([[2.0]]))
    array([4.])
    """
    return (conserved_D + np.sqrt(conserved_D**2 + 4 * (effective_OD**2).sum(0))) / 2


def noisy_gain(seed: int, on_gain: float) -> Record:
    """`E‖γ‖²` over time when noise of variance q acts on the gradients, for a vector `a = γ∘w` and λ > 0.

    The loss is `½‖a − a*‖²`. Without decay of γ there is no invariant law and `E‖γ‖²` has no bound. With μ
    Itô's formula and `−2aᵀ(a − a*) ≤ ½‖a*‖²` bound it by `(Dq + ½‖a*‖²)/2μ`, or where it starts if that is
    more.
    """
    generator = np.random.default_rng(1000 + seed)
    target_D = generator.normal(size=DIMENSION)
    gain_RD, weight_RD = np.ones((2, REPLICAS, DIMENSION))
    root = np.sqrt(NOISE * NOISE_STEP)
    moments = 2.0 ** np.arange(-3, np.log2(NOISE_TIME) + 1)
    due = {round(time / NOISE_STEP): time for time in moments}
    found: list[float] = []
    for step in range(1, round(NOISE_TIME / NOISE_STEP) + 1):
        gap_RD = gain_RD * weight_RD - target_D
        noise_RD, other_RD = root * generator.standard_normal((2, REPLICAS, DIMENSION))
        gain_RD, weight_RD = (
            gain_RD - NOISE_STEP * (gap_RD * weight_RD + on_gain * gain_RD) + noise_RD,
            weight_RD - NOISE_STEP * (gap_RD * gain_RD + DECAY * weight_RD) + other_RD,
        )
        if step in due:
            found.append(float((gain_RD**2).sum(1).mean()))
    bound = (DIMENSION * NOISE + 0.5 * (target_D**2).sum()) / (2 * on_gain) if on_gain else None
    return {
        "kind": "noise",
        "on_gain": on_gain,
        "times": list(due.values()),
        "values": found,
        "bound": None if bound is None else max(float(bound), float(DIMENSION)),
    }


def _conservation(seed: int) -> Iterator[Record]:
    """How far `c` has drifted at the end, and how well it foretells the gain, for each step size."""
    problem = FlowProblem.drawn(seed)
    start_D = balance(problem.weight_OD, problem.gain_D)
    for step in STEPS:
        weight_OD, gain_D = problem.weight_OD, problem.gain_D
        for _ in range(round(TIME / step)):
            down_OD, down_D = problem.velocity(weight_OD, gain_D)
            weight_OD, gain_D = weight_OD + step * down_OD, gain_D + step * down_D
        foretold_D = gain_squared(start_D, weight_OD * gain_D)
        yield {
            "kind": "conservation",
            "step": step,
            "drift": _largest(balance(weight_OD, gain_D) - start_D, start_D),
            "gain": _largest(foretold_D - gain_D**2, gain_D**2),
            "grown": float((gain_D**2).mean() / (problem.gain_D**2).mean()),
        }


def _effective_flow(seed: int) -> Record:
    """The formula of `dA/dt` against a central difference of A along the flow."""
    problem = FlowProblem.drawn(seed)
    weight_OD, gain_D = problem.weight_OD, problem.gain_D
    gradient_OD = problem.gradient(weight_OD, gain_D)
    formula_OD = -(gradient_OD * gain_D**2 + weight_OD * (weight_OD * gradient_OD).sum(0))
    ahead, behind = (_followed(problem, time) for time in (NUDGE, -NUDGE))
    seen_OD = (ahead[0] * ahead[1] - behind[0] * behind[1]) / (2 * NUDGE)
    return {"kind": "flow", "error": _largest(seen_OD - formula_OD, formula_OD)}


def _balance(seed: int, on_weight: float, on_gain: float) -> Record:
    """`dc/dt` against its formula, and `Σc` before and after."""
    problem = FlowProblem.drawn(seed)
    weight_OD, gain_D = problem.weight_OD, problem.gain_D
    formula_D = 2 * on_weight * (weight_OD**2).sum(0) - 2 * on_gain * gain_D**2
    ahead, behind = (
        _followed(problem, time, on_weight=on_weight, on_gain=on_gain) for time in (NUDGE, -NUDGE)
    )
    seen_D = (balance(*ahead) - balance(*behind)) / (2 * NUDGE)
    last = weight_OD, gain_D
    for _ in range(round(TIME / STEPS[-1])):
        last = _followed(problem, STEPS[-1], *last, on_weight=on_weight, on_gain=on_gain)
    start_D, end_D = balance(weight_OD, gain_D), balance(*last)
    record = {
        "kind": "balance",
        "on_weight": on_weight,
        "on_gain": on_gain,
        "error": _largest(seen_D - formula_D, formula_D),
        "drift": float((end_D - start_D).mean()),
    }
    if on_weight == on_gain:  # then c only shrinks
        record["shrunk"] = _largest(end_D - start_D * np.exp(-2 * on_gain * TIME), end_D)
    return record


def _followed(
    problem: FlowProblem,
    time: float,
    weight_OD: Array | None = None,
    gain_D: Array | None = None,
    **decays: float,
) -> tuple[Array, Array]:
    """The flow after a short time, by one Runge–Kutta step of order four."""
    weight_OD = problem.weight_OD if weight_OD is None else weight_OD
    gain_D = problem.gain_D if gain_D is None else gain_D
    slopes = [problem.velocity(weight_OD, gain_D, **decays)]
    for share in (0.5, 0.5, 1.0):
        up_OD, up_D = slopes[-1]
        slopes.append(
            problem.velocity(weight_OD + share * time * up_OD, gain_D + share * time * up_D, **decays)
        )
    weights = (1 / 6, 1 / 3, 1 / 3, 1 / 6)
    return (
        weight_OD + time * sum(part * slope[0] for part, slope in zip(weights, slopes, strict=True)),
        gain_D + time * sum(part * slope[1] for part, slope in zip(weights, slopes, strict=True)),
    )


def _largest(error: Array, against: Array) -> float:
    return float(np.abs(error).max() / np.abs(against).max())
