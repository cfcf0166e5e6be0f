"""The closed form of the flow around two cylinders, checked without using it.

Three things decide the flow: its velocity has neither divergence nor curl, nothing flows through the
surfaces, and far away it is the stream, without circulation. The third check is another solution of the same
problem, a sum of multipoles at the two centres whose strengths are found by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from theodolite.data import TwoCylinders
from theodolite.data.batches import generator
from theodolite_studies.framework.records import Record, short

Points = NDArray[np.complex128]
STEP = 0.004
"""Of central differences; they are also taken with half of it."""
AWAY = 0.05
"""The least distance from a surface of points at which differences are taken."""
MULTIPOLES, ON_SURFACE = 80, 800
"""Around each centre; and points on each surface at which the least squares are taken."""


def checks(gap: float, seed: int) -> Iterator[Record]:
    """One flow with a given gap, at random angles."""
    random = generator("closed form", str(gap), seed)
    stream, axis = random.uniform(0, 2 * math.pi, 2)
    flow = TwoCylinders(gap, float(stream), float(axis), complex(*random.uniform(-0.5, 0.5, 2)))
    surfaces = np.concatenate(surfaces_of(flow, ON_SURFACE // 2))
    fastest = np.abs(flow.velocity(surfaces)).max()
    points = fluid_points(flow, seed)
    residuals = [
        float(np.sqrt(np.mean(np.abs(cauchy_riemann(flow, points, step)) ** 2))) for step in (STEP, STEP / 2)
    ]
    normals = surfaces - np.repeat(flow.centres, ON_SURFACE // 2)
    other = multipole_velocity(flow, points)
    yield {
        "residual": short(residuals[1] / fastest),
        "order": short(math.log2(residuals[0] / residuals[1])),
        "through": short(np.abs((flow.velocity(surfaces) * normals.conj()).real).max() / fastest),
        "apart": short(np.abs(flow.velocity(points) - other).max() / fastest),
    }


def surfaces_of(flow: TwoCylinders, num: int) -> list[Points]:
    """Points on both surfaces."""
    circle = np.exp(2j * np.pi * (np.arange(num) + 0.5) / num)
    return [centre + circle for centre in flow.centres]


def fluid_points(flow: TwoCylinders, seed: int, num: int = 2000) -> Points:
    """Random points of the box and of the gap, none of them near a surface."""
    random = generator("fluid points", str(flow.gap), seed)
    box = random.uniform(-4, 4, (num, 2)) @ np.array([1, 1j])
    first, second = flow.centres
    along, across = random.uniform(-1, 1, (2, num))
    gap = flow.centre + (second - first) * (0.1 * along + 0.5j * across)
    points = np.concatenate([box, gap])
    return points[np.minimum(np.abs(points - first), np.abs(points - second)) > 1 + AWAY]


def cauchy_riemann(flow: TwoCylinders, points: Points, step: float) -> Points:
    """Divergence less i times curl of the velocity, by central differences.

    With w = u − iv it is `∂w/∂x + i ∂w/∂y`, which is 0 for the velocity of a potential flow. Differences of
    such a velocity leave `step²/3·w'''`.
    """
    along_x, along_y = (
        (flow.complex_velocity(points + step * way) - flow.complex_velocity(points - step * way)) / (2 * step)
        for way in (1.0, 1j)
    )
    return np.asarray(along_x + 1j * along_y)


def multipole_velocity(flow: TwoCylinders, points: Points, num: int = MULTIPOLES) -> Points:
    """The velocity by multipoles at the centres, `w = exp(−iφ) + Σ_j Σ_{k≥2} c_jk/(z − z_j)^k`.

    The strengths c are such that as little as possible flows through the surfaces, in least squares. There
    are no terms of k = 1: they would be sources and circulation.
    """
    surfaces = surfaces_of(flow, ON_SURFACE)
    normals = np.concatenate([each - centre for each, centre in zip(surfaces, flow.centres, strict=True)])
    stream = complex(math.cos(flow.stream), -math.sin(flow.stream))
    terms = _multipoles(flow, np.concatenate(surfaces), num) * normals[:, None]
    system = np.concatenate([terms.real, -terms.imag], 1)  # Re(c·term) of real and imaginary parts of c
    found = np.linalg.lstsq(system, -(stream * normals).real, rcond=None)[0]
    strengths = found[: 2 * num] + 1j * found[2 * num :]
    return np.asarray(np.conj(stream + _multipoles(flow, points, num) @ strengths))


def _multipoles(flow: TwoCylinders, points: Points, num: int) -> Points:
    powers = -np.arange(2, num + 2)
    return np.concatenate([(points[:, None] - centre) ** powers for centre in flow.centres], 1)
