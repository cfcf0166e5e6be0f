"""The built-in workload of linear systems: a network that proposes search directions for Poisson's equation.

`A u = b` with the five-point Laplacian A on a square grid. The network sees a residual `r = b − A u` and
proposes a direction q; the solver makes it conjugate to the last two directions and takes the best step along
it. The identity as network makes the method of conjugate gradients, `A⁻¹` a method of one step. There are no
labels: the loss is what is left of the residual after one step. The metric is the number of iterations.
"""

# B right sides, H = W = n points along each side of the grid

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from theodolite.core.arguments import number, whole
from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.data import laplacian, poisson_residuals, poisson_right_sides
from theodolite.data.poisson import RightSide
from theodolite.models import MultilevelNet
from theodolite.workloads.definition import Workload

SIDE, NUM_BATCH = 32, 16
"""Points along each side of the grids that are trained on, and residuals in a batch."""
NUM_SOLVED, RTOL = 8, 1e-6
"""Systems that a metric solves, and the residual at which one is solved, as a part of the right side."""
LEAST = 1e-30
"""The least `q·Aq` that is divided by in the loss."""

Propose = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Solved:
    """Solutions of several systems. Made by `solve`.

    Args:
        u: the solutions, (B, 1, n, n), in float64.
        iterations: that each system took, (B,); infinite where it was not solved.
        residuals: `|b − A u|/|b|` at the start and after every iteration, (iterations + 1, B).
    """

    u: Tensor
    iterations: Tensor
    residuals: Tensor


@torch.no_grad()
def solve(propose: Propose, right_sides: Tensor, *, rtol: float = RTOL, limit: int = 1000) -> Solved:
    """Solve `A u = b` for several right sides, along directions that a network proposes.

    From u = 0, each iteration makes a proposal q conjugate to the last two directions, `d·Ad' = 0`, and sets
    `u ← u + (d·r)/(d·Ad) d`, the least error along d. A system is given up when q is zero or not finite.

    Args:
        propose: the network, or any function: residuals (B, 1, n, n), each scaled to a root mean square of 1,
            to proposals of the same shape. A network gets them in its own dtype and on its own device.
        right_sides: b, (B, 1, n, n).
        rtol: a system is solved when `|r| ≤ rtol·|b|`.
        limit: the largest number of iterations.

    Conjugate gradients need as many iterations as `b` has different eigenvalues in it, here one and three:

    >>> from theodolite.data.poisson import sines
    >>> wave = sines(8)[0, :, None] * sines(8)[0]
    >>> several = wave + sines(8)[2, :, None] * sines(8)[2] + sines(8)[4, :, None] * sines(8)[6]
    >>> solve(nn.Identity(), torch.stack([wave, several])[:, None]).iterations
    tensor([1., 3.])

    References:
        Kaneda, Akar, Chen, Kala, Hyde and Teran, A deep conjugate direction method for iteratively solving
        linear systems, 2023.
    """
    laplacian(right_sides)  # refuses what is no grid
    if not torch.isfinite(right_sides).all():
        raise UseError("right_sides has entries that are not finite: give finite numbers")
    number("rtol", rtol, least=0)
    whole("limit", limit, least=1)
    like = next(propose.parameters(), right_sides) if isinstance(propose, nn.Module) else right_sides
    b = right_sides.to(like.device, torch.float64)
    u, r, size_b = torch.zeros_like(b), b, _dot(b, b).sqrt()
    is_open = size_b > 0
    iterations = torch.where(is_open, math.inf, 0.0)
    residuals = [torch.where(is_open, 1.0, 0.0)]
    last: list[tuple[Tensor, Tensor, Tensor]] = []
    for iteration in range(1, limit + 1):
        if not is_open.any():
            break
        d = _proposal(propose, r, like)
        for before, a_before, height in last:
            d = d - before * (_dot(d, a_before) / height)
        a_d = laplacian(d)
        height = _dot(d, a_d)
        is_open = is_open & (height > 0)
        d, a_d = (torch.where(is_open, one, 0.0) for one in (d, a_d))
        height = torch.where(is_open, height, 1.0)
        u = u + d * (_dot(d, r) / height)
        r = b - laplacian(u)
        last = [*last[-1:], (d, a_d, height)]
        left = _dot(r, r).sqrt() / torch.where(size_b > 0, size_b, 1.0)
        residuals.append(left)
        is_solved = is_open & (left <= rtol)
        iterations = torch.where(is_solved, float(iteration), iterations)
        is_open = is_open & ~is_solved
    return Solved(u, iterations.flatten(), torch.stack(residuals).flatten(1))


def direction_loss(q_B1HW: Tensor, r_B1HW: Tensor) -> Tensor:
    """The part of the residual that the best step along q leaves: `|r − (q·r)/(q·Aq) Aq|²/|r|²`, a mean.

    The length of q does not matter. For q = 0 the loss is 1, without a gradient.

    >>> r = poisson_residuals(4)
    >>> direction_loss(torch.zeros_like(r), r)
    tensor(1.)
    """
    q_B1HW = q_B1HW.to(r_B1HW.dtype)
    a_q = laplacian(q_B1HW)
    step = _dot(q_B1HW, r_B1HW) / _dot(q_B1HW, a_q).clamp_min(LEAST)
    left = r_B1HW - step * a_q
    return (_dot(left, left) / _dot(r_B1HW, r_B1HW)).mean()


def mean_iterations(propose: Propose, kind: RightSide, side: int = SIDE) -> float:
    """Mean iterations over eight right sides; infinite if one takes more than `4·side`.

    Conjugate gradients take about 2.6 for each point along the side.

    >>> mean_iterations(nn.Identity(), "random", 32)
    85.0
    """
    b = poisson_right_sides(kind, NUM_SOLVED, side=side)
    return solve(propose, b, limit=4 * side).iterations.mean().item()


def _dot(a_B1HW: Tensor, b_B1HW: Tensor) -> Tensor:
    """(B, 1, 1, 1)."""
    return (a_B1HW * b_B1HW).sum((1, 2, 3), keepdim=True)


def _proposal(propose: Propose, r: Tensor, like: Tensor) -> Tensor:
    """What is proposed for residuals of any size, in float64; 0 where it is not finite."""
    size = r.square().mean((1, 2, 3), keepdim=True).sqrt()
    q = propose((r / torch.where(size > 0, size, 1.0)).to(like.dtype))
    if not isinstance(q, Tensor) or q.shape != r.shape:
        got = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
        raise UseError(f"propose returned {got} for residuals {tuple(r.shape)}: return the same shape")
    q = q.to(torch.float64)
    return torch.where(q.isfinite().all(3, True).all(2, True), q, 0.0)


def _draw(seed: int, step: int) -> Batch:
    residuals = poisson_residuals(NUM_BATCH, side=SIDE, seed=seed, step=step)
    return residuals, residuals


WORKLOADS = (
    Workload(
        "poisson",
        MultilevelNet,
        _draw,
        direction_loss,
        Size(16, 1),
        metrics={
            "solver iterations": partial(mean_iterations, kind="random"),
            "solver iterations (smooth)": partial(mean_iterations, kind="smooth"),
            "solver iterations (side 64)": partial(mean_iterations, kind="random", side=64),
        },
    ),
)
