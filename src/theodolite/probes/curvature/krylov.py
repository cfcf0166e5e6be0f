"""A Krylov space of a symmetric operator that is kept small: Lanczos with thick restarts.

`m` orthonormal vectors V, with `H V = V T + w eᵀ`. When V is full, the best Ritz vectors are kept and the
rest is let go; what is left is again such a space (Wu and Simon, Thick-restart Lanczos, 2000; for symmetric
operators the same as Krylov–Schur). So memory is bounded, and nothing that has been found is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.probes.curvature.products import Products

AT_ONCE = 1 << 16
"""Entries of all vectors that are rotated at a time, to need no second copy of them."""


class Krylov:
    """The space, which grows by one vector for each product.

    Every vector is orthogonalised against all that are there, a second time where the first has taken away
    much of it. T is kept in float64.
    """

    def __init__(self, products: Products, most_vectors: int, generator: torch.Generator) -> None:
        self._products, self._generator = products, generator
        self._rows = torch.empty(
            most_vectors + 1, products.size, dtype=products.dtype, device=products.device
        )
        """V as rows, and below them the vector that comes next."""
        self._small = torch.zeros(most_vectors + 1, most_vectors + 1, dtype=torch.float64)
        """T, and the coupling of the next vector."""
        self.num = 0
        self.beta = 0.0
        """`‖w‖`, how far the space is from invariant."""
        self.noise = 0.0
        """Largest part of a product along the space that symmetry says should not be there."""
        self._begin()

    @property
    def full(self) -> bool:
        """Is there no room for another vector?"""
        return self.num == len(self._rows) - 1

    @property
    def nearly_spent(self) -> bool:
        """Is `‖w‖` below the root of the rounding, on the scale of T or a little above it?"""
        within = self._small[: self.num, : self.num].norm()  # no eigenvalue of T is larger
        return self.beta <= torch.finfo(self._products.dtype).eps ** 0.5 * float(within)

    def grow(self) -> None:
        """One product, one more vector."""
        index = self.num
        self.num += 1
        basis, vector = self._rows[: self.num], self._rows[index]
        product = self._without_known(self._products.of_vector(vector))
        alpha = (vector * product).sum()
        product.addcmul_(vector, alpha, value=-1)
        removed = _orthogonalise(product, basis)
        numbers = torch.stack([alpha, removed[-1], removed[:-1].norm(), removed.norm(), _square(product)])
        along, more, odd, taken, square = numbers.tolist()
        self._products.refuse_nonsense(along, taken)
        beta = square**0.5 if 1e-30 < square < 1e30 else _length(product)
        if taken > 0.1 * beta:
            _orthogonalise(product, basis)
            beta = _length(product)
        # α once more from what was left of the vector: the second look corrects the rounding of the first.
        self._small[index, index] = along + more
        self.noise = max(self.noise, odd)
        scale = float(self._small[: self.num, : self.num].abs().max())
        if beta <= torch.finfo(product.dtype).eps * scale or self.num == self._products.size:
            self._begin()
        else:
            self.beta = beta
            torch.div(product, beta, out=self._rows[self.num])
            self._couple(torch.tensor([beta], dtype=torch.float64))

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values, ascending; the vectors in terms of the basis, as columns; residuals `‖Hy − θy‖`."""
        values, columns = torch.linalg.eigh(self._small[: self.num, : self.num])
        return values, columns, self.beta * columns[-1].abs()

    def vectors(self, columns: Tensor) -> Tensor:
        """Combinations of the basis, (P, k)."""
        return (columns.mT.to(self._rows) @ self._rows[: self.num]).mT

    def restart(self, values: Tensor, columns: Tensor) -> None:
        """Keep only these Ritz vectors, with their values."""
        num = len(values)
        rotation = columns.mT.to(self._rows)
        for piece in self._rows.split(AT_ONCE, dim=1):
            piece[:num] = rotation @ piece[: self.num]
        self._rows[num] = self._rows[self.num]
        self._small.zero_()
        self._small[range(num), range(num)] = values
        self.num = num
        self._couple(self.beta * columns[-1])

    def _couple(self, coefficients: Tensor) -> None:
        """`H` between the next vector and those before it."""
        first = self.num - len(coefficients)
        self._small[first : self.num, self.num] = coefficients
        self._small[self.num, first : self.num] = coefficients

    def _without_known(self, product: Tensor) -> Tensor:
        """The product with the last vector less its parts along those before, as T has them by symmetry."""
        known = self._small[: self.num - 1, self.num - 1]
        coupled = known.nonzero()
        if len(coupled) == 0:
            return product.clone()
        first = int(coupled[0])
        if first == self.num - 2:
            return torch.sub(product, self._rows[first], alpha=float(known[first]))
        return torch.addmv(product, self._rows[: self.num - 1].mT, known.to(product), alpha=-1)

    def _begin(self) -> None:
        """A random vector across all that are there: at the start, and when the space is spent."""
        self.beta = 0.0
        vector = self._products.normal(self._generator)
        for _ in range(2):
            vector /= _length(vector)
            _orthogonalise(vector, self._rows[: self.num])
        torch.div(vector, _length(vector), out=self._rows[self.num])


def _orthogonalise(vector: Tensor, basis: Tensor) -> Tensor:
    """Take away, in place, a vector's part along the basis; gives the coefficients of that part."""
    coefficients = basis @ vector
    vector.addmv_(basis.mT, coefficients, alpha=-1)
    return coefficients


def _square(vector: Tensor) -> Tensor:
    # torch sums in pairs, but a norm one after the other: off by 0.1 % for 2e7 entries in float32.
    return vector.square().sum()


def _length(vector: Tensor) -> float:
    """In float64: squares of very small or very large numbers are neither 0 nor infinite there."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
