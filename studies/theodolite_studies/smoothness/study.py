"""Does γ find its way, and do Newton steps with an approximate Hessian converge linearly from anywhere?

Gradient-normalized smoothness, `th.controllers.NormalizedSmoothness`, in full batch and float64 on logistic
regression, softmax regression and a small network, with the Hessian, the Gauss–Newton matrix and the
empirical Fisher matrix; beside it gradient descent with the line search of the paper's code.

Of a linear model the Gauss–Newton matrix is the Hessian. There only the Fisher matrix is an approximation.

References:
    Semenov, Jaggi and Doikov, Gradient-normalized smoothness for optimization with approximate Hessians,
    2025.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from theodolite.controllers.smoothness import NormalizedSmoothness
from theodolite.core.calling import Loss
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.smoothness.report import CLAIMS, CONVEX, CURVATURES, figures, slowest

SEEDS, NETWORK_SEEDS = range(5), range(3)
STARTS = (1e-3, 1.0, 1e3)
"""γ of the first try."""
STEPS, NETWORK_STEPS, DESCENT_STEPS = 400, 1000, 2000
"""At most. On the network half as many as descent has, which is what decides a claim."""
NUM, FEATURES, CLASSES, WIDTH = 200, 12, 4, 12
LOWEST, NETWORK_LOWEST = 1e-11, 1e-5
"""Of the gap to the minimum, relative to the first: below it is rounding, or has long been decided."""
TOLERANCE, NETWORK_TOLERANCE = 1e-6, 1e-3
"""Of conjugate gradients."""
POINTS = 100
"""Steps that are kept of each run, if it has more."""


@dataclass(frozen=True)
class FullBatchProblem:
    """A model at its start, and all of its data."""

    model: nn.Module
    loss: Loss
    inputs: Tensor
    targets: Tensor

    def slope(self) -> tuple[float, Tensor]:
        """Loss and gradient, as one vector."""
        value = self.loss(self.model(self.inputs), self.targets)
        return value.item(), parameters_to_vector(torch.autograd.grad(value, list(self.model.parameters())))

    @property
    def vector(self) -> Tensor:
        """The weights."""
        return parameters_to_vector(self.model.parameters()).detach()


def cells(setting: Setting) -> Sequence[Cell]:
    """Problems by methods by seeds; for logistic regression other first γ too."""
    found: list[Cell] = []
    for seed in range(1) if setting.small else SEEDS:
        for problem in ("logistic",) if setting.small else (*CONVEX, "network"):
            found += [
                {"problem": problem, "method": method, "gamma": 1.0, "seed": seed}
                for method in (*CURVATURES, "descent")
                if problem in CONVEX or seed in NETWORK_SEEDS
            ]
        found += [
            {"problem": "logistic", "method": "gauss_newton", "gamma": gamma, "seed": seed}
            for gamma in (() if setting.small else STARTS)
            if gamma != 1.0
        ]
    return found


def run(cell: Cell, *_: object) -> Iterator[Record]:
    """One run, as one record."""
    problem = made(cell["problem"], cell["seed"])
    lowest = _lowest(problem) if cell["problem"] in CONVEX else 0.0
    if cell["method"] == "descent":
        yield _descended(problem, lowest)
    else:
        yield _stepped(problem, lowest, cell["method"], cell["gamma"])


def made(name: str, seed: int) -> FullBatchProblem:
    """Features of different sizes, labels with noise: classes overlap, and the convex ones have a minimum."""
    torch.manual_seed(seed)
    scales = torch.logspace(0, -1, FEATURES, dtype=torch.float64)
    inputs = torch.randn(NUM, FEATURES, dtype=torch.float64) * scales
    if name == "logistic":
        truth = inputs @ torch.randn(FEATURES, 1, dtype=torch.float64) * 3
        targets = (truth + 2 * torch.randn(NUM, 1, dtype=torch.float64) > 0).double()
        model: nn.Module = nn.Linear(FEATURES, 1)
        return FullBatchProblem(_zero(model.double()), binary_cross_entropy_with_logits, inputs, targets)
    teacher = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()
    drawn = 6 * teacher(inputs).detach() + 2 * torch.randn(NUM, CLASSES, dtype=torch.float64)
    if name == "softmax":
        return FullBatchProblem(
            _zero(nn.Linear(FEATURES, CLASSES).double()), cross_entropy, inputs, drawn.argmax(1)
        )
    torch.manual_seed(1000 + seed)
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()
    return FullBatchProblem(model, cross_entropy, inputs, drawn.argmax(1))


def _zero(model: nn.Module) -> nn.Module:
    for tensor in model.parameters():
        nn.init.zeros_(tensor)
    return model


def _stepped(problem: FullBatchProblem, lowest: float, curvature: Any, gamma: float) -> Record:
    stepper = NormalizedSmoothness(
        problem.model,
        problem.loss,
        curvature=curvature,
        gamma=gamma,
        rtol=TOLERANCE if lowest else NETWORK_TOLERANCE,
        most_products=2 * len(problem.vector),
    )
    losses: list[float] = []
    norms, gammas, work, works, ends = [], [], 0, [], []
    for _ in range(STEPS if lowest else NETWORK_STEPS):
        found = stepper.step((problem.inputs, problem.targets))
        work += 1 + found.tries + 2 * found.products  # a product is about two gradients
        if not losses:
            losses.append(found.loss)
            norms.append(found.gradient_norm)
            works.append(0)
        if not found.accepted:
            break
        losses.append(found.loss_after)
        norms.append(found.gradient_norm_after)
        gammas.append(found.gamma)
        works.append(work)
        ends.append(found.solved == "converged")
        if _is_there(losses, lowest):
            break
    counts = stepper.counts
    reach = float(problem.inputs.norm(dim=1).max())
    series = _series(losses, lowest, norms, works)
    return {
        "accepted": counts.accepted,
        "tries": counts.tries,
        "products": counts.products,
        "solved": float(np.mean(ends)),
        "reach": math.hypot(reach, 1.0),
        "least": min(gammas),
        "end": gammas[-1],
        **series,
        "gammas": _rounded([gammas[place] for place in series["steps"] if place < len(gammas)]),
    }


def _descended(problem: FullBatchProblem, lowest: float) -> Record:
    """x ← x − g/L, with L doubled until f falls by ‖g‖²/(2L), and halved after each step."""
    constant, work = 1.0, 1
    value, gradient = problem.slope()
    losses, norms, works = [value], [gradient.norm().item()], [0]
    for _ in range(DESCENT_STEPS):
        start = problem.vector
        for _ in range(40):
            vector_to_parameters(start - gradient / constant, problem.model.parameters())
            after, slope = problem.slope()
            work += 1
            if after <= value - float(gradient.square().sum()) / (2 * constant):
                break
            constant *= 2
        else:
            vector_to_parameters(start, problem.model.parameters())
            break
        constant, value, gradient = constant / 2, after, slope
        losses.append(value)
        norms.append(gradient.norm().item())
        works.append(work)
        if _is_there(losses, lowest):
            break
    return {"accepted": len(losses) - 1, "tries": work - 1, **_series(losses, lowest, norms, works)}


def _is_there(losses: Sequence[float], lowest: float) -> bool:
    return losses[-1] - lowest < (LOWEST if lowest else NETWORK_LOWEST) * (losses[0] - lowest)


def _lowest(problem: FullBatchProblem) -> float:
    """The minimum of a convex problem, by scipy."""
    start = problem.vector

    def value(vector: Any) -> tuple[float, Any]:
        vector_to_parameters(torch.from_numpy(vector), problem.model.parameters())
        loss, gradient = problem.slope()
        return loss, gradient.numpy()

    found = scipy.optimize.minimize(value, start.numpy(), jac=True, method="BFGS", options={"gtol": 1e-9})
    vector_to_parameters(start, problem.model.parameters())
    return float(found.fun)


def _series(losses: list[float], lowest: float, norms: list[float], works: list[int]) -> dict[str, Any]:
    """Some steps of each, evenly in the logarithm where there are many."""
    places = _places(len(losses))
    gaps = [(value - lowest) / (losses[0] - lowest) for value in losses]
    reached = {
        f"to {level:g}": next((step for step, gap in enumerate(gaps) if gap <= level), None)
        for level in (1e-2, 1e-4, 1e-6)
    }
    worked = {
        f"work to {level:g}": next((w for w, gap in zip(works, gaps, strict=True) if gap <= level), None)
        for level in (1e-2, 1e-4, 1e-6)
    }
    return {
        **reached,
        **worked,
        "slowest": slowest(gaps),
        "steps": places,
        "losses": _rounded([losses[place] for place in places]),
        "gaps": _rounded([gaps[place] for place in places]),
        "norms": _rounded([norms[place] for place in places]),
        "works": [works[place] for place in places],
    }


def _places(num: int) -> list[int]:
    if num <= POINTS:
        return list(range(num))
    return (np.unique(np.geomspace(1, num, POINTS).round().astype(int)) - 1).tolist()


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


STUDY = Study("smoothness", cells, run, CLAIMS, figures)
