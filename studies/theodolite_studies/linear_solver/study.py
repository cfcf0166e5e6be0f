"""Does a trained network need fewer iterations than conjugate gradients? And than multigrid?

Poisson's equation on a square, to a relative residual of 1e-6. Two parts:

    known    conjugate gradients of scipy, the identity as a network, and multigrid as preconditioner
    trained  networks of the workload `poisson`, at several widths, depths and numbers of grids

References:
    Kaneda, Akar, Chen, Kala, Hyde and Teran, A deep conjugate direction method for iteratively solving linear
    systems, 2023.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import cg
from torch import Tensor, nn

from theodolite.core.building import evaluated, one_thread, untouched_randomness
from theodolite.core.size import Size
from theodolite.data import generator, poisson_right_sides
from theodolite.data.poisson import eigenvalues, sines
from theodolite.fleet.plans import planned
from theodolite.fleet.run import Run
from theodolite.fleet.training import held_out_loss
from theodolite.models import MultilevelNet
from theodolite.optimizers.schedule import LRFactor
from theodolite.workloads import Workload, workload
from theodolite.workloads.poisson import RTOL, SIDE, Solved, solve
from theodolite_studies.framework.records import Record, short
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.linear_solver.figures import figures
from theodolite_studies.linear_solver.multigrid import (
    grids,
    v_cycle,
    work_of_cg,
    work_of_multigrid,
    work_of_network,
)
from theodolite_studies.linear_solver.report import BROKEN, CLAIMS, LARGER, LARGEST, OTHER, USUAL, notes

BASE, LR = Size(16, 1), 2.0**-7
"""The learning rate was chosen at base size, by a sweep with the seeds 0 and 1; see the page."""
FIRST_SEED = 10
LEVELS, ALL_LEVELS = 4, 6
"""Grids of the workload's network; as many as a side of 32 allows."""
HIGH = 0.1
"""The part of the modes in a mixture of high waves, those of the highest eigenvalues."""
LARGE_WIDTH = 16
"""The largest width that is tried on the largest grid."""


@dataclass(frozen=True)
class SolverSetting(Setting):
    """How much is run."""

    seeds: int = 5
    few_seeds: int = 3
    """Of the networks without a plan."""
    steps: int = 500
    widths: tuple[int, ...] = (4, 8, 16, 32, 64)
    depths: tuple[int, ...] = (2, 4)
    systems: int = 8
    """Of each kind and side; half as many on grids beyond 64²."""
    largest: int = LARGEST
    """The largest side of a grid."""

    def about(self) -> dict[str, Any]:
        """All of it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "small"}


def cells(setting: SolverSetting) -> list[Cell]:
    """Known solvers, then networks: widths under the plan, depths, more grids, and no plan."""
    known: list[Cell] = [
        {"part": "known", "seed": seed} for seed in range(FIRST_SEED, FIRST_SEED + setting.seeds)
    ]
    cases = [(width, 1, LEVELS, "plan", setting.seeds) for width in setting.widths]
    cases += [(BASE.width, depth, LEVELS, "plan", setting.seeds) for depth in setting.depths]
    cases += [(BASE.width, 1, ALL_LEVELS, "plan", setting.seeds)]
    cases += [(setting.widths[-1], 1, LEVELS, "standard", setting.few_seeds)]
    return known + [
        {
            "part": "trained",
            "width": width,
            "depth": depth,
            "levels": levels,
            "parameterization": parameterization,
            "seed": seed,
        }
        for width, depth, levels, parameterization, seeds in cases
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    ]


def run(cell: Cell, setting: SolverSetting, *_: object) -> Iterator[Record]:
    """A record for each kind of right side and each side of the grid."""
    with one_thread():
        yield from (_known if cell["part"] == "known" else _trained)(cell, setting)


def _known(cell: Cell, setting: SolverSetting) -> Iterator[Record]:
    for kind, side in systems(setting.largest):
        b, hierarchy = right_sides(kind, side, cell["seed"], setting.systems), grids(side)
        plain, cycled = (
            solve(propose, b, limit=4 * side) for propose in (nn.Identity(), partial(v_cycle, hierarchy))
        )
        yield {
            "kind": kind,
            "side": side,
            "cg": [conjugate_gradients(each, 4 * side) for each in b],
            "identity": _counts(plain),
            "multigrid": _counts(cycled),
            "cg work": work_of_cg(side),
            "multigrid work": work_of_multigrid(side),
            "cg residuals": _course(plain),
            "multigrid residuals": _course(cycled),
        }


def _trained(cell: Cell, setting: SolverSetting) -> Iterator[Record]:
    made, model, loss = trained(cell, setting.steps)
    largest = setting.largest if made.size.width <= LARGE_WIDTH else LARGER
    for kind, side in systems(largest):
        b = right_sides(kind, side, cell["seed"], setting.systems)
        with evaluated(model):
            solved = solve(model, b, limit=4 * side)
        yield {
            "kind": kind,
            "side": side,
            "loss": short(loss),
            "network": _counts(solved),
            "network work": work_of_network(model, side),
            "network residuals": _course(solved),
        }


def systems(largest: int) -> list[tuple[str, int]]:
    """Kinds of right sides and sides of grids."""
    found = [(kind, side) for side in (SIDE, LARGER, LARGEST) if side <= largest for kind in USUAL]
    return found + [(kind, SIDE) for kind in (*OTHER, *BROKEN)]


def right_sides(kind: str, side: int, seed: int, num: int) -> Tensor:
    """Right sides of a kind, (B, 1, n, n), in float64.

    `points` are 1 at one random point. `edge` is random along one edge, as values on the boundary make it.
    `checkerboard` is 1 and −1 in turn. `high waves` are random mixtures of the tenth of the eigenvectors with
    the highest eigenvalues, and `highest wave` is the last of these. The two that are not random are one
    system.
    """
    num = max(num // 2, 1) if side > LARGER else num
    if kind in USUAL:
        return poisson_right_sides("random" if kind == "random" else "smooth", num, side=side, seed=seed)
    random = generator("linear-solver", kind, side, seed)
    b = torch.zeros(num, 1, side, side, dtype=torch.float64)
    steps = torch.arange(side)
    if kind == "points":
        b.flatten(1)[torch.arange(num), torch.from_numpy(random.integers(side**2, size=num))] = 1
        return b
    if kind == "edge":
        b[:, 0, 0] = torch.from_numpy(random.standard_normal((num, side)))
        return b
    if kind == "checkerboard":
        return (1.0 - 2.0 * ((steps[:, None] + steps) % 2)).double()[None, None]
    waves, values = sines(side), eigenvalues(side)
    if kind == "highest wave":
        return torch.outer(waves[-1], waves[-1])[None, None]
    assert kind == "high waves", kind
    drawn = torch.from_numpy(random.standard_normal((num, 1, side, side)))
    return waves @ (drawn * (values >= values.quantile(1 - HIGH))) @ waves


def conjugate_gradients(b: Tensor, limit: int) -> int | None:
    """Iterations of scipy's method for one right side (1, n, n); None if it does not converge."""
    side = b.shape[-1]
    line = sparse.diags([-np.ones(side - 1), np.full(side, 2.0), -np.ones(side - 1)], [-1, 0, 1])
    eye = sparse.identity(side)
    iterates: list[Any] = []
    matrix = sparse.csr_matrix(sparse.kron(line, eye) + sparse.kron(eye, line))
    _, status = cg(matrix, b.flatten().numpy(), rtol=RTOL, maxiter=limit, callback=iterates.append)
    return None if status else len(iterates)


def trained(cell: Cell, steps: int) -> tuple[Run, nn.Module, float]:
    """The run of a cell, its trained network, and the held-out loss."""
    grown = workload("poisson")
    if cell["levels"] != LEVELS:
        grown = dataclasses.replace(grown, build=partial(MultilevelNet, levels=cell["levels"]))
    made = run_of(cell, steps)
    with untouched_randomness(made.seed):
        model = _train(made, grown)
        return made, model, held_out_loss(model, grown, made, "cpu")


def run_of(cell: Cell, steps: int) -> Run:
    """AdamW, a tenth of the steps as warm-up, and a linear decay."""
    is_planned = cell["parameterization"] == "plan"
    return Run(
        "poisson",
        Size(cell["width"], cell["depth"]),
        lr=LR,
        base=BASE if is_planned else None,
        parameterization=cell["parameterization"],
        seed=cell["seed"],
        steps=steps,
        warmup=steps // 10,
    )


def _train(made: Run, grown: Workload) -> nn.Module:
    """As the fleet does it, but the network is kept."""
    plan = planned(made, grown)
    model = plan.build(made.seed).train()
    optimizer = plan.optimizer(model, check_gradients=False)
    factor = LRFactor(made.schedule, made.steps, made.warmup, made.final)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(made.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)
        optimizer.zero_grad()
        grown.evaluate(model, grown.draw(made.seed, step)).backward()
        optimizer.step()
    return model


def _counts(solved: Solved) -> list[int | None]:
    """Iterations of every system; None where it was not solved."""
    return [int(each) if math.isfinite(each) else None for each in solved.iterations.tolist()]


def _course(solved: Solved) -> list[float | None]:
    """The median of the relative residuals after every iteration."""
    return [short(each, 3) for each in solved.residuals.median(1).values.tolist()]


STUDY = Study(
    "linear-solver",
    cells,
    run,
    CLAIMS,
    figures,
    notes,
    full=SolverSetting(),
    small=SolverSetting(
        small=True, seeds=1, few_seeds=1, steps=60, widths=(8, 16), depths=(2,), systems=2, largest=LARGER
    ),
)
