"""SSO, the spectral sphere optimizer: steps along the sphere of matrices of one spectral norm.

`A = √(n_out/n_in)·Φ` with `‖Φ‖₂ = 1`, so `‖A‖_R = 1`. After each step the weight is scaled back to the sphere
`‖W‖₂ = R·√(n_out/n_in)`, so `‖W‖_R` stays, as the condition asks for hidden weights. A multiplier shrinks the
sphere with the weight (`extent`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.optimizers.horizon import Memory, squares_of_momentum
from theodolite.optimizers.matrices import Axes
from theodolite.optimizers.matrix_optimizer import Moving, SphereOptimizer, averaged
from theodolite.optimizers.matrix_step import ahead
from theodolite.optimizers.orthogonal import normalised, polar
from theodolite.optimizers.scaling import GRADIENT_NORM, UNIT
from theodolite.optimizers.spec import Eps, Extent, OptimizerSpec
from theodolite.optimizers.step_checks import Group


class SpectralSphere(SphereOptimizer):
    """Steps of spectral norm `lr·√(out/in)` along a sphere: `W ← W − lr·√(out/in)·Φ`, at a constant `‖W‖₂`.

    Φ is the steepest direction of spectral norm one that does not change `‖W‖₂`: `Φ = msign(M + λΘ)` with the
    momentum M, `Θ = u₁v₁ᵀ` of the leading singular vectors of W, and λ such that `⟨Θ, Φ⟩ = 0`.

    Args:
        params: matrices, or groups of them.
        lr: learning rate.
        momentum: of the moving average of gradients.
        nesterov: look one step ahead?
        weight_decay: decoupled, before the step. The retraction undoes its effect on the norm.
        radius: the constant norm is `radius·√(out/in)`; by default that of the weight at its first step.
        axes: (in, out), the dimensions of inputs and of outputs, as for `Muon`.
        eps: added to the Frobenius norm that the momentum is divided by.

    >>> weight = torch.nn.Parameter(torch.diag(torch.tensor([2.0, 1.0])))
    >>> weight.grad = torch.ones(2, 2)
    >>> SpectralSphere([weight], lr=0.1).step()
    >>> round(torch.linalg.matrix_norm(weight, 2).item(), 5)
    2.0

    References:
        Xie et al., Controlled LLM training on spectral sphere, 2026.
    """

    _instead = "radius=…"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        radius: float | None = None,
        axes: Axes | None = None,
        eps: float = 1e-8,
    ) -> None:
        step = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**step, "radius": radius, "axes": axes, "eps": eps})

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        radius = group["radius"]
        if radius is not None and not (math.isfinite(radius) and radius > 0):
            raise UseError(f"radius is {radius!r}: it has to be positive, or None for the weight's own")

    def _updates(self, moving: Moving) -> Iterator[tuple[Group, Tensor, Tensor]]:
        for group, params in moving:
            updates = ahead(*averaged(params, self.state, group["momentum"]), group)
            for param, update in zip(params, updates, strict=True):
                yield group, param, update

    def _norms(self, group: Group, matrices: Tensor) -> Tensor:
        norms, _ = leading(matrices)
        if group["radius"] is None:
            return norms
        return torch.full_like(norms, group["radius"] * _aspect(matrices))

    def _moved(self, group: Group, weight: Tensor, moment: Tensor, radius: Tensor) -> Tensor:
        lr = float(group["lr"])
        _, direction = leading(weight)
        # A moment of zero has no steepest direction.
        is_there = (moment != 0).any(-1, keepdim=True).any(-2, keepdim=True)
        phi = tangent(normalised(moment, group["eps"]), direction) * is_there
        moved = weight * (1 - lr * group["weight_decay"]) - lr * _aspect(weight) * phi
        return moved * (radius / leading(moved)[0])


def _aspect(matrices: Tensor) -> float:
    return math.sqrt(matrices.shape[-2] / matrices.shape[-1])


def tangent(moment: Tensor, direction: Tensor) -> Tensor:
    """`msign(M + λΘ)` with `⟨Θ, msign(M + λΘ)⟩ = 0`, by bisection.

    The product is the slope at λ of the convex function `‖M + λΘ‖_*`, which is at most `‖M‖_*` at its
    lowest point and at least `|λ| − ‖M‖_*` everywhere: the root lies within `±2‖M‖_*`.

    Args:
        moment: M, (…, m, n) of Frobenius norm one at most, so that `‖M‖_* ≤ √min(m, n)`.
        direction: Θ, of rank one and norm one.
    """
    high = moment.new_full((*moment.shape[:-2], 1, 1), 2 * math.sqrt(min(moment.shape[-2:])))
    low = -high
    for _ in range(24 if moment.dtype == torch.float32 else 48):  # as many halvings as there are digits
        middle = (low + high) / 2
        slope = (direction * polar(moment + middle * direction)).sum((-2, -1), keepdim=True)
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    return polar(moment + (low + high) / 2 * direction)


def leading(matrices: Tensor, width: int = 8, rounds: int = 12) -> tuple[Tensor, Tensor]:
    """The largest singular value σ₁ (…, 1, 1), and `u₁v₁ᵀ`, by subspace iteration.

    Each round is eight power iterations at once, on `(WWᵀ)⁸`, for a few vectors together: a single vector
    would hardly separate the crowded leading singular values of a random matrix.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    power = wide @ wide.mT
    tiny = torch.finfo(power.dtype).tiny
    for _ in range(3):
        power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(tiny)
        power = power @ power
    # Random, as columns of the matrix may all miss the leading direction; the same at every call.
    start = torch.randn(power.shape[-1], width, generator=torch.Generator().manual_seed(0))
    vectors = power @ start.to(power)
    for _ in range(rounds):
        vectors, _ = torch.linalg.qr(power @ vectors)
    left, values, right = torch.linalg.svd(vectors.mT @ wide, full_matrices=False)
    outer = (vectors @ left[..., :1]) @ right[..., :1, :]
    return values[..., :1, None], outer.mT if tall else outer


SPECS = (
    OptimizerSpec(
        "sso",
        # pytorch_optimizer's SpectralSphere computes in bfloat16, leaves out √(out/in) and never retracts.
        SpectralSphere,
        update=UNIT,
        eps=Eps(GRADIENT_NORM),
        extent=Extent("radius", None),
        memory=Memory({"momentum": 0.95}, squares=squares_of_momentum),
        matrices_only=True,
        layout=("axes",),
    ),
)
