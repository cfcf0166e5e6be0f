"""A geometric multigrid cycle for Poisson's equation, and the work of an iteration of each solver.

Work is counted in floating-point operations: two for each entry of a sparse matrix that is multiplied, one
for each addition or multiplication of vectors.
"""

# B right sides, n points along each side of a grid; N = n² points

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

DAMPING = 0.8
"""Of Jacobi's method, the smoother: one step before the coarser grid and one after it."""
COARSEST = 4
"""Most points along each side of the grid on which the system is solved exactly."""
CONJUGATE_GRADIENTS, CONJUGATED_TWICE = 10, 19
"""Operations for each point in an iteration, beside those of A and of the proposal.

Conjugate gradients have two dot products and three vector updates. A solver along proposals that are not
linear scales the residual (1), makes the proposal conjugate to two directions (8), and takes the step (10).
"""


@dataclass(frozen=True)
class Grid:
    """One grid. Its operator is `u ↦ T u M + M u T`, for u of (B, 1, n, n).

    Args:
        stiffness: T, (n, n): `2, −1` on the finest grid.
        mass: M, (n, n): the identity on the finest grid.
        refine: P, (n, n/2): linear interpolation from the next grid along one side; None on the coarsest.
    """

    stiffness: Tensor
    mass: Tensor
    refine: Tensor | None

    def apply(self, u: Tensor) -> Tensor:
        """`A u`."""
        return self.stiffness @ u @ self.mass + self.mass @ u @ self.stiffness

    @property
    def entries(self) -> int:
        """Entries of A that are not zero: five for each point of the finest grid, nine of others."""
        t, m = self.stiffness != 0, self.mass != 0
        return int(2 * t.sum() * m.sum() - (t & m).sum() ** 2)


def grids(side: int) -> list[Grid]:
    """From the finest to the coarsest, each with every second point of the one before, rounded down.

    Coarse operators are Galerkin's, `PᵀAP`.
    """
    eye = torch.eye(side, dtype=torch.float64)
    stiffness, mass = 2 * eye - eye.roll(1, 0).tril() - eye.roll(-1, 0).triu(), eye
    found = []
    while len(mass) > COARSEST:
        coarse = torch.arange(len(mass) // 2)
        refine = torch.zeros(len(mass) + 1, len(coarse), dtype=torch.float64)
        refine[2 * coarse + 1, coarse] = 1
        refine[2 * coarse, coarse] = refine[2 * coarse + 2, coarse] = 0.5
        refine = refine[:-1]
        found.append(Grid(stiffness, mass, refine))
        stiffness, mass = refine.T @ stiffness @ refine, refine.T @ mass @ refine
    return [*found, Grid(stiffness, mass, None)]


def v_cycle(hierarchy: list[Grid], b: Tensor) -> Tensor:
    """`A⁻¹ b` nearly, and linear in b: a V-cycle from zero with one smoothing step on either side."""
    grid, *coarser = hierarchy
    t, m, p = grid.stiffness, grid.mass, grid.refine
    if p is None:
        explicit = torch.kron(t, m) + torch.kron(m, t)
        return torch.linalg.solve(explicit, b.flatten(1).T).T.reshape(b.shape)
    smooth = DAMPING / (torch.outer(t.diag(), m.diag()) + torch.outer(m.diag(), t.diag()))
    u = smooth * b
    u = u + p @ v_cycle(coarser, p.T @ (b - grid.apply(u)) @ p) @ p.T
    return u + smooth * (b - grid.apply(u))


def work_of_cg(side: int) -> int:
    """Operations of an iteration of conjugate gradients."""
    return 2 * grids(side)[0].entries + CONJUGATE_GRADIENTS * side**2


def work_of_multigrid(side: int) -> int:
    """Operations of an iteration of conjugate gradients that are preconditioned by a V-cycle."""
    *finer, coarsest = grids(side)
    work = 2 * len(coarsest.mass) ** 4  # by the inverse
    for grid in finer:
        assert grid.refine is not None
        num, transfer = len(grid.mass) ** 2, int((grid.refine != 0).sum()) ** 2
        work += 2 * (2 * grid.entries + num) + 2 * 2 * transfer + 4 * num
    return work + work_of_cg(side) + 2 * side**2  # one more dot product


def work_of_network(model: nn.Module, side: int) -> int:
    """Operations of an iteration along directions of a network; of those inside it the convolutions alone."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 1, side, side))
    return int(counter.get_total_flops()) + 2 * grids(side)[0].entries + CONJUGATED_TWICE * side**2
