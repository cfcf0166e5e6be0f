"""The potential flow around two equal circular cylinders, in closed form, on a fine and on a coarse grid."""

# N flows, h and w cells of the coarse grid, H and W points of the fine grid

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from theodolite.core.arguments import number, one_of, whole
from theodolite.core.errors import UseError
from theodolite.data.batches import generator

SIDE, POINTS, FACTOR = 8.0, 64, 8
"""The side of the square box in radii; points of the fine grid along it, and along one coarse cell."""
SHIFT = 0.5
"""The farthest that the pair is from the middle of the box along each axis: half a coarse cell."""
CORRECTION = 0.071
"""The unit of corrections: the root mean square of what interpolation misses, over all points of the fine
grid and all flows with trained gaps."""
LEAST_GAP = 1e-6
"""Below it, more than 20 000 doublets would be needed."""

Region = Literal["trained", "hole", "narrower", "wider", "all"]
GAPS: Mapping[Region, tuple[tuple[float, float], ...]] = {
    "trained": ((0.5, 1.0), (2.0, 2.5)),
    "hole": ((1.0, 2.0),),
    "narrower": ((0.2, 0.5),),
    "wider": ((2.5, 3.0),),
    "all": ((0.2, 3.0),),
}
"""Ranges of the gap, in radii, by name. Up to 3 radii both cylinders are always inside the box."""


@dataclass(frozen=True)
class TwoCylinders:
    """The potential flow around two circular cylinders of radius 1, without circulation.

    The stream has speed 1, and the cylinders are at ±(1 + gap/2) on the real axis. With `cosh ξ = 1 + gap/2`,
    their images in each other are doublets at `±a_n = ±sinh ξ coth nξ`, and the complex velocity is

        u − iv = exp(−iφ) − 2 Σ_{n≥1} μ_n (z² + a_n²)/(z² − a_n²)²
        μ_n = (sinh ξ/sinh nξ)² ((−1)ⁿ⁻¹ cos φ + i sin φ)

    for a stream at the angle φ to the line of centres. Terms decrease as `exp(−2nξ)`; the sum ends where they
    are lost in rounding.

    Args:
        gap: the distance between the two surfaces, in radii.
        stream: the direction of the stream, an angle.
        axis: the direction of the line of centres, an angle.
        centre: the point halfway between the cylinders.

    The stream is stopped in front of a single cylinder, and has twice its speed at the side of it:

    >>> alone = TwoCylinders(gap=1e4)
    >>> points = alone.centres[0] + np.array([-1.0, 1.0j])
    >>> (alone.velocity(points).round(6) + 0).tolist()
    [0j, (2+0j)]

    References:
        Milne-Thomson, Theoretical hydrodynamics, 5th edition, 1968: the circle theorem, from which the images
        follow.
    """

    gap: float
    stream: float = 0.0
    axis: float = 0.0
    centre: complex = 0j

    def __post_init__(self) -> None:
        number("gap", self.gap, least=LEAST_GAP)
        number("stream", self.stream)
        number("axis", self.axis)
        if not isinstance(self.centre, complex | float | int) or not cmath.isfinite(self.centre):
            raise UseError(f"centre is {self.centre!r}: give a finite complex number x + iy")

    @property
    def centres(self) -> tuple[complex, complex]:
        """Of the two cylinders."""
        apart = (1 + self.gap / 2) * complex(math.cos(self.axis), math.sin(self.axis))
        return self.centre - apart, self.centre + apart

    def is_fluid(self, points: NDArray[np.complex128]) -> NDArray[np.bool_]:
        """Which points `x + iy` are outside of both cylinders, or on a surface."""
        first, second = (np.abs(points - centre) >= 1 for centre in self.centres)
        return np.logical_and(first, second)

    def velocity(self, points: NDArray[np.complex128]) -> NDArray[np.complex128]:
        """The velocity `u + iv` at points `x + iy` of the fluid; values inside the cylinders have no meaning.

        The speed halfway between cylinders side by side is `Σ sech²(nξ)` over all integers n, which tends to
        `2/√gap` for small gaps.

        >>> narrow = TwoCylinders(0.01, stream=math.pi / 2)
        >>> round(abs(narrow.velocity(np.array(0j))).item(), 2)
        20.01
        """
        return np.conj(self.complex_velocity(points))

    def complex_velocity(self, points: NDArray[np.complex128]) -> NDArray[np.complex128]:
        """The derivative `u − iv` of the complex potential, an analytic function of `x + iy`."""
        turn = complex(math.cos(self.axis), -math.sin(self.axis))
        angle = self.stream - self.axis
        along, across = math.cos(angle), math.sin(angle)
        square = ((np.asarray(points, dtype=np.complex128) - self.centre) * turn) ** 2
        found = np.full(square.shape, complex(along, -across))
        for sign, strength, place in zip(*_doublets(self.gap), strict=True):
            doublet = strength * complex(sign * along, across)
            found -= 2 * doublet * (square + place**2) / (square - place**2) ** 2
        return found * turn


@lru_cache(maxsize=1024)
def _doublets(gap: float) -> tuple[list[float], list[float], list[float]]:
    """Signs of the doublets along the line of centres, strengths, and distances from the middle."""
    xi = 2 * math.asinh(math.sqrt(gap) / 2)  # acosh(1 + gap/2), but also exact for small gaps
    n = np.arange(1, 2 + math.ceil(0.5 * math.log(4 / np.finfo(float).eps) / xi + 1))
    decays = np.exp(-2 * n * xi)
    # sinh ξ/sinh nξ and coth nξ, without overflow
    ratios = -2 * math.sinh(xi) * np.exp(-n * xi) / np.expm1(-2 * n * xi)
    places = -math.sinh(xi) * (1 + decays) / np.expm1(-2 * n * xi)
    return (-((-1.0) ** n)).tolist(), (ratios**2).tolist(), places.tolist()


@dataclass(frozen=True)
class CylinderFlows:
    """Flows on a coarse and on a fine grid over the same square box. Made by `cylinder_flows`.

    Args:
        flows: what is on the grids.
        coarse: (N, 3, h, w): the mean velocity of the fluid points in each cell, 0 where there are none, and
            the part of its points that is fluid.
        fine: (N, 2, H, W): the velocity, 0 inside the cylinders.
        fluid: (N, 1, H, W): 1 at fluid points, 0 inside the cylinders.
    """

    flows: tuple[TwoCylinders, ...]
    coarse: Tensor
    fine: Tensor
    fluid: Tensor

    @cached_property
    def interpolated(self) -> Tensor:
        """The fine velocity by bicubic interpolation of the coarse one, (N, 2, H, W)."""
        return F.interpolate(self.coarse[:, :2], scale_factor=FACTOR, mode="bicubic", align_corners=False)

    @cached_property
    def correction(self) -> Tensor:
        """What interpolation misses, in units of `CORRECTION`; 0 inside the cylinders; (N, 2, H, W)."""
        return (self.fine - self.interpolated) * self.fluid / CORRECTION


def cylinder_flows(num: int, region: Region = "trained", *, seed: int = 0) -> CylinderFlows:
    """Flows with gaps of a region, and any direction of the stream and of the line of centres.

    The box has a side of 8 radii. The fine grid has 64 × 64 points, the coarse one 8 × 8 cells. The pair is
    near the middle, at most half a coarse cell away along each axis.

    Args:
        num: the number of flows N. The region is divided into as many parts of equal length, and a gap is
            drawn from each.
        region: of the gaps, in radii: `trained` is 0.5 to 1 and 2 to 2.5, `hole` 1 to 2, `narrower` 0.2 to
            0.5, `wider` 2.5 to 3, `all` 0.2 to 3.
        seed: of everything that is drawn.

    >>> flows = cylinder_flows(4, "hole")
    >>> flows.coarse.shape, flows.fine.shape
    (torch.Size([4, 3, 8, 8]), torch.Size([4, 2, 64, 64]))
    >>> [round(flow.gap, 2) for flow in flows.flows]
    [1.2, 1.47, 1.73, 1.96]
    """
    num = whole("num", num, least=1)
    one_of("region", region, get_args(Region))
    return _drawn(num, region, whole("seed", seed))


@lru_cache(maxsize=8)
def _drawn(num: int, region: Region, seed: int) -> CylinderFlows:
    random = generator("two cylinders", region, num, seed)
    gaps = _spread(GAPS[region], num, random)
    angles = random.uniform(0, 2 * math.pi, (num, 2))
    shifts = random.uniform(-SHIFT, SHIFT, (num, 2))
    flows = tuple(
        TwoCylinders(float(gap), float(stream), float(axis), complex(*shift))
        for gap, (stream, axis), shift in zip(gaps, angles, shifts, strict=True)
    )
    fine, fluid = (torch.stack(maps) for maps in zip(*map(_on_fine_grid, flows), strict=True))
    share = F.avg_pool2d(fluid, FACTOR)
    mean = F.avg_pool2d(fine, FACTOR) / share.clamp_min(1 / FACTOR**2)  # 0/1 where all is solid
    coarse = torch.cat([mean, share], 1)
    return CylinderFlows(flows, coarse.float(), fine.float(), fluid.float())


def _on_fine_grid(flow: TwoCylinders) -> tuple[Tensor, Tensor]:
    """The velocity (2, H, W), 0 inside the cylinders, and which points are fluid (1, H, W), in float64."""
    places = (np.arange(POINTS) + 0.5) * (SIDE / POINTS) - SIDE / 2
    points = places[None, :] + 1j * places[:, None]
    is_fluid = flow.is_fluid(points)
    velocity = np.zeros(points.shape, dtype=np.complex128)
    velocity[is_fluid] = flow.velocity(points[is_fluid])
    maps = np.stack([velocity.real, velocity.imag, is_fluid])
    return torch.from_numpy(maps[:2]), torch.from_numpy(maps[2:])


def _spread(
    ranges: Sequence[tuple[float, float]], num: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """One number from each of `num` equal parts of some ranges."""
    ends = np.cumsum([0.0, *(high - low for low, high in ranges)])
    along = (np.arange(num) + random.random(num)) / num * ends[-1]
    which = np.clip(np.searchsorted(ends, along, side="right") - 1, 0, len(ranges) - 1)
    return np.array([low for low, _ in ranges])[which] + along - ends[which]
