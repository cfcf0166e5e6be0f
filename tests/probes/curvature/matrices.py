"""Symmetric matrices with a known spectrum, that behave like operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Matrix:
    """A matrix with what an operator has."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.size, self.dtype, self.device = len(matrix), matrix.dtype, matrix.device
        self.names, self.shapes = ("x",), {"x": matrix.shape[:1]}
        self.products = 0

    def __matmul__(self, vectors: Tensor) -> Tensor:
        self.products += 1 if vectors.ndim == 1 else vectors.shape[1]
        return self.matrix @ vectors.to(self.dtype)


def with_spectrum(values: Tensor, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Matrix:
    """A matrix with these eigenvalues and random eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    size = len(values)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    matrix = basis @ torch.diag(values.double()) @ basis.T
    return Matrix(((matrix + matrix.T) / 2).to(dtype))


def semicircle(size: int, radius: float = 1.0, *, seed: int = 0) -> Tensor:
    """A random symmetric matrix whose eigenvalues follow Wigner's semicircle on [−radius, radius]."""
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return (square + square.T) * radius / math.sqrt(8 * size)


def with_spikes(bulk: Tensor, spikes: list[float], *, seed: int = 1) -> Matrix:
    """A bulk plus orthogonal spikes."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(len(bulk), len(spikes), generator=generator, dtype=torch.float64)
    vectors, _ = torch.linalg.qr(raw)
    return Matrix(bulk + vectors @ torch.diag(torch.tensor(spikes, dtype=torch.float64)) @ vectors.T)
