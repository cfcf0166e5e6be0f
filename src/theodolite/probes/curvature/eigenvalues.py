"""Eigenvalues at the ends of a spectrum, with error bounds, by Lanczos with thick restarts.

A Krylov space has `m` orthonormal vectors V with `H V = V T + w eᵀ`. When V is full, the best Ritz vectors
are kept and the others dropped, which leaves a space of the same form (Wu and Simon, Thick-restart Lanczos,
2000; for symmetric operators the same as Krylov–Schur). So memory is bounded, and nothing that was found is
lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from theodolite.core.arguments import one_of, positive, whole
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, share
from theodolite.core.replicas import on_all_ranks
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table
from theodolite.probes.curvature.operator import Operator, operator_of
from theodolite.probes.curvature.sampling import Products

Which = Literal["largest", "smallest", "magnitude", "ends"]

MOST_PRODUCTS = 1000
SMALLEST_SCALE = 0.01
"""An eigenvalue below this share of the largest in magnitude has an error relative to that share."""
LEAST = 10
"""Products, besides two for each eigenvalue, before the search may stop."""
AT_ONCE = 1 << 16
"""Entries of all vectors that are rotated at a time, to need no second copy of them."""


@dataclass(frozen=True)
class Eigenvalues(Result):
    """Eigenvalues with their vectors and errors."""

    kind: ClassVar[str] = "eigenvalues"

    values: Tensor
    """(k,), float64, from the largest down; for `smallest` from the smallest up."""
    vectors: Tensor = field(compare=False)
    """(P, k), a column of length 1 for each value. Not saved."""
    residuals: Tensor
    """(k,), `‖Hv − λv‖`: some eigenvalue lies within this distance of the value."""
    errors: Tensor
    """(k,), approximate errors: `r²/gap` for an isolated eigenvalue, at most r."""
    converged: bool
    products: int
    """The number of products `H v`."""
    status: str

    def table(self) -> Table:
        """A row for each eigenvalue."""
        rows = zip(*(one.tolist() for one in (self.values, self.errors, self.residuals)), strict=True)
        return Table(("eigenvalue", "error", "residual"), list(rows))

    def blocks(self) -> Iterator[Block]:
        """The values with their errors, and the status."""
        columns = (Column("eigenvalue", show="{:.6g}".format), Column("error", show="± {:.1g}".format))
        yield Table(columns, [row[:2] for row in self.table().rows])
        yield self.status


@exclusive()
@on_all_ranks
def eigenvalues(
    model: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    k: int = 1,
    which: Which = "largest",
    rtol: float = 1e-5,
    most_products: int = MOST_PRODUCTS,
    most_vectors: int | None = None,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Eigenvalues:
    """Eigenvalues at an end of the spectrum of a Hessian, or of any symmetric operator, by Lanczos.

    Args:
        model, loss, batch, parameters, temperature: as in `hessian`; or an operator alone.
        k: the number of eigenvalues; with `ends` the number at each end.
        which: the `largest`, the `smallest` (most negative), the largest in `magnitude`, or both `ends`.
        rtol: stop when the error of each value is at most this fraction of it. The error of a value below a
            hundredth of the largest in magnitude is relative to that hundredth.
        most_products: stop here, converged or not.
        most_vectors: the number of vectors of length P kept in memory; `2k + 30` if None.
        seed: seed of the random start vector.
        progress: called with the fraction of values that have converged.

    With θ a Ritz value, r its residual and γ the distance to the next eigenvalue, some eigenvalue lies within
    r of θ, and the error of θ is about `r²/γ` where r < γ. The search stops on the latter, with γ from the
    other Ritz values less their residuals. So an eigenvalue that no product has shown can be missed: at the
    edge of a dense bulk, if the next one is closer than the tolerance, and if an eigenvalue is exactly
    repeated, as a Krylov space has one copy of it. If P is at most `most_vectors`, all are found.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])).double(), torch.zeros(2, 1).double()
    >>> found = eigenvalues(model, nn.functional.mse_loss, batch, k=2)
    >>> print(found)
    eigenvalue    error
    ───────────────────
             9  ± ...
             1  ± ...
    <BLANKLINE>
    converged after 2 products
    """
    operator = operator_of(model, loss, batch, parameters=parameters, temperature=temperature)
    whole("k", k, least=1)
    positive("rtol", rtol)
    one_of("which", which, get_args(Which))
    num = 2 * k if which == "ends" else k
    if num > operator.size:
        raise UseError(
            f"k is {k}, which asks for {num} eigenvalues, and the operator has only {operator.size}: "
            "one for each parameter"
        )
    whole("most_products", most_products, least=num)
    products = Products(operator)
    room = min(operator.size, max(2 * num + 30 if most_vectors is None else most_vectors, num + 3))
    krylov = _Krylov(products, room, torch.Generator().manual_seed(seed))
    report = share(progress, "eigenvalues")
    complete = room == operator.size
    fresh, fraction = 0, 0.0
    while True:
        report(fraction)
        krylov.grow()
        out = products.num >= most_products
        if krylov.num < num or (complete and not krylov.full and not out):
            continue
        # An extreme eigenvalue that the start vector hardly contains shows late: what converges at once may
        # be the one below it.
        early = products.num < min(operator.size, 2 * num + LEAST)
        if early and not (krylov.nearly_spent or krylov.full or out):
            continue
        values, columns, residuals = krylov.ritz()
        order = _order(values, which)
        wanted = order[:num]
        errors = _errors(values, residuals, wanted)
        allowed = rtol * _scale(values)[wanted]
        # Errors cannot fall below the noise of the products.
        floor = max(krylov.noise, torch.finfo(products.dtype).eps * float(values.abs().max()))
        settled = (errors + krylov.noise <= allowed) | (errors <= floor)
        fraction = float(settled.double().mean())
        spent = krylov.beta <= torch.finfo(products.dtype).eps ** 0.5 * float(values.abs().max())
        done = bool(settled.all()) and (spent or not early)
        if done and spent and krylov.num < operator.size and fresh < num:
            # One start vector finds one of several equal eigenvalues. The next vector, from rounding or drawn
            # at random, shows the others.
            fresh, done = fresh + 1, False
        if done or out:
            break
        if krylov.full:
            # Keep half of the room above the wanted ones for the next best, or they have to be found again.
            kept = order[: num + (room - num) // 2]
            krylov.restart(values[kept], columns[:, kept])
    report(fraction)
    if which == "ends":
        falling = values[wanted].argsort(descending=True)
        wanted, errors, allowed = (one[falling] for one in (wanted, errors, allowed))
    # Rounding, or an operator that is not quite symmetric, adds to both.
    noise = krylov.noise + 10 * torch.finfo(values.dtype).eps * float(values.abs().max())
    residuals = residuals[wanted] + noise
    errors = torch.minimum(errors + noise, residuals)
    status, converged = f"converged after {products.num} products", done
    if not done:
        relative = errors / _scale(values[wanted])
        worst = int(relative.argmax())
        status = (
            f"not converged after {products.num} products: the relative error of eigenvalue {worst + 1} of "
            f"{num}, {values[wanted][worst]:.4g}, is {relative[worst]:.1g}, above rtol {rtol:g}. Raise "
            "most_products or rtol"
        )
    elif bool((errors > allowed).any()):
        converged = False
        status = (
            f"not converged: the products are symmetric only to {krylov.noise:.1g}, and more of them do not "
            f"help. The cause is rounding of {operator.dtype}, or a loss that is not the same each time"
        )
    vectors = krylov.vectors(columns[:, wanted])
    return Eigenvalues(values[wanted], vectors, residuals, errors, converged, products.num, status)


def _order(values: Tensor, which: Which) -> Tensor:
    """Indices of the ascending Ritz values, best first."""
    rising = torch.arange(len(values))
    if which == "largest":
        return rising.flip(0)
    if which == "smallest":
        return rising
    if which == "magnitude":
        return values.abs().argsort(descending=True)
    # From both ends in turn, the one in the middle once.
    return torch.stack([rising.flip(0), rising], dim=1).flatten()[: len(values)]


def _errors(values: Tensor, residuals: Tensor, wanted: Tensor) -> Tensor:
    """Approximate errors of the wanted Ritz values.

    `r²/γ`, γ the distance to the next eigenvalue. Or `r·‖r of all wanted‖/γ`, γ the distance to the next
    that is not wanted: residuals lie outside the space, so wanted values close to each other do not mix.
    """
    own, all_own = residuals[wanted], residuals[wanted].norm()
    distances = (values[wanted, None] - values[None, :]).abs() - residuals[None, :]
    distances[range(len(wanted)), wanted] = torch.inf
    alone = _quadratic(own, own, distances)
    distances[:, wanted] = torch.inf
    return torch.minimum(alone, _quadratic(own, all_own, distances))


def _quadratic(own: Tensor, other: Tensor, distances: Tensor) -> Tensor:
    """`own·other/γ` where γ is larger than both, else the residual."""
    gaps = distances.min(dim=1).values
    apart = (gaps > torch.maximum(own, other)) & gaps.isfinite()
    return torch.where(apart, own * other / torch.where(apart, gaps, 1.0), own)


def _scale(values: Tensor) -> Tensor:
    """What rtol is relative to."""
    return torch.maximum(values.abs(), SMALLEST_SCALE * values.abs().max())


class _Krylov:
    """A Krylov space, which grows by one vector with each product. T is kept in float64.

    Each vector is orthogonalised against all others, twice if the first time removed much of it.
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
        """The largest component of a product along the space that a symmetric operator would not have."""
        self._begin()

    @property
    def full(self) -> bool:
        """Is there no room for another vector?"""
        return self.num == len(self._rows) - 1

    @property
    def nearly_spent(self) -> bool:
        """Is `‖w‖` below the root of the rounding error, relative to ‖T‖?"""
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
        # torch's sum is pairwise, its norm is not: wrong by 0.1 % for 2e7 entries in float32.
        length = product.square().sum()
        numbers = torch.stack([alpha, removed[-1], removed[:-1].norm(), removed.norm(), length])
        along, more, odd, taken, square = numbers.tolist()
        self._products.require_finite(along, taken)
        beta = square**0.5 if 1e-30 < square < 1e30 else _length(product)
        if taken > 0.1 * beta:
            _orthogonalise(product, basis)
            beta = _length(product)
        # The second orthogonalisation corrects the rounding of α.
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
        self._small[first : self.num, self.num] = self._small[self.num, first : self.num] = coefficients

    def _without_known(self, product: Tensor) -> Tensor:
        """The product with the last vector less its components along those before, known from T."""
        known = self._small[: self.num - 1, self.num - 1]
        coupled = known.nonzero()
        if len(coupled) == 0:
            return product.clone()
        first = int(coupled[0])
        if first == self.num - 2:
            return torch.sub(product, self._rows[first], alpha=float(known[first]))
        return torch.addmv(product, self._rows[: self.num - 1].mT, known.to(product), alpha=-1)

    def _begin(self) -> None:
        """Add a random vector orthogonal to the others: at the start, and when the space is invariant."""
        self.beta = 0.0
        vector = self._products.normal(self._generator)
        for _ in range(2):
            vector /= _length(vector)
            _orthogonalise(vector, self._rows[: self.num])
        torch.div(vector, _length(vector), out=self._rows[self.num])


def _orthogonalise(vector: Tensor, basis: Tensor) -> Tensor:
    """Remove, in place, a vector's components along the basis; returns them."""
    coefficients = basis @ vector
    vector.addmv_(basis.mT, coefficients, alpha=-1)
    return coefficients


def _length(vector: Tensor) -> float:
    """In float64, in which squares do not under- or overflow."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
