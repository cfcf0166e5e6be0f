"""Eigenvalues at the ends of a spectrum, with bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.krylov import Krylov
from theodolite.probes.curvature.operator import Operator, operator_of
from theodolite.probes.curvature.products import Products, Progress, require_at_least
from theodolite.probes.curvature.replicas import on_all_ranks

Which = Literal["largest", "smallest", "magnitude", "ends"]

TOLERANCE = 1e-5
MOST_PRODUCTS = 1000
SMALLEST_SCALE = 0.01
"""An eigenvalue below this share of the largest in magnitude is found to the tolerance of that share."""


LEAST = 10
"""Products beyond two for each eigenvalue, before which nothing counts as converged."""


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues with their vectors, and how far each can be trusted."""

    values: Tensor
    """(k,), float64, from the largest down; of `smallest` from the smallest up."""
    vectors: Tensor
    """(P, k), a column for each value, of length 1."""
    residuals: Tensor
    """(k,), `‖Hv − λv‖`: some eigenvalue lies within this of the value, whatever the spectrum is."""
    errors: Tensor
    """(k,), about what each value is off by: `r²/gap` for an eigenvalue that stands apart, r at most."""
    converged: bool
    products: int
    """How many products `H v` it took."""
    status: str

    def __str__(self) -> str:
        rows = [
            f"{value:12.6g}  ± {error:.1g}"
            for value, error in zip(self.values.tolist(), self.errors.tolist(), strict=True)
        ]
        return "\n".join([*rows, self.status])


@exclusive()
@on_all_ranks
def eigenvalues(
    measured: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    k: int = 1,
    which: Which = "largest",
    tolerance: float = TOLERANCE,
    most_products: int = MOST_PRODUCTS,
    most_vectors: int | None = None,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Eigenvalues:
    """Eigenvalues at an end of the spectrum of a Hessian, or of any symmetric operator, by Lanczos.

    Args:
        measured: an operator, or a model with its loss and batch, whose Hessian is meant.
        loss: `loss(logits, targets) -> scalar`.
        batch: `(inputs, targets)`, or several such pairs.
        k: how many; with `ends` so many at each end.
        which: the `largest`, the `smallest` (most negative), the largest in `magnitude`, or both `ends`.
        tolerance: it stops when the error of every value is at most this share of it. An eigenvalue of
            less than a hundredth of the largest in magnitude is found to this share of that hundredth.
        most_products: stop here, converged or not.
        most_vectors: how many vectors of length P may be kept; `2k + 30` if None.
        parameters: patterns of names, as in `hessian`.
        temperature: the loss is taken of logits/temperature.
        seed: of the random vector it starts with.
        progress: is told which share of the values has converged.

    With θ a Ritz value, r its residual and γ the distance to the next eigenvalue, some eigenvalue lies within
    r of θ, and θ is off by about `r²/γ` where r is smaller than γ. The second is what it stops on: γ is taken
    from the other Ritz values less their own residuals. So an eigenvalue of which no product has shown
    anything yet can still be missed: at the edge of a dense bulk, where the next one is closer than the
    tolerance, and where one occurs several times, exactly, of which a Krylov space has one copy. If P is at
    most `most_vectors`, all are found.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])).double(), torch.zeros(2, 1).double()
    >>> found = eigenvalues(model, nn.functional.mse_loss, batch, k=2)
    >>> print(found)
        9  ± ...
        1  ± ...
    converged after 2 products
    """
    operator = operator_of(measured, loss, batch, parameters=parameters, temperature=temperature)
    require_at_least(1, k=k)
    if not tolerance > 0:
        raise UseError(f"tolerance is {tolerance!r}: it has to be above 0")
    if which not in get_args(Which):
        raise UseError(f"which is {which!r}: choose one of {', '.join(get_args(Which))}")
    num = 2 * k if which == "ends" else k
    if num > operator.size:
        raise UseError(
            f"k is {k}, which asks for {num} eigenvalues, and the operator has only {operator.size}: "
            "one for each parameter"
        )
    require_at_least(num, most_products=most_products)
    products = Products(operator)
    room = min(operator.size, max(2 * num + 30 if most_vectors is None else most_vectors, num + 3))
    krylov = Krylov(products, room, torch.Generator().manual_seed(seed))
    complete = room == operator.size
    fresh = 0
    while True:
        krylov.grow()
        out = products.num >= most_products
        if krylov.num < num or (complete and not krylov.full and not out):
            continue
        # An end that the start vector hardly sees shows late: what settles at once may be the one below it.
        early = products.num < min(operator.size, 2 * num + LEAST)
        if early and not (krylov.nearly_spent or krylov.full or out or progress):
            continue  # nothing that could be found now would count
        values, columns, residuals = krylov.ritz()
        order = _order(values, which)
        wanted = order[:num]
        errors = _errors(values, residuals, wanted)
        allowed = tolerance * _scale(values)[wanted]
        # Below the noise of the products nothing gets better any more.
        floor = max(krylov.noise, torch.finfo(products.dtype).eps * float(values.abs().max()))
        settled = (errors + krylov.noise <= allowed) | (errors <= floor)
        if progress:
            progress(float(settled.double().mean()))
        done = bool(settled.all())
        spent = krylov.beta <= torch.finfo(products.dtype).eps ** 0.5 * float(values.abs().max())
        if done and early and not spent:
            done = False
        if done and spent and krylov.num < operator.size and fresh < num:
            # One start vector sees one of several equal eigenvalues. What comes next is rounding or drawn at
            # random, and shows the others.
            fresh, done = fresh + 1, False
        if done or out:
            break
        if krylov.full:
            # Half of the room above the wanted ones stays with the next best: fewer would be found again.
            kept = order[: num + (room - num) // 2]
            krylov.restart(values[kept], columns[:, kept])
    if which == "ends":
        falling = values[wanted].argsort(descending=True)
        wanted, errors, allowed = wanted[falling], errors[falling], allowed[falling]
    # Rounding, or an operator that is not quite symmetric, is in both.
    noise = krylov.noise + 10 * torch.finfo(values.dtype).eps * float(values.abs().max())
    residuals = residuals[wanted] + noise
    errors = torch.minimum(errors + noise, residuals)
    status, converged = f"converged after {products.num} products", done
    if not done:
        status = _not_converged(values[wanted], errors, products.num, tolerance)
    elif bool((errors > allowed).any()):
        status, converged = _too_noisy(krylov.noise, products), False
    return Eigenvalues(
        values[wanted],
        krylov.vectors(columns[:, wanted]),
        residuals,
        errors,
        converged=converged,
        products=products.num,
        status=status,
    )


def _order(values: Tensor, which: Which) -> Tensor:
    """Which Ritz values are wanted, best first; they come in ascending order."""
    rising = torch.arange(len(values))
    if which == "largest":
        return rising.flip(0)
    if which == "smallest":
        return rising
    if which == "magnitude":
        return values.abs().argsort(descending=True)
    # From both ends in turn, and the one in the middle, if there is one, once.
    return torch.stack([rising.flip(0), rising], dim=1).flatten()[: len(values)]


def _errors(values: Tensor, residuals: Tensor, wanted: Tensor) -> Tensor:
    """About what each of the wanted Ritz values is off by.

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
    """`own·other/γ` where γ is larger than both, else what the residual alone says."""
    gaps = distances.min(dim=1).values
    apart = (gaps > torch.maximum(own, other)) & gaps.isfinite()
    return torch.where(apart, own * other / torch.where(apart, gaps, 1.0), own)


def _scale(values: Tensor) -> Tensor:
    """What the tolerance is a share of."""
    return torch.maximum(values.abs(), SMALLEST_SCALE * values.abs().max())


def _not_converged(values: Tensor, errors: Tensor, products: int, tolerance: float) -> str:
    relative = errors / _scale(values)
    worst = int(relative.argmax())
    return (
        f"not converged after {products} products: eigenvalue {worst + 1} of {len(values)}, "
        f"{values[worst]:.4g}, is known to {relative[worst]:.1g} of its size, and {tolerance:g} was asked "
        "for. Raise most_products, or the tolerance"
    )


def _too_noisy(noise: float, products: Products) -> str:
    return (
        f"not converged: the products are symmetric only to {noise:.1g}, and more of them will not help. "
        f"Rounding of {products.operator.dtype} does that, and so does a loss that is not the same each time"
    )
