"""Poisson's equation on a square: the five-point Laplacian, its residuals, and right sides."""

# B right sides, H = W = n points along each side of the grid

from __future__ import annotations

import math
from functools import cache
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from theodolite.core.arguments import one_of, whole
from theodolite.core.errors import UseError
from theodolite.data.batches import generator

LOW_PART, LOW_WEIGHT = 0.55, 9.0
"""The part of the modes, those of the lowest eigenvalues, that are weighted in `poisson_residuals`, and their
weight."""
BUMPS = 3
"""Of a smooth right side."""

RightSide = Literal["random", "smooth"]


def laplacian(u_B1HW: Tensor) -> Tensor:
    """`A u`: four times every point less its four neighbours; outside of the grid u is 0.

    Its eigenvectors are products of sines, and all eigenvalues are between 0 and 8.

    >>> laplacian(torch.ones(1, 1, 3, 3))[0, 0]
    tensor([[2., 1., 2.],
            [1., 0., 1.],
            [2., 1., 2.]])
    """
    check_grid(u_B1HW)
    p_B1HW = F.pad(u_B1HW, (1, 1, 1, 1))
    across = p_B1HW[..., 1:-1, :-2] + p_B1HW[..., 1:-1, 2:]
    along = p_B1HW[..., :-2, 1:-1] + p_B1HW[..., 2:, 1:-1]
    return 4 * u_B1HW - across - along


def check_grid(u_B1HW: Tensor) -> None:
    """Raise `UseError` unless a tensor is (B, 1, n, n) of floating-point numbers."""
    if not isinstance(u_B1HW, Tensor) or not u_B1HW.is_floating_point():
        raise UseError(
            f"functions on a grid are {type(u_B1HW).__name__} of "
            f"{getattr(u_B1HW, 'dtype', 'no dtype')}: give a floating-point tensor (B, 1, n, n)"
        )
    shape = tuple(u_B1HW.shape)
    if len(shape) != 4 or shape[1] != 1 or shape[2] != shape[3] or 0 in shape:
        raise UseError(
            f"functions on a grid have shape {shape}: give (B, 1, n, n), with as many points along both sides"
        )


@cache
def sines(side: int) -> Tensor:
    """The orthogonal and symmetric matrix `√(2/(n+1)) sin(π i j/(n+1))`, (n, n), in float64.

    >>> matrix = sines(5)
    >>> bool(torch.allclose(matrix @ matrix, torch.eye(5, dtype=torch.float64)))
    True
    """
    whole("side", side, least=1)
    steps = torch.arange(1, side + 1, dtype=torch.float64)
    angles = torch.outer(steps, steps) * (math.pi / (side + 1))
    return math.sqrt(2 / (side + 1)) * torch.sin(angles)


@cache
def eigenvalues(side: int) -> Tensor:
    """Of the Laplacian, by the numbers of half waves along both sides, (n, n), in float64.

    >>> eigenvalues(2).round()
    tensor([[2., 4.],
            [4., 6.]], dtype=torch.float64)
    """
    whole("side", side, least=1)
    angles = torch.arange(1, side + 1, dtype=torch.float64) * (math.pi / (side + 1))
    values = 2 - 2 * angles.cos()
    return values[:, None] + values[None, :]


def poisson_residuals(num: int, *, side: int = 32, seed: int = 0, step: int = 0) -> Tensor:
    """Residuals such as a solver meets, (B, 1, n, n), each with a root mean square of 1.

    A residual is a mixture of the Laplacian's eigenvectors with Gaussian coefficients, nine times as large
    for the 55 % of them with the lowest eigenvalues, as errors along these are the last to go.

    Args:
        num: of residuals B.
        side: points n along each side of the grid.
        seed: of a run.
        step: of the run; residuals are a pure function of seed and step.

    >>> r = poisson_residuals(2)
    >>> r.shape, r.square().mean((1, 2, 3))
    (torch.Size([2, 1, 32, 32]), tensor([1., 1.]))

    References:
        Kaneda, Akar, Chen, Kala, Hyde and Teran, A deep conjugate direction method for iteratively solving
        linear systems, 2023. There, approximate eigenvectors come from Lanczos' method; here they are known.
    """
    whole("num", num, least=1)
    values, basis = eigenvalues(side), sines(side)
    last = values.flatten().sort().values[max(math.ceil(LOW_PART * side**2) - 1, 0)]
    weights = torch.where(values <= last, LOW_WEIGHT, 1.0)
    random = generator("residuals of Poisson's equation", side, seed, step)
    drawn = torch.from_numpy(random.standard_normal((num, 1, side, side)))
    r_B1HW = basis @ (weights * drawn) @ basis
    return (r_B1HW / r_B1HW.square().mean((1, 2, 3), keepdim=True).sqrt()).float()


def poisson_right_sides(kind: RightSide, num: int, *, side: int = 32, seed: int = 0) -> Tensor:
    """Right sides b of `A u = b`, (B, 1, n, n), in float64, each with a root mean square of 1.

    Args:
        kind: `random`, independent Gaussian numbers at all points, or `smooth`, sums of three Gaussian bumps
            with random signs and places and standard deviations of 0.05 to 0.2 of the side.
        num: of right sides B.
        side: points n along each side of the grid.
        seed: of everything that is drawn.

    >>> poisson_right_sides("smooth", 4, side=64).shape
    torch.Size([4, 1, 64, 64])
    """
    one_of("kind", kind, get_args(RightSide))
    whole("num", num, least=1)
    whole("side", side, least=1)
    random = generator("right sides of Poisson's equation", kind, num, side, seed)
    b_BHW = random.standard_normal((num, side, side)) if kind == "random" else _bumps(num, side, random)
    scale = np.sqrt(np.square(b_BHW).mean((1, 2), keepdims=True))
    return torch.from_numpy(b_BHW / scale)[:, None]


def _bumps(num: int, side: int, random: np.random.Generator) -> np.ndarray:
    places = np.arange(1, side + 1) / (side + 1)
    signs = random.choice([-1.0, 1.0], (num, BUMPS))
    centres = random.uniform(0, 1, (num, BUMPS, 2))
    spreads = random.uniform(0.05, 0.2, (num, BUMPS))
    along = np.exp(-0.5 * ((places - centres[..., None]) / spreads[..., None, None]) ** 2)
    return np.einsum("bk,bkh,bkw->bhw", signs, along[:, :, 0], along[:, :, 1])
