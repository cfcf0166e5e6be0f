"""SOAP, by its formula; and what is fixed in pytorch_optimizer's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.optimizers import Base, Hyper, borrowed

from .reference import (
    Reference,
    State,
    averaged,
    compact_svd,
    moved,
    orthogonal_rows,
    orthogonal_rows_alone,
    orthogonal_unequal,
)
from .small import noise, stepped


def step(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    grams = {"left": g @ g.T, "right": g.T @ g}
    if t == 1:  # finds its bases, and moves nothing
        for name, gram in grams.items():
            averaged(state, name, gram, 0.95)
            state[f"{name} basis"] = torch.linalg.eigh(state[name])[1].flip(1)
        return w
    left, right = state["left basis"], state["right basis"]
    m = averaged(state, "m", g, 0.95) / (1 - 0.95 ** (t - 1))
    v = averaged(state, "v", (left.T @ g @ right) ** 2, 0.95) / (1 - 0.95 ** (t - 1))
    update = left @ ((left.T @ m @ right) / (v.sqrt() + hyper.eps)) @ right.T
    for axis, (name, gram) in enumerate(grams.items()):
        product = averaged(state, name, gram, 0.95) @ state[f"{name} basis"]
        if (t - 1) % 2 == 0:
            order = (state[f"{name} basis"] * product).sum(0).argsort(descending=True)
            state["v"] = state["v"].index_select(axis, order)
            state[f"{name} basis"] = torch.linalg.qr(product[:, order])[0]
    return (1 - hyper.lr * hyper.weight_decay) * (w - hyper.lr * update)


def without_noise(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    """In bases that are found anew at every step, without directions in which there was no gradient yet.

    There bases are rounding errors, which differ between the two runs.
    """
    bases = []
    for name, gram in (("left", g @ g.T), ("right", g.T @ g)):
        values, vectors = torch.linalg.eigh(averaged(state, name, gram, 0.9))
        bases.append(vectors * (values > 1e-10 * values.max()))
    m = averaged(state, "m", g, 0.9) / (1 - 0.9**t)
    rotated_m, rotated = (bases[0].T @ matrix @ bases[1] for matrix in (m, g))
    v = averaged(state, "v", rotated**2, 0.95) / (1 - 0.95**t)
    return moved(w, bases[0] @ (rotated_m / (v.sqrt() + hyper.eps)) @ bases[1].T, hyper)


def first(gradient: Tensor, eps: float, **_: Any) -> Tensor:
    """Adam where the gradient is diagonal."""
    u, s, v = compact_svd(gradient)
    return u * (s / (s + eps)).unsqueeze(-2) @ v


REFERENCES = {
    "soap": Reference(
        step,
        first,
        rows=orthogonal_rows,
        rows_alone=orthogonal_rows_alone,
        unequal=orthogonal_unequal,
        base=Base(lr=0.02, weight_decay=0.5, eps=0.05),
        eps=lambda entry, norm: norm,
        options={"precondition_frequency": 2},
        absorbable=without_noise,
        # Noise is divided by noise where a gradient is not of full rank, in a basis that rounding chooses.
        is_continuous=False,
    )
}


def test_eps_is_added_after_the_bias_correction() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    ours, theirs = (stepped(one, noise(3, 2), 3, eps=1e6) for one in (borrowed.SOAP, source.SOAP))
    torch.testing.assert_close(ours, -2 * noise(3, 2) / 1e6, rtol=1e-5, atol=0)
    assert (theirs / ours).max() < 0.4


@pytest.mark.parametrize("eps", [1e-12, 1.0])
def test_without_bias_correction_eps_is_as_given(eps: float) -> None:
    """A gradient is diagonal in its own bases: singular values s move by (1 − β₁)s/(√(1 − β₂)s + eps)."""
    pytest.importorskip("pytorch_optimizer")
    grad = noise(4, 4)
    end = stepped(borrowed.SOAP, grad, 2, eps=eps, correct_bias=False)  # the first finds the bases
    values = torch.linalg.svdvals(grad)
    expected = 0.05 * values / (math.sqrt(0.05) * values + eps)
    # Rounding beside the diagonal is divided by an eps of 1e-12 too: a ten-thousandth is left of it.
    torch.testing.assert_close(
        torch.linalg.svdvals(end), expected.sort(descending=True)[0], rtol=0.01, atol=0
    )


def test_the_first_gradient_is_diagonal_in_its_own_basis() -> None:
    """Why it only finds the bases: Adam in them divides rounding by rounding, and nothing is small."""
    pytest.importorskip("pytorch_optimizer")
    grad = noise(24, 24).float()
    basis = [torch.linalg.eigh(gram)[1] for gram in (grad @ grad.T, grad.T @ grad)]
    rotated = basis[0].T @ grad @ basis[1]
    update = basis[0] @ (rotated / (rotated.abs() + 1e-8)) @ basis[1].T
    u, _, vh = torch.linalg.svd(grad)
    assert update.norm() > 4 * (u @ vh).norm()  # √24 would be all entries
    assert torch.equal(stepped(borrowed.SOAP, grad), torch.zeros_like(grad))


def test_bases_of_float64_are_orthogonal_in_float64() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    for home, limit in ((borrowed, 1e-13), (source, None)):
        param = nn.Parameter(noise(6, 5))
        optimizer = home.SOAP([param], precondition_frequency=1)
        for step in range(4):
            param.grad = noise(6, 5, seed=step)
            optimizer.step()
        basis = optimizer.state[param]["Q"][0]
        error = (basis.T @ basis - torch.eye(6, dtype=torch.float64)).abs().max().item()
        assert error < limit if limit else error > 1e-9
