"""Does Lion keep every weight within 1/λ, and does its Lyapunov function decrease?

Lion is `x ← x − ε(sign(β₁m + (1 − β₁)g) + λx)`, `m ← β₂m + (1 − β₂)g`. An entry outside of 1/λ comes nearer
by the factor `1 − ελ` at least in each step, whatever the gradient. Within, a function of the paper's form

    H(x, m) = f(x) + c·(‖m‖₁ + λ⟨m, x⟩),   c = ε'β₁/(ε'λ(1 − β₁) + 1 − β₂),   ε' = ε/(1 − ελ)

changes by at most `½Lε'²‖s + λx‖²` in a step along the sign s, for f with gradients of Lipschitz constant L.
It is proved by `K(m⁺) − K(m) ≤ ⟨s, m⁺ − m⟩` for K = ‖·‖₁, as m, m⁺ and what s is the sign of lie on one line
in this order. (The paper's m has the other sign, and its decay is of the new x: Lion's, with ε' for ε.)

References:
    Chen, Liu, Liang and Liu, Lion secretly solves constrained optimization, as Lyapunov predicts, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.lion.report import CLAIMS, figures

BETAS = (0.9, 0.99)
SIZES = (0.1, 0.03, 0.01, 0.003, 0.001)
"""ελ on the quadratics."""
SEEDS = range(5)
DIMENSIONS = 40
CONDITION = 100.0
DECAYS = (4.0, 16.0)
"""λ of the networks, whose weights start with entries of up to about 1/2."""
NETWORK_LR, NETWORK_STEPS = 2**-8, 1500
POINTS = 48
"""Steps that are kept of each run."""


def cells(setting: Setting) -> Sequence[Cell]:
    """Quadratics from outside and from inside, and networks."""
    seeds, sizes = (range(1), (0.1, 0.01)) if setting.small else (SEEDS, SIZES)
    found: list[Cell] = []
    for seed in seeds:
        found += [{"part": "fall", "pull": pull, "size": 0.01, "seed": seed} for pull in ("in", "out")]
        found += [{"part": "box", "pull": "", "size": size, "seed": seed} for size in sizes]
        if seed < 3:
            found += [{"part": "network", "pull": "", "size": decay, "seed": seed} for decay in DECAYS]
    return found


def run(cell: Cell, *_: object) -> Iterator[Record]:
    """One run, as one record."""
    torch.manual_seed(cell["seed"])
    part: Callable[[Cell], Record] = {"fall": _fall, "box": _box, "network": _network}[cell["part"]]
    yield part(cell)


@dataclass(frozen=True)
class LionPath:
    """What is seen of a run at every step, from the start on."""

    largest: list[float]
    """λ‖x‖_∞."""
    heights: list[float]
    """H."""
    losses: list[float]
    excess: list[float]
    """By how much H rose beyond what the theorem allows, in parts of that; where L is known."""


def follow(
    weights: Tensor,
    evaluate: Callable[[], Tensor],
    *,
    lr: float,
    decay: float,
    steps: int,
    smoothness: float = math.nan,
    betas: tuple[float, float] = BETAS,
) -> LionPath:
    """Train one vector of weights by Lion, with the loss and H of every point on the way."""
    from theodolite.optimizers import OPTIMIZERS

    options = {"lr": lr, "weight_decay": decay}
    optimizer = OPTIMIZERS["lion"].maker({"betas": betas})([{"params": [weights], **options}])
    implicit = lr / (1 - lr * decay)
    share = implicit * betas[0] / (implicit * decay * (1 - betas[0]) + 1 - betas[1])
    followed = LionPath([], [], [], [])
    momentum, before = torch.zeros_like(weights), weights.detach().clone()
    for step in range(steps + 1):
        loss = evaluate()
        with torch.no_grad():
            height = loss + share * (momentum.abs().sum() + decay * (momentum * weights).sum())
            followed.largest.append(decay * weights.abs().max().item())
            followed.losses.append(loss.item())
            followed.heights.append(height.item())
            if step:
                # The sign from what it did: x − x⁺ = ε'(s + λx⁺).
                allowed = 0.5 * smoothness * (before - weights).square().sum().item()
                rose = followed.heights[-1] - followed.heights[-2]
                followed.excess.append((rose - allowed) / allowed if allowed else 0.0)
        if step == steps:
            break
        before = weights.detach().clone()
        weights.grad = torch.autograd.grad(loss, weights)[0]
        optimizer.step()
        momentum = optimizer.state[weights]["exp_avg"]
    return followed


def _fall(cell: Cell) -> Record:
    """From ten times the bound, to a minimum within reach or one far outside."""
    curvature, _ = _quadratic(1.0)
    start = 10 * torch.randn(DIMENSIONS, dtype=torch.float64)
    centre = 1000 * start.sign() if cell["pull"] == "out" else torch.zeros_like(start)
    if cell["pull"] == "out":  # each entry apart: others would pull it back
        curvature = curvature.diagonal().diag()
    weights = torch.nn.Parameter(start.clone())
    followed = follow(
        weights,
        lambda: _height(curvature, weights - centre),
        lr=cell["size"],
        decay=1.0,
        steps=round(8 / cell["size"]),
    )
    excess = np.array(followed.largest) - 1
    outside = np.flatnonzero(excess > 1e-9)
    predicted = (1 - cell["size"]) ** outside * excess[0]
    ratio = excess[outside] / predicted
    entered = np.flatnonzero(excess <= 0)
    return {
        "slowest": float(ratio.max()),
        "farthest": float(np.abs(ratio - 1).max()),
        "beyond": float(excess[entered[0] :].max()) if len(entered) else math.nan,
        "entered": int(entered[0]) if len(entered) else None,
        **_kept(largest=followed.largest),
    }


def _box(cell: Cell) -> Record:
    """A quadratic whose minimum lies outside of the box in half of the directions; a start within."""
    curvature, centre = _quadratic(2.0)
    start = 2 * torch.rand(DIMENSIONS, dtype=torch.float64) - 1
    weights = torch.nn.Parameter(start.clone())
    steps = round(12 / cell["size"])
    tail: list[Tensor] = []

    def evaluate() -> Tensor:
        tail.append(weights.detach().clone())
        del tail[: -steps // 10]
        return _height(curvature, weights - centre)

    followed = follow(weights, evaluate, lr=cell["size"], decay=1.0, steps=steps, smoothness=1.0)
    best = _within_box(curvature, centre)
    changes = np.diff(followed.heights)
    lowest = _height(curvature, best - centre).item()
    return {
        "beyond": max(followed.largest) - 1,
        "allowed": float(np.max(followed.excess)),
        "rising": float((changes > 0).mean()),
        "rise": float(changes[changes > 0].sum() / -changes[changes < 0].sum()),
        "distance": (torch.stack(tail).mean(0) - best).abs().max().item(),
        "bound": int((best.abs() > 1 - 1e-9).sum()),
        **_kept(height=[value - lowest for value in followed.heights]),
    }


def _network(cell: Cell) -> Record:
    """A residual network on one batch of the built-in mixture, all its weights as one vector."""
    from theodolite.workloads import workload

    task = workload("mlp-mixture")
    model = task.build(32, 2)
    shapes = {name: value.shape for name, value in model.named_parameters()}
    weights = torch.nn.Parameter(torch.cat([value.detach().flatten() for value in model.parameters()]))
    inputs, targets = task.batch(cell["seed"], 0)

    def evaluate() -> Tensor:
        pieces = weights.split([math.prod(shape) for shape in shapes.values()])
        values = {
            name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
        }
        return task.loss(torch.func.functional_call(model, values, (inputs,)), targets)

    followed = follow(weights, evaluate, lr=NETWORK_LR, decay=cell["size"], steps=NETWORK_STEPS)
    inside = next((place for place, value in enumerate(followed.largest) if value <= 1 + 1e-6), None)
    changes = np.diff(followed.heights if inside is None else followed.heights[inside:])
    falling = -changes[changes < 0].sum()
    return {
        "start": followed.largest[0],
        "largest": followed.largest[-1],
        "rise": float(changes[changes > 0].sum() / falling) if falling else math.nan,
        "at bound": float((cell["size"] * weights.detach().abs() > 0.99).double().mean()),
        "loss": followed.losses[-1],
        **_kept(largest=followed.largest),
    }


def _quadratic(reach: float) -> tuple[Tensor, Tensor]:
    """A curvature with eigenvalues from 1/100 to 1, and a centre up to `reach` away in each entry."""
    basis = torch.linalg.qr(torch.randn(DIMENSIONS, DIMENSIONS, dtype=torch.float64))[0]
    values = torch.logspace(-math.log10(CONDITION), 0, DIMENSIONS, dtype=torch.float64)
    centre = reach * (2 * torch.rand(DIMENSIONS, dtype=torch.float64) - 1)
    return basis * values @ basis.T, centre


def _height(curvature: Tensor, offset: Tensor) -> Tensor:
    return 0.5 * offset @ curvature @ offset


def _within_box(curvature: Tensor, centre: Tensor) -> Tensor:
    """The minimum with all entries within ±1, as a bounded least-squares problem."""
    root = np.linalg.cholesky(curvature.numpy()).T
    found = scipy.optimize.lsq_linear(root, root @ centre.numpy(), (-1.0, 1.0), method="bvls", tol=1e-14)
    return torch.from_numpy(found.x)


def _kept(**series: list[float]) -> dict[str, Any]:
    """Some steps of each series, evenly in the logarithm."""
    found: dict[str, Any] = {}
    for name, values in series.items():
        places = np.unique(np.geomspace(1, len(values), POINTS).round().astype(int) - 1)
        found["steps"] = places.tolist()
        found[f"{name} then"] = [float(f"{values[place]:.5g}") for place in places]
    return found


STUDY = Study("lion", cells, run, CLAIMS, figures)
