"""The solver against textbook conjugate gradients and explicit minimisers, its loss, and bad networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from theodolite import Size, UseError, workload
from theodolite.data import poisson_right_sides
from theodolite.data.poisson import eigenvalues, sines
from theodolite.fleet import Resources, Run, serial
from theodolite.workloads.poisson import direction_loss, mean_iterations, solve


def matrix(side: int) -> np.ndarray:
    """The Laplacian as a sum of Kronecker products."""
    line = 2 * np.eye(side) - np.eye(side, k=1) - np.eye(side, k=-1)
    return np.kron(line, np.eye(side)) + np.kron(np.eye(side), line)


def inverse(r: torch.Tensor) -> torch.Tensor:
    """`A⁻¹ r`, by the eigenvectors."""
    waves = sines(r.shape[-1])
    return waves @ (waves @ r @ waves / eigenvalues(r.shape[-1])) @ waves


def lopsided(r: torch.Tensor) -> torch.Tensor:
    """A bad proposal, but one that is not the residual."""
    weights = torch.linspace(1, 3, r.shape[-1], dtype=r.dtype)
    return weights * r + 0.3 * r.abs()


def conjugate_gradients(explicit: np.ndarray, b: np.ndarray, steps: int) -> list[float]:
    """Relative residuals by Hestenes and Stiefel's recurrences."""
    x, r = np.zeros_like(b), b.copy()
    p, found = r.copy(), [1.0]
    for _ in range(steps):
        curved = explicit @ p
        alpha = r @ r / (p @ curved)
        x, new = x + alpha * p, r - alpha * curved
        p, r = new + (new @ new) / (r @ r) * p, new
        found.append(float(np.linalg.norm(r) / np.linalg.norm(b)))
    return found


@pytest.mark.parametrize("kind", ["random", "smooth"])
def test_the_identity_makes_conjugate_gradients(kind) -> None:
    b, explicit = poisson_right_sides(kind, 3, side=16), matrix(16)
    solved = solve(nn.Identity(), b)
    for one in range(3):
        expected = conjugate_gradients(explicit, b[one].flatten().numpy(), 60)
        needed = next(step for step, left in enumerate(expected) if left <= 1e-6)
        assert solved.iterations[one] == needed
        np.testing.assert_allclose(solved.residuals[: needed + 1, one], expected[: needed + 1], rtol=1e-5)
        u = solved.u[one].flatten().numpy()
        np.testing.assert_allclose(u, np.linalg.solve(explicit, b[one].flatten().numpy()), atol=1e-4)


def test_the_inverse_takes_one_step() -> None:
    b = poisson_right_sides("random", 2, side=12)
    solved = solve(inverse, b, rtol=1e-12)
    assert solved.iterations.tolist() == [1, 1]
    torch.testing.assert_close(solved.u, inverse(b))


def test_every_step_is_the_best_in_the_span_of_the_proposal_and_the_last_two_steps() -> None:
    """Minimisers of `(u − A⁻¹b)ᵀA(u − A⁻¹b)` by an explicit matrix; without conjugacy they differ."""
    side, explicit = 6, matrix(6)
    b = poisson_right_sides("random", 1, side=side)
    right = b.flatten().numpy()
    path = [np.zeros(side**2)] + [
        solve(lopsided, b, rtol=0, limit=limit).u.flatten().numpy() for limit in range(1, 7)
    ]
    for step in range(6):
        left = right - explicit @ path[step]
        proposal = lopsided(torch.from_numpy(left / np.sqrt(np.square(left).mean())).view(1, 1, side, side))
        before = [path[k] - path[k - 1] for k in range(max(step - 1, 1), step + 1)]
        span = np.stack([proposal.flatten().numpy(), *before], 1)
        best = path[step] + span @ np.linalg.solve(span.T @ explicit @ span, span.T @ left)
        np.testing.assert_allclose(path[step + 1], best, atol=1e-9)


def test_residuals_are_given_with_a_root_mean_square_of_one_in_the_dtype_of_the_network() -> None:
    seen = []

    class Watching(nn.Conv2d):
        def forward(self, r):
            seen.append(r)
            return r

    for dtype in (torch.float32, torch.float64):
        solve(Watching(1, 1, 1).to(dtype), 1e-9 * poisson_right_sides("smooth", 2, side=8), limit=4)
        assert seen[-1].dtype == dtype
    for r in seen:
        assert r.square().mean((1, 2, 3)).tolist() == pytest.approx([1, 1], rel=1e-5)


@pytest.mark.parametrize("useless", [0.0, math.nan, math.inf])
def test_a_system_is_given_up_when_nothing_is_proposed_and_the_others_are_solved(useless: float) -> None:
    b = poisson_right_sides("random", 3, side=8)

    def propose(r):
        q = r.clone()
        q[1] = useless
        return q

    solved, alone = solve(propose, b), solve(nn.Identity(), b)
    assert solved.iterations.tolist() == [alone.iterations[0], math.inf, alone.iterations[2]]
    assert (solved.u[1] == 0).all()
    torch.testing.assert_close(solved.u[0], alone.u[0])
    assert solve(lambda r: r * useless, b).residuals.shape == (2, 3)  # ended after one try


def test_a_network_of_zeros_or_without_progress_counts_as_infinite() -> None:
    assert mean_iterations(torch.zeros_like, "random", 8) == math.inf
    solved = solve(nn.Identity(), poisson_right_sides("random", 2, side=16), limit=5)
    assert solved.iterations.tolist() == [math.inf] * 2
    assert len(solved.residuals) == 6


def test_a_right_side_of_zeros_is_solved_by_zeros_at_once() -> None:
    b = torch.stack([torch.zeros(1, 8, 8), torch.randn(1, 8, 8)]).double()
    solved = solve(nn.Identity(), b)
    assert solved.iterations[0] == 0
    assert (solved.u[0] == 0).all()
    assert 0 < solved.iterations[1] < 64


@pytest.mark.parametrize(
    ("propose", "b", "options", "said"),
    [
        (nn.Identity(), torch.ones(1, 1, 8, 9), {}, r"shape \(1, 1, 8, 9\): give \(B, 1, n, n\)"),
        (
            nn.Identity(),
            torch.full((1, 1, 8, 8), math.nan),
            {},
            "right_sides has entries that are not finite",
        ),
        (nn.Identity(), torch.ones(1, 1, 8, 8), {"limit": 0}, "limit is 0"),
        (nn.Identity(), torch.ones(1, 1, 8, 8), {"rtol": -1.0}, "rtol is -1"),
        (lambda r: r[:, :, 1:], torch.ones(1, 1, 8, 8), {}, r"returned \(1, 1, 7, 8\) for .*\(1, 1, 8, 8\)"),
        (lambda r: (r, r), torch.ones(1, 1, 8, 8), {}, "returned tuple for"),
    ],
)
def test_what_cannot_be_solved_is_refused(propose, b, options, said: str) -> None:
    with pytest.raises(UseError, match=said):
        solve(propose, b, **options)


def test_the_loss_is_what_the_best_step_leaves_by_an_explicit_matrix() -> None:
    torch.manual_seed(0)
    explicit = matrix(8)
    r, q = (torch.randn(3, 1, 8, 8, dtype=torch.float64) for _ in range(2))
    left = []
    for one, other in zip(r.flatten(1).numpy(), q.flatten(1).numpy(), strict=True):
        moved = explicit @ other
        left.append(np.square(one - other @ one / (other @ moved) * moved).sum() / np.square(one).sum())
    assert direction_loss(q, r).item() == pytest.approx(np.mean(left))
    assert direction_loss(-1e4 * q, r).item() == pytest.approx(np.mean(left))
    assert direction_loss(inverse(r), r).item() == pytest.approx(0, abs=1e-12)
    after = solve(lambda _: q, r, limit=1).residuals[1]
    assert after.square().mean().item() == pytest.approx(np.mean(left))


def test_the_gradient_of_the_loss_is_that_of_finite_differences_and_zero_at_zero() -> None:
    torch.manual_seed(0)
    r, q = (torch.randn(2, 1, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda one: direction_loss(one, r.detach()), (q,))
    zero = torch.zeros(2, 1, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(direction_loss(zero, r.detach().float()), zero)
    assert (gradient == 0).all()


def test_a_trained_network_takes_a_third_of_the_iterations() -> None:
    """At a side of 32 conjugate gradients take 85; with each of nine seeds and sizes it took 10 to 20."""
    run = Run("poisson", Size(8, 1), lr=5e-3, parameterization="standard", steps=300)
    (outcome,) = serial([run], Resources())
    assert outcome.readings.keys() >= workload("poisson").metrics.keys()
    plain = {kind: mean_iterations(nn.Identity(), kind) for kind in ("random", "smooth")}
    assert outcome.readings["solver iterations"] < plain["random"] / 3
    assert outcome.readings["solver iterations (smooth)"] < plain["smooth"] / 3
