"""Lanczos tridiagonalisation from several start vectors at once, a fixed number of steps.

From a start vector v it gives a quadrature rule: with T the tridiagonal matrix, θ its eigenvalues and s its
eigenvectors, `vᵀ f(H) v = Σ_i s²_{1i} f(θ_i)` for every polynomial f of degree up to 2·steps − 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.probes.curvature.products import Products, Progress


def quadrature(
    products: Products, starts: Tensor, basis: Tensor, progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """Nodes θ and weights `s²_{1i}` for each start vector, a row of `starts`: (b, steps), float64.

    `basis` (b, steps, P) is where the vectors are kept; what it holds is overwritten.

    Where a space is spent before the last step, its last places have a node that is there already, and
    weight 0.
    """
    diagonal, beside = _tridiagonal(products, starts, basis, progress)
    nodes, weights = torch.empty_like(diagonal), torch.zeros_like(diagonal)
    for row in range(len(diagonal)):
        cut = (beside[row] == 0).nonzero()
        num = int(cut[0]) + 1 if len(cut) else diagonal.shape[1]
        matrix = torch.diag(diagonal[row, :num])
        matrix += torch.diag(beside[row, : num - 1], 1) + torch.diag(beside[row, : num - 1], -1)
        values, vectors = torch.linalg.eigh(matrix)
        nodes[row] = values[-1]
        nodes[row, :num], weights[row, :num] = values, vectors[0].square()
    return nodes, weights


def _tridiagonal(
    products: Products, starts: Tensor, basis: Tensor, progress: Progress | None
) -> tuple[Tensor, Tensor]:
    """The diagonal (b, steps) of T and what stands beside it (b, steps − 1), 0 where a space is spent."""
    num, steps, _ = basis.shape
    diagonal = torch.zeros(num, steps, dtype=torch.float64)
    beside = torch.zeros(num, steps - 1, dtype=torch.float64)
    torch.mul(starts, 1 / _length(starts)[:, None], out=basis[:, 0])
    for step in range(steps):
        vector = basis[:, step]
        product = products.of_rows(vector)
        if step:
            coupling = beside[:, step - 1, None].to(product)
            product = torch.addcmul(product, coupling, basis[:, step - 1], value=-1)
        else:
            product = product.clone()
        alpha = (vector * product).sum(1)
        product.addcmul_(alpha[:, None], vector, value=-1)
        removed = _orthogonalise(product, basis[:, : step + 1])
        # α once more from what was left of the vector: the second look corrects the rounding of the first.
        diagonal[:, step] = alpha.double().cpu() + removed[:, -1].double().cpu()
        products.refuse_nonsense(*diagonal[:, step].tolist())
        if progress:
            progress((step + 1) / steps)
        if step + 1 == steps:
            break
        beta = _length(product)
        if bool((removed.norm(dim=1) > 0.1 * beta).any()):
            _orthogonalise(product, basis[:, : step + 1])
            beta = _length(product)
        scale = diagonal.abs().amax(1).maximum(beside.abs().amax(1)).to(beta)
        # A spent space goes on with zero vectors, which change nothing, beside those that are not.
        spent = beta <= torch.finfo(product.dtype).eps * scale
        if bool(spent.all()):
            break
        beside[:, step] = beta.masked_fill(spent, 0.0).double().cpu()
        torch.mul(product, (1 / beta).masked_fill(spent, 0.0)[:, None], out=basis[:, step + 1])
    return diagonal, beside


def _orthogonalise(vectors: Tensor, basis: Tensor) -> Tensor:
    """Take away, in place, the part of each vector (b, P) along its basis (b, m, P)."""
    coefficients = torch.bmm(basis, vectors[:, :, None])
    vectors[:, None].baddbmm_(coefficients.mT, basis, alpha=-1)
    return coefficients[:, :, 0]


def _length(vectors: Tensor) -> Tensor:
    # torch sums in pairs, but a norm one after the other: off by 0.1 % for 2e7 entries in float32.
    return vectors.square().sum(1).sqrt()
