"""The study of linear solvers: multigrid by explicit matrices, work by counting, networks by the fleet."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, cg

from theodolite.data import laplacian, poisson_right_sides
from theodolite.data.poisson import eigenvalues, sines
from theodolite.fleet.training import train
from theodolite.models import MultilevelNet
from theodolite.workloads import workload
from theodolite.workloads.poisson import solve
from theodolite_studies.linear_solver.multigrid import (
    DAMPING,
    Grid,
    grids,
    v_cycle,
    work_of_cg,
    work_of_multigrid,
    work_of_network,
)
from theodolite_studies.linear_solver.report import BROKEN, OTHER
from theodolite_studies.linear_solver.study import STUDY, cells, right_sides, run, run_of, trained

TINY = dataclasses.replace(STUDY.small, steps=3, systems=2, largest=32)
NETWORK = {"part": "trained", "width": 4, "depth": 1, "levels": 4, "parameterization": "plan", "seed": 2}


def explicit(side: int) -> np.ndarray:
    """The five-point Laplacian."""
    line = 2 * np.eye(side) - np.eye(side, k=1) - np.eye(side, k=-1)
    return np.kron(line, np.eye(side)) + np.kron(np.eye(side), line)


def interpolation(side: int) -> np.ndarray:
    """Linear along both sides, from every second point, with zeros outside of the grid."""
    places, coarse = np.arange(side), np.arange(1, side, 2)
    line = np.maximum(1 - np.abs(places[:, None] - coarse) / 2, 0)
    return np.kron(line, line)


def of_grid(grid: Grid) -> np.ndarray:
    return (torch.kron(grid.stiffness, grid.mass) + torch.kron(grid.mass, grid.stiffness)).numpy()


def as_matrix(side: int) -> np.ndarray:
    """The V-cycle as a matrix, from its results for unit vectors."""
    units = torch.eye(side**2, dtype=torch.float64).view(-1, 1, side, side)
    return v_cycle(grids(side), units).flatten(1).numpy().T


@pytest.mark.parametrize("side", [8, 9])
def test_coarse_operators_are_galerkins(side: int) -> None:
    finest, coarse = grids(side)
    a, p = explicit(side), interpolation(side)
    np.testing.assert_allclose(of_grid(finest), a)
    np.testing.assert_allclose(of_grid(coarse), p.T @ a @ p, atol=1e-12)
    for grid in (finest, coarse):
        assert grid.entries == np.count_nonzero(of_grid(grid))
    u = torch.randn(2, 1, side, side, dtype=torch.float64)
    torch.testing.assert_close(finest.apply(u), laplacian(u))


def textbook(a: np.ndarray, side: int) -> np.ndarray:
    """The V-cycle of explicit matrices, from what it leaves of an error: smoothing, correction, smoothing."""
    if side <= 4:
        return np.linalg.inv(a)
    eye, p = np.eye(side**2), interpolation(side)
    smoothing = eye - DAMPING * a / np.diag(a)[:, None]
    left = smoothing @ (eye - p @ textbook(p.T @ a @ p, side // 2) @ p.T @ a) @ smoothing
    return (eye - left) @ np.linalg.inv(a)


@pytest.mark.parametrize("side", [8, 9, 12])
def test_a_cycle_of_two_and_of_three_grids_is_that_of_the_textbook(side: int) -> None:
    np.testing.assert_allclose(as_matrix(side), textbook(explicit(side), side), atol=1e-12)


def test_a_cycle_is_symmetric_and_leaves_little_of_an_error_on_any_grid() -> None:
    for side in (8, 12):
        matrix, factor = as_matrix(side), np.linalg.cholesky(explicit(side))
        np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
        left = 1 - np.linalg.eigvalsh(factor.T @ matrix @ factor)  # the eigenvalues of I − BA
        assert left.min() > -1e-9
        assert left.max() < 0.4


def test_directions_of_a_cycle_make_preconditioned_conjugate_gradients() -> None:
    side, b = 32, poisson_right_sides("smooth", 2, side=32)
    cycle = partial(v_cycle, grids(side))

    def preconditioned(r: np.ndarray) -> np.ndarray:
        return cycle(torch.from_numpy(r).view(1, 1, side, side)).numpy().ravel()

    matrix = sparse.csr_matrix(explicit(side))
    operator = LinearOperator(matrix.shape, preconditioned)
    counts = []
    for one in b:
        steps: list[np.ndarray] = []
        cg(matrix, one.numpy().ravel(), rtol=1e-6, M=operator, callback=steps.append)
        counts.append(len(steps))
    assert solve(cycle, b).iterations.tolist() == counts
    assert max(counts) < 10


def test_work_is_what_the_matrices_of_the_solvers_cost() -> None:
    """On 8² with one coarser grid, 4²: counted step by step."""
    a, p = explicit(8), interpolation(8)
    entries, transfer = np.count_nonzero(a), np.count_nonzero(p)
    assert work_of_cg(8) == 2 * entries + 10 * 64
    residual, update = 2 * entries + 64, 2 * 64
    cycle = 64 + residual + 2 * transfer + 2 * 16**2 + 2 * transfer + 64 + residual + update
    assert work_of_multigrid(8) == cycle + work_of_cg(8) + 2 * 64


def test_work_of_a_network_is_that_of_its_convolutions() -> None:
    width, depth = 4, 2
    entering, square = 2 * 9 * width, 2 * 9 * width**2
    per_level = [entering + depth * 2 * square + (square if side > 4 else 0) for side in (32, 16, 8, 4)]
    convolutions = sum(each * side**2 for each, side in zip(per_level, (32, 16, 8, 4), strict=True))
    convolutions += entering * 32**2  # the readout
    rest = 2 * np.count_nonzero(explicit(32)) + 19 * 32**2
    assert work_of_network(MultilevelNet(width, depth), 32) == convolutions + rest


def test_right_sides_unlike_those_of_the_workload() -> None:
    found = {kind: right_sides(kind, 16, 0, 3) for kind in (*OTHER, *BROKEN)}
    assert {kind: len(b) for kind, b in found.items()} == {
        **dict.fromkeys(("points", "edge", "high waves"), 3),
        **dict.fromkeys(("checkerboard", "highest wave"), 1),
    }
    assert (found["points"].flatten(1).sort().values[:, -2:] == torch.tensor([0.0, 1.0])).all()
    assert (found["edge"][:, :, 1:] == 0).all()
    assert (found["edge"][:, :, 0] != 0).all()
    # All four neighbours of a point have the other sign.
    torch.testing.assert_close(
        laplacian(found["checkerboard"])[..., 1:-1, 1:-1], 8 * found["checkerboard"][..., 1:-1, 1:-1]
    )
    values = eigenvalues(16)
    torch.testing.assert_close(laplacian(found["highest wave"]), values.max() * found["highest wave"])
    coefficients = (sines(16) @ found["high waves"] @ sines(16)).abs() > 1e-9
    assert values[coefficients[0, 0]].min() >= values[~coefficients[0, 0]].max()
    assert coefficients.flatten(1).sum(1).tolist() == pytest.approx([25.6] * 3, abs=2)


def test_known_solvers_need_what_is_known() -> None:
    """Conjugate gradients take one iteration for an eigenvector, and about 2.6 for each point of a side."""
    rows = {(row["kind"], row["side"]): row for row in run({"part": "known", "seed": 1}, TINY)}
    assert all(row["cg"] == row["identity"] for row in rows.values())
    assert rows["highest wave", 32]["cg"] == [1]
    for kind in ("random", "smooth"):
        own = rows[kind, 32]
        assert own["cg"] == pytest.approx([85, 85], abs=6)
        assert len(own["cg residuals"]) == max(own["cg"]) + 1
        assert own["cg residuals"][0] == 1
        assert max(own["multigrid"]) < 10


def test_a_cell_has_the_loss_of_a_network_that_the_fleet_trains() -> None:
    rows = list(run(NETWORK, dataclasses.replace(TINY, systems=1)))
    alone = train(run_of(NETWORK, TINY.steps), workload("poisson"), metrics=False)
    assert [row["loss"] for row in rows] == pytest.approx([alone.held_out] * len(rows), rel=1e-4)
    assert [row["kind"] for row in rows] == ["random", "smooth", *OTHER, *BROKEN]
    for row in rows:
        (count,), residuals = row["network"], row["network residuals"]
        assert len(residuals) == 1 + (4 * 32 if count is None else count)
        assert (residuals[-1] <= 1e-6) == (count is not None)


def test_networks_with_all_grids_have_one_point_on_the_coarsest() -> None:
    cell = next(cell for cell in cells(STUDY.full) if cell.get("levels") == 6)
    _, model, _ = trained(cell, 1)
    entering, square = 2 * 9 * 16, 2 * 9 * 16**2
    # A grid of 2² and one of 1²; each of 4² and 2² gets the result of a coarser one.
    more = (entering + 2 * square) * (2**2 + 1**2) + square * (4**2 + 2**2)
    assert work_of_network(model, 32) - work_of_network(MultilevelNet(16, 1), 32) == more
