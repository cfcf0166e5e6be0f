"""Noise-limited problems on which schedules are compared: many runs of one problem at a time.

A problem is trained with R schedules and learning rates at once, each on weights of its own and all with the
same noise or batches: a row of every tensor is a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = list[Tensor]
"""Each (R, …)."""


@dataclass(frozen=True)
class NoisyProblem:
    """What is trained, by which rule, and what it is judged by."""

    steps: int
    rates: tuple[float, ...]
    """Peak learning rates that are tried."""
    adam: bool
    start: Callable[[int], Weights]
    """Weights of so many runs."""
    loss: Callable[[Weights, torch.Generator], Tensor]
    """The loss of one step, (R,), with noise drawn from the generator."""
    judge: Callable[[Weights], Tensor]
    """What is to be small at the end, (R,)."""

    @property
    def norm(self) -> str:
        """By which norm its schedules are refined."""
        return "l1" if self.adam else "l2"


def train(problem: NoisyProblem, factors: Tensor, rates: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """What each run is judged at the end (inf if it diverged), (R,), and its gradient norms, (R, steps)."""
    draw = torch.Generator().manual_seed(seed)
    weights = [weight.requires_grad_() for weight in problem.start(len(rates))]
    means = [torch.zeros_like(weight) for weight in weights]
    squares = [torch.zeros_like(weight) for weight in weights]
    norms = torch.zeros(len(rates), problem.steps, dtype=torch.float64)
    for step in range(problem.steps):
        slopes = torch.autograd.grad(problem.loss(weights, draw).sum(), weights)
        norms[:, step] = _norm(slopes, problem.adam)
        with torch.no_grad():
            lrs = rates * factors[:, step]
            for weight, slope, mean, square in zip(weights, slopes, means, squares, strict=True):
                update = slope
                if problem.adam:
                    mean.lerp_(slope, 0.1)
                    square.lerp_(slope.square(), 0.01)
                    update = (mean / (1 - 0.9 ** (step + 1))) / (
                        (square / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8
                    )
                weight -= lrs.view(-1, *[1] * (weight.ndim - 1)) * update
    with torch.no_grad():
        judged = problem.judge(weights).double()
    return torch.where(judged.isfinite(), judged, torch.inf), norms


def quadratic(seed: int, *, steps: int = 1000) -> NoisyProblem:
    """½ Σ λ_i θ_i², λ from 0.01 to 1, gradients with noise of standard deviation 1; from θ = 10."""
    curved = torch.logspace(-2, 0, 32, dtype=torch.float64)

    def loss(weights: Weights, draw: torch.Generator) -> Tensor:
        noise = torch.randn(32, generator=draw, dtype=torch.float64)
        return (0.5 * curved * weights[0].square() + noise * weights[0]).sum(1)

    return NoisyProblem(
        steps,
        _halves(-16, 3),
        False,
        lambda runs: [torch.full((runs, 32), 10.0, dtype=torch.float64)],
        loss,
        lambda weights: (0.5 * curved * weights[0].square()).sum(1),
    )


def logistic(seed: int, *, steps: int = 1000) -> NoisyProblem:
    """Logistic regression on 500 points of 20 features of unlike size, a tenth of the labels wrong, 4 a step.

    Judged by the loss on all points above its minimum.
    """
    draw = torch.Generator().manual_seed(1000 + seed)
    sizes = torch.logspace(-1, 0.5, 20, dtype=torch.float64)
    points = torch.randn(500, 20, generator=draw, dtype=torch.float64) * sizes
    truth = torch.randn(20, generator=draw, dtype=torch.float64)
    labels = torch.where(points @ truth > 0, 1.0, -1.0).double()
    labels[torch.rand(500, generator=draw) < 0.1] *= -1
    least = _minimum(points, labels)

    def on(weights: Weights, points: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-labels * (weights[0] @ points.T)).mean(1)

    def loss(weights: Weights, draw: torch.Generator) -> Tensor:
        some = torch.randint(500, (4,), generator=draw)
        return on(weights, points[some], labels[some])

    return NoisyProblem(
        steps,
        _halves(-14, 5),
        False,
        lambda runs: [torch.zeros(runs, 20, dtype=torch.float64)],
        loss,
        lambda weights: on(weights, points, labels) - least,
    )


def mlp(seed: int, *, steps: int = 500, adam: bool = False) -> NoisyProblem:
    """A tanh network 10–32–32–5 on a mixture of Gaussians, a tenth of the labels wrong, 16 new points a step.

    Judged by the loss on 2048 other points.
    """
    draw = torch.Generator().manual_seed(2000 + seed)
    centres = torch.randn(5, 10, generator=draw)

    def sample(num: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        true = torch.randint(5, (num,), generator=draw)
        points = centres[true] + torch.randn(num, 10, generator=draw)
        wrong = torch.rand(num, generator=draw) < 0.1
        return points, torch.where(wrong, torch.randint(5, (num,), generator=draw), true)

    shapes = [(10, 32), (32, 32), (32, 5)]
    drawn = [torch.randn(shape, generator=draw) / math.sqrt(shape[0]) for shape in shapes]
    others = sample(2048, draw)

    def start(runs: int) -> Weights:
        vectors = [torch.zeros(runs, 1, shape[1]) for shape in shapes]
        return [*(weight.expand(runs, -1, -1).clone() for weight in drawn), *vectors]

    def on(weights: Weights, points: Tensor, labels: Tensor) -> Tensor:
        at = points.expand(len(weights[0]), -1, -1)
        for weight, vector in zip(weights[:2], weights[3:5], strict=True):
            at = torch.tanh(torch.baddbmm(vector, at, weight))
        logits = torch.baddbmm(weights[5], at, weights[2])
        return -logits.log_softmax(2)[:, torch.arange(len(labels)), labels].mean(1)

    return NoisyProblem(
        steps,
        _halves(-18, -2) if adam else _halves(-10, 4),
        adam,
        start,
        lambda weights, draw: on(weights, *sample(16, draw)),
        lambda weights: on(weights, *others),
    )


def mlp_adam(seed: int, *, steps: int = 500) -> NoisyProblem:
    """The same network with Adam, whose schedule is refined by l1 norms."""
    return mlp(seed, steps=steps, adam=True)


PROBLEMS: dict[str, Callable[..., NoisyProblem]] = {
    "quadratic": quadratic,
    "logistic": logistic,
    "mlp": mlp,
    "mlp-adam": mlp_adam,
}


def _halves(low: int, high: int) -> tuple[float, ...]:
    """Powers of √2."""
    return tuple(2 ** (half / 2) for half in range(low, high + 1))


def _norm(slopes: tuple[Tensor, ...], adam: bool) -> Tensor:
    if adam:
        return sum((slope.abs().flatten(1).sum(1) for slope in slopes), torch.zeros(())).double()
    return sum((slope.square().flatten(1).sum(1) for slope in slopes), torch.zeros(())).double().sqrt()


def _minimum(points: Tensor, labels: Tensor) -> float:
    """The least loss of a logistic regression, by Newton's method."""
    at = torch.zeros(points.shape[1], dtype=torch.float64)
    for _ in range(50):
        chance = torch.sigmoid(-labels * (points @ at))
        slope = -(points * (labels * chance)[:, None]).mean(0)
        curved = (points.T * (chance * (1 - chance))) @ points / len(points)
        at = at - torch.linalg.solve(curved, slope)
    return float(torch.nn.functional.softplus(-labels * (points @ at)).mean())
