"""The flow around two cylinders solves its boundary-value problem, and the grids hold what they say."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from theodolite import UseError, data
from theodolite.data import TwoCylinders, cylinder_flows
from theodolite.data.two_cylinders import CORRECTION, GAPS

GAPS_TRIED = (0.01, 0.2, 1.0, 3.0, 40.0)


def around(gap: float) -> TwoCylinders:
    return TwoCylinders(gap, stream=0.7, axis=-1.1, centre=0.3 - 0.2j)


def circle(num: int, radius: float = 1.0) -> NDArray[np.complex128]:
    return radius * np.exp(2j * np.pi * np.arange(num) / num)


def fluid_points(flow: TwoCylinders) -> NDArray[np.complex128]:
    """Between the cylinders, near them, and farther away."""
    near = [centre + circle(40, 1.05) for centre in flow.centres]
    random = np.random.default_rng(0).uniform(-6, 6, (2, 400))
    points = np.concatenate([*near, [flow.centre], random[0] + 1j * random[1]])
    first, second = flow.centres
    return points[(np.abs(points - first) > 1.001) & (np.abs(points - second) > 1.001)]


@pytest.mark.parametrize("gap", GAPS_TRIED)
def test_the_potential_satisfies_the_laplace_equation(gap: float) -> None:
    """The velocity has neither divergence nor curl, by central differences of the fourth order."""
    flow, step = around(gap), 1e-4
    points = fluid_points(flow)

    def slope(direction: complex) -> NDArray[np.complex128]:
        near, far = (flow.velocity(points + k * step * direction) for k in (1, 2))
        near_back, far_back = (flow.velocity(points - k * step * direction) for k in (1, 2))
        return (8 * (near - near_back) - (far - far_back)) / (12 * step)

    along_x, along_y = slope(1.0), slope(1j)
    scale = np.abs(along_x).max()
    assert np.abs(along_x.real + along_y.imag).max() < 1e-7 * scale
    assert np.abs(along_x.imag - along_y.real).max() < 1e-7 * scale


@pytest.mark.parametrize("gap", GAPS_TRIED)
@pytest.mark.parametrize("stream", [0.0, 0.7, math.pi / 2])
def test_nothing_flows_through_a_surface_nor_around_a_cylinder(gap: float, stream: float) -> None:
    flow = TwoCylinders(gap, stream, axis=-1.1, centre=0.3 - 0.2j)
    normal = circle(512)
    for centre in flow.centres:
        velocity = flow.velocity(centre + normal)
        tangent = 1j * normal
        assert np.abs((velocity * normal.conj()).real).max() < 1e-13 * np.abs(velocity).max()
        assert abs((velocity * tangent.conj()).real.mean()) < 1e-9 * np.abs(velocity).max()


@pytest.mark.parametrize("gap", GAPS_TRIED)
def test_far_away_the_stream_is_undisturbed_but_for_a_doublet(gap: float) -> None:
    """The rest decreases as 1/r²: there is no source, which would show as 1/r."""
    flow = around(gap)
    stream = complex(math.cos(0.7), math.sin(0.7))
    rest = [np.abs(flow.velocity(circle(16, radius)) - stream).max() for radius in (1e4, 1e5)]
    assert 0 < rest[0] < 1e-6
    assert rest[1] == pytest.approx(rest[0] / 100, rel=0.02)


def test_the_angles_and_the_centre_turn_and_move_the_flow() -> None:
    plain = TwoCylinders(0.8, stream=0.4)
    turn = complex(math.cos(0.9), math.sin(0.9))
    moved = TwoCylinders(0.8, stream=0.4 + 0.9, axis=0.9, centre=2 - 1j)
    points = fluid_points(plain)
    expected = plain.velocity(points) * turn
    np.testing.assert_allclose(moved.velocity(points * turn + 2 - 1j), expected, rtol=1e-12)
    assert moved.is_fluid(np.array(moved.centres)).tolist() == [False, False]
    assert abs(moved.centres[1] - moved.centres[0]) == pytest.approx(2.8)


@pytest.mark.parametrize("region", ["trained", "hole", "narrower", "wider"])
def test_the_coarse_grid_holds_means_over_the_fluid_of_each_cell(region) -> None:
    made = cylinder_flows(3, region, seed=5)
    for flow, coarse, fine, fluid in zip(made.flows, made.coarse, made.fine, made.fluid, strict=True):
        first, second = flow.centres
        for row, column in ((0, 0), (3, 3), (4, 2), (7, 5)):
            places = -4 + (np.arange(8) + 0.5) / 8
            points = [complex(column + x, row + y) for y in places for x in places]
            outside = [z for z in points if abs(z - first) >= 1 and abs(z - second) >= 1]
            velocities = flow.velocity(np.array(outside)) if outside else np.zeros(0)
            mean = velocities.mean() if outside else 0j
            found = coarse[:, row, column].tolist()
            assert found == pytest.approx([mean.real, mean.imag, len(outside) / 64], abs=1e-5)
            cell = slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8)
            assert fluid[0][cell].sum().item() == len(outside)
            assert fine[0][cell].sum().item() == pytest.approx(velocities.real.sum(), abs=1e-3)
            assert fine[1][cell].sum().item() == pytest.approx(velocities.imag.sum(), abs=1e-3)
        assert not fine[:, fluid[0] == 0].any()


@pytest.mark.parametrize("region", list(GAPS))
def test_gaps_are_in_their_region_and_cylinders_in_the_box(region) -> None:
    made = cylinder_flows(40, region, seed=3)
    gaps = [flow.gap for flow in made.flows]
    assert all(any(low <= gap <= high for low, high in GAPS[region]) for gap in gaps)
    assert len({*gaps}) == 40
    sizes = [high - low for low, high in GAPS[region]]
    for (low, high), size in zip(GAPS[region], sizes, strict=True):
        assert abs(sum(low <= gap <= high for gap in gaps) - 40 * size / sum(sizes)) <= 1
    for flow in made.flows:
        for centre in flow.centres:
            assert max(abs(centre.real), abs(centre.imag)) + 1 <= 4
    solid = 1 - made.fluid.mean((1, 2, 3))
    torch.testing.assert_close(solid, torch.full((40,), 2 * math.pi / 64), rtol=0.05, atol=0)


def test_no_held_out_gap_is_a_trained_one() -> None:
    ranges = [each for region in ("trained", "hole", "narrower", "wider") for each in GAPS[region]]
    ends = sorted(ranges)
    assert all(one[1] == other[0] for one, other in pairwise(ends))
    assert ((ends[0][0], ends[-1][1]),) == GAPS["all"]


def test_flows_are_drawn_by_their_seed_region_and_number() -> None:
    flows = cylinder_flows(12, seed=2).flows
    assert cylinder_flows(12, "trained", seed=2).flows == flows
    for other in (cylinder_flows(12, seed=3), cylinder_flows(13, seed=2), cylinder_flows(12, "all", seed=2)):
        streams = {flow.stream for flow in other.flows}
        assert len(streams) == len(other.flows)
        assert not streams & {flow.stream for flow in flows}


def test_what_interpolation_misses_is_about_one_at_trained_gaps_and_nothing_inside_cylinders() -> None:
    made = cylinder_flows(128, seed=9)
    missed = (made.fine - made.interpolated)[made.fluid.expand(-1, 2, -1, -1) == 1]
    root = math.sqrt(missed.square().sum().item() / made.fine.numel())
    assert root == pytest.approx(CORRECTION, rel=0.05)
    assert made.correction.square().mean().sqrt().item() == pytest.approx(root / CORRECTION, rel=1e-4)
    assert not made.correction[made.fluid.expand(-1, 2, -1, -1) == 0].any()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: TwoCylinders(0.0), "gap is 0.0"),
        (lambda: TwoCylinders(-1.0), "gap is -1.0"),
        (lambda: TwoCylinders(math.nan), "gap is nan"),
        (lambda: TwoCylinders(1.0, stream=math.inf), "stream is inf"),
        (lambda: TwoCylinders(1.0, axis="x"), "axis is 'x'"),
        (lambda: TwoCylinders(1.0, centre=complex(0, math.nan)), "give a finite complex number"),
        (lambda: data.cylinder_flows(0), "num is 0"),
        (lambda: data.cylinder_flows(4.0), "num is 4.0"),
        (lambda: data.cylinder_flows([4]), r"num is \[4\]"),
        (lambda: data.cylinder_flows(4, "holes"), "Did you mean 'hole'"),
        (lambda: data.cylinder_flows(4, seed=0.5), "seed is 0.5"),
    ],
)
def test_bad_input_is_named(call, said: str) -> None:
    data.cylinder_flows(4)
    with pytest.raises(UseError, match=said):
        call()
