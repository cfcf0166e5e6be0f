"""The complex zeros of a partition function, which end the Taylor series of its logarithm.

Along a line the logits are `z + τ a`, and a cross-entropy holds the term `log F(τ)`,

    F(τ) = Σ_k exp(z_k + τ a_k).

F has no real zero, but complex ones: the ghosts. Where the nearest lies, at |τ| = ρ*, the series of the loss
about τ = 0 stops converging. With `Δ = max_k a_k − min_k a_k`:

    ρ* ≥ π/Δ                       all arguments within |τ|·Δ of each other cannot cancel before π
    ρ* = √(δ² + π²)/Δ              two classes whose logits are δ apart

References:
    Ghosts of softmax: complex singularities that limit safe step sizes in cross-entropy, 2026.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_DOUBLINGS = 60
MOST_TERMS = 2**20
"""Of F at many places, in memory at a time."""


def bounds(slopes: Tensor, dim: int = -1) -> Tensor:
    """`π/Δ` of each row, infinite where all slopes are equal; (…, K) → (…).

    >>> bounds(torch.tensor([[0.0, math.pi], [1.0, 1.0]]))
    tensor([1.0000,    inf], dtype=torch.float64)
    """
    return math.pi / (slopes.amax(dim).double() - slopes.amin(dim).double())


def binary_radii(logits: Tensor, slopes: Tensor, dim: int = -1) -> Tensor:
    """`√(δ² + π²)/Δ` of each row of two classes; (…, 2) → (…).

    >>> binary_radii(torch.tensor([math.sqrt(3) * math.pi, 0.0]), torch.tensor([0.0, math.pi]))
    tensor(2.0000, dtype=torch.float64)
    """
    (z, other_z), (a, other_a) = logits.double().unbind(dim), slopes.double().unbind(dim)
    return torch.sqrt((z - other_z).square() + math.pi**2) / (a - other_a).abs()


def nearest_ghost(logits: Tensor, slopes: Tensor) -> complex:
    """The zero of `F(τ) = Σ_k exp(z_k + τ a_k)` nearest to 0, in the upper half-plane; (K,), (K,).

    Zeros within a circle are counted by the argument principle, the circle is halved until one is on it, and
    Newton's iteration ends it, in float64. Without slopes that differ there is none: infinity.

    >>> ghost = nearest_ghost(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    >>> print(f"{ghost:.4f}")       # (δ + iπ)/Δ
    0.5000+1.5708j
    """
    z, a = (one.detach().double().cpu().numpy() for one in (logits, slopes))
    spread = float(a.max() - a.min())
    if not spread > 0:
        return complex(math.inf, 0.0)
    # In units of 1/Δ; a common shift of z or a takes nothing from the zeros.
    z, a = z - z.max(), (a - a.min()) / spread
    low, high = math.pi, 1.001 * math.pi  # a zero may lie on the first circle
    for _ in range(MOST_DOUBLINGS):
        if _num_zeros(z, a, high):
            break
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_zeros(z, a, middle) else (middle, high)
    angles = np.linspace(0, math.pi, _num_samples(high))
    around = high * np.exp(1j * angles)
    values = np.abs(_scaled(z, a, around)[0])
    starts = around[np.argsort(values)[:8]]
    found = [_newton(z, a, complex(start)) for start in starts]
    near = [zero for zero in found if abs(zero) < 1.01 * high]
    zero = min(near, key=abs) if near else complex(starts[0])
    return complex(zero.real, abs(zero.imag)) / spread


def _scaled(
    z: NDArray[np.float64], a: NDArray[np.float64], tau: NDArray[np.complex128]
) -> tuple[NDArray[np.complex128], NDArray[np.complex128]]:
    """F and F' at some places, both over `exp(max_k Re(z_k + τ a_k))`."""
    value, slope = np.empty_like(tau), np.empty_like(tau)
    some = max(1, MOST_TERMS // len(z))
    for start in range(0, len(tau), some):
        part = slice(start, start + some)
        exponents = z + tau[part, None] * a
        terms = np.exp(exponents - exponents.real.max(1, keepdims=True))
        value[part], slope[part] = terms.sum(1), (terms * a).sum(1)
    return value, slope


def _num_samples(radius: float) -> int:
    return 256 + 64 * math.ceil(radius)


def _num_zeros(z: NDArray[np.float64], a: NDArray[np.float64], radius: float) -> int:
    """Within a circle: how often F goes around 0 on it. Upper and lower half are mirror images."""
    angles = np.linspace(0, math.pi, _num_samples(radius))
    tau = radius * np.exp(1j * angles)
    values, _ = _scaled(z, a, tau)
    return round(float(np.angle(values[1:] / values[:-1]).sum()) / math.pi)


def _newton(z: NDArray[np.float64], a: NDArray[np.float64], tau: complex) -> complex:
    for _ in range(50):
        (value,), (slope,) = _scaled(z, a, np.array([tau]))
        if slope == 0:
            break
        step = complex(value / slope)
        tau -= step
        if abs(step) < 1e-14 * abs(tau):
            break
    return tau
