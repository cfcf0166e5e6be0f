"""The Laplacian and its eigenvectors against explicit matrices, and what is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite import UseError
from theodolite.data import laplacian, poisson_residuals, poisson_right_sides
from theodolite.data.poisson import eigenvalues, sines


def matrix(side: int) -> np.ndarray:
    """The Laplacian point by point, rows of the grid one after another."""
    found = np.zeros((side**2, side**2))
    for i in range(side):
        for j in range(side):
            found[i * side + j, i * side + j] = 4
            for other in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if min(other) >= 0 and max(other) < side:
                    found[i * side + j, other[0] * side + other[1]] = -1
    return found


@pytest.mark.parametrize("side", [1, 2, 7])
def test_the_laplacian_is_the_five_point_matrix(side: int) -> None:
    torch.manual_seed(side)
    u = torch.randn(3, 1, side, side, dtype=torch.float64)
    expected = u.flatten(1) @ torch.from_numpy(matrix(side)).T
    torch.testing.assert_close(laplacian(u).flatten(1), expected)


@pytest.mark.parametrize("side", [1, 6])
def test_products_of_sines_are_its_eigenvectors(side: int) -> None:
    explicit, waves, values = matrix(side), sines(side).numpy(), eigenvalues(side).numpy()
    for j in range(side):
        for k in range(side):
            mode = np.outer(waves[j], waves[k]).flatten()
            assert np.linalg.norm(mode) == pytest.approx(1)
            np.testing.assert_allclose(explicit @ mode, values[j, k] * mode, atol=1e-12)


def test_residuals_hold_the_low_modes_nine_times_as_large() -> None:
    """By the modes that an explicit matrix gives: 55 % of 256, less the ties, are 141 or a few more."""
    values, modes = np.linalg.eigh(matrix(16))
    drawn = torch.cat([poisson_residuals(16, side=16, step=step) for step in range(40)]).double()
    torch.testing.assert_close(drawn.square().mean((1, 2, 3)), torch.ones(640).double(), rtol=1e-5, atol=0)
    power = np.square(drawn.flatten(1).numpy() @ modes).mean(0)
    low = values <= values[math.ceil(0.55 * 256) - 1] + 1e-9
    assert 141 <= low.sum() <= 145
    assert power[low].mean() / power[~low].mean() == pytest.approx(81, rel=0.05)
    # each power is a mean over 640 squares of Gaussian numbers, with a standard deviation of √(2/640)
    for part in (power[low], power[~low]):
        assert np.abs(part / part.mean() - 1).max() < 5 * math.sqrt(2 / 640)


def test_residuals_are_a_function_of_seed_and_step() -> None:
    first = poisson_residuals(2, seed=1, step=3)
    assert torch.equal(first, poisson_residuals(2, seed=1, step=3))
    others = [poisson_residuals(2, seed=1, step=4), poisson_residuals(2, seed=2, step=3)]
    for other in others:  # of 2048 independent numbers
        assert abs((first * other).mean()) < 0.15


def test_right_sides_are_white_or_made_of_bumps() -> None:
    """White noise has the same power in all modes, bumps with spreads of a twentieth none in the highest."""
    modes = sines(32)
    white, smooth = (modes @ poisson_right_sides(kind, 32) @ modes for kind in ("random", "smooth"))
    for side in (white, smooth):
        assert side.square().mean((1, 2, 3)).tolist() == pytest.approx([1] * 32)
    assert white[..., 16:, :].square().mean() == pytest.approx(1, abs=5 * math.sqrt(2 / (32 * 512)))
    assert smooth[..., :16, :16].square().mean() > 0.95 * 4
    assert smooth[..., 16:, 16:].square().mean() < 0.01
    assert len({tuple(side.flatten()[:4].tolist()) for side in smooth}) == 32


@pytest.mark.parametrize(
    ("u", "said"),
    [
        (torch.ones(1, 1, 4, 5), r"shape \(1, 1, 4, 5\): give \(B, 1, n, n\)"),
        (torch.ones(4, 4), r"shape \(4, 4\)"),
        (torch.ones(1, 2, 4, 4), r"shape \(1, 2, 4, 4\)"),
        (torch.ones(1, 1, 0, 0), r"shape \(1, 1, 0, 0\)"),
        (torch.ones(1, 1, 4, 4, dtype=torch.long), "torch.int64: give a floating-point tensor"),
        ([[1.0]], "list of no dtype"),
    ],
)
def test_what_is_no_square_grid_is_refused(u, said: str) -> None:
    with pytest.raises(UseError, match=said):
        laplacian(u)


def test_a_right_side_of_another_kind_is_refused() -> None:
    with pytest.raises(UseError, match=r"kind is 'smoth'.*smooth"):
        poisson_right_sides("smoth", 1)
    with pytest.raises(UseError, match="side is 0"):
        poisson_residuals(1, side=0)
