"""The curvature of a loss in a few random directions, its excess, and estimates for the whole Hessian.

`H_d = RᵀHR` for sparse orthonormal directions R (P × d). Its excess of positive curvature is
`Tr(H_d)/‖H_d‖_F`, which for large d tends to `√d·t/√(t² + d + 1)` with `t = Tr(H)/‖H‖_F`. As it saturates at
√d, t itself is estimated too.
"""

# d directions

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batch, Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.finite import among, not_finite
from theodolite.core.replicas import on_all_ranks
from theodolite.present.result import Block, Result
from theodolite.probes.curvature.directions import Directions, draw
from theodolite.probes.curvature.exact_trace import gauss_newton_trace
from theodolite.probes.curvature.fan import Coupled, DryRun, Unsupported, dry_run, tangent_passes
from theodolite.probes.curvature.fan_norms import RULES
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian
from theodolite.probes.curvature.sampling import Estimate
from theodolite.probes.curvature.score import agrees, score


@dataclass(frozen=True)
class Projection:
    """A symmetric matrix projected onto d directions, and estimates for the whole matrix."""

    matrix: Tensor
    """`RᵀHR`, (d, d), float64."""
    trace: Estimate
    frobenius: Estimate
    """`‖H‖_F`. The diagonal enters as `Tr²/P`, the least that its squares can add up to: if a diagonal of
    very unequal entries dominates, as for a large embedding alone, it is too small, and t too large."""
    t: Estimate
    """`Tr(H)/‖H‖_F`, from −√P to √P."""

    @property
    def excess(self) -> float:
        """`Tr(H_d)/‖H_d‖_F`, from −√d to √d; 0 for a zero matrix."""
        norm = float(self.matrix.norm())
        return float(self.matrix.trace()) / norm if norm else 0.0


@dataclass(frozen=True)
class Curvature(Result):
    """The Hessian `H = G + S` and its two parts in d random directions."""

    kind: ClassVar[str] = "curvature"
    loads: ClassVar[bool] = True

    hessian: Projection
    gauss_newton: Projection
    residual: Projection
    loss: float
    temperature: float
    size: int
    """P, the number of parameters."""
    route: str
    """How it was measured: `tangents`, or `products` and why."""

    @property
    def excess(self) -> float:
        """Of the Hessian: `Tr(H_d)/‖H_d‖_F`."""
        return self.hessian.excess

    @property
    def trace(self) -> Estimate:
        """`Tr(H)`."""
        return self.hessian.trace

    @property
    def frobenius(self) -> Estimate:
        """`‖H‖_F`."""
        return self.hessian.frobenius

    @property
    def t(self) -> Estimate:
        """`Tr(H)/‖H‖_F`."""
        return self.hessian.t

    @property
    def residual_share(self) -> float:
        """`‖S‖_F/(‖G‖_F + ‖S‖_F)`: 0 if H is its Gauss–Newton part."""
        norms = self.gauss_newton.frobenius.value, self.residual.frobenius.value
        return norms[1] / sum(norms) if sum(norms) else math.nan

    def blocks(self) -> Iterator[Block]:
        """The excess, t, trace and norm of the Hessian, and the share of its parts."""
        d = len(self.hessian.matrix)
        if not float(self.hessian.matrix.abs().max()):
            yield (
                f"the Hessian is zero in all {d} directions: loss {self.loss:.4g} at temperature "
                f"{self.temperature:g} has no curvature left in this precision"
            )
            return
        yield (
            f"excess {self.excess:.3g} of at most {math.sqrt(d):.3g} in {d} directions of {self.size:,}\n"
            f"t = Tr(H)/‖H‖ {self.t}\ntrace {self.trace}, Frobenius norm {self.frobenius}\n"
            f"excess of G {self.gauss_newton.excess:.3g}, of S {self.residual.excess:.3g}; "
            f"S has {100 * self.residual_share:.0f} % of the size of both\n"
            f"loss {self.loss:.4g} at temperature {self.temperature:g}"
        )


@exclusive()
@on_all_ranks
def curvature(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    *,
    directions: int = 50,
    temperature: float = 1.0,
    parameters: str | Sequence[str] | None = None,
    seed: int = 0,
) -> Curvature:
    """The projected Hessian, its excess, its two parts, and trace, norm and t with their errors.

    All directions go through the network in one pass if its operations are known
    (`theodolite.probes.curvature.fan`); otherwise they are multiplied one by one. Both are exact. The trace
    is exact for a cross-entropy on a network of linear maps, convolutions and piecewise linear operations,
    for which `Tr(H) = Tr(G)`; otherwise it is estimated.

    Args:
        model, loss, batch, parameters: as in `hessian`.
        directions: d.
        temperature: the loss is taken of logits/temperature.
        seed: seed of the directions.

    >>> import theodolite as th
    >>> _ = torch.manual_seed(0)
    >>> batch = torch.randn(64, 784), torch.randint(10, (64,))
    >>> found = curvature(th.models.LeNet300(), nn.functional.cross_entropy, batch)
    >>> found.excess > 0, found.trace.exact, found.route
    (True, True, 'tangents')
    """
    objective = Objective(model, loss, batch, parameters=parameters)
    objective.at(temperature)  # is checked
    rays = draw(objective.shapes, directions, seed=seed, dtype=objective.dtype, device=objective.device)
    return measure(objective, rays, [temperature])[0]


def measure(
    objective: Objective, directions: Directions, temperatures: Sequence[float]
) -> tuple[Curvature, ...]:
    """The curvature at each temperature, from one pass. The objective's own temperature has to be 1."""
    parts, route = objective.together(lambda: _by_tangents(objective, directions, temperatures))
    # All ranks take the same route, as products are averaged over ranks.
    carried = objective.averaged(lambda: torch.tensor(float(parts is not None), device=objective.device))
    if parts is not None and float(carried) == 1:
        parts = _Parts(*(objective.averaged(lambda one=one: one) for one in parts))  # type: ignore[misc]
    else:
        route = route if parts is None else "products: another rank has to"
        parts = _by_products(objective, directions, temperatures)
    found = []
    for place, temperature in enumerate(temperatures):
        gauss_newton, residual, loss, trace = (one[place].cpu() for one in parts)
        if not all(bool(one.isfinite().all()) for one in (gauss_newton, residual, loss)) or trace.isinf():
            raise UseError(_not_finite(objective, temperature))
        exact = None if trace.isnan() else float(trace)
        gauss_newton, residual = ((one + one.mT) / 2 for one in (gauss_newton, residual))
        found.append(
            Curvature(
                hessian=_projection(gauss_newton + residual, directions, objective.size, exact),
                gauss_newton=_projection(gauss_newton, directions, objective.size, exact),
                residual=_projection(residual, directions, objective.size, None if exact is None else 0.0),
                loss=float(loss),
                temperature=temperature,
                size=objective.size,
                route=route,
            )
        )
    return tuple(found)


class _Parts(NamedTuple):
    """At r temperatures, in float64."""

    gauss_newton: Tensor
    """`RᵀGR`, (r, d, d)."""
    residual: Tensor
    """`RᵀSR`, (r, d, d)."""
    losses: Tensor
    traces: Tensor
    """`Tr(G)`, (r,); nan if it is not known, or `Tr(S)` may not be 0."""


def _by_tangents(
    objective: Objective, directions: Directions, temperatures: Sequence[float]
) -> tuple[_Parts | None, str]:
    """The parts from passes with tangents, or None, and the route."""
    total: _Parts | None = None
    try:
        with objective.conditions():
            for batch, share in objective.draw():
                dry = dry_run(objective, batch, directions, RULES)
                try:
                    found = _of_batch(objective, batch, directions, dry, temperatures)
                except Coupled:
                    dry = dataclasses.replace(dry, separable=False)
                    found = _of_batch(objective, batch, directions, dry, temperatures)
                found = _Parts(*(share * one for one in found))
                total = found if total is None else _Parts(*map(torch.add, total, found))
    except (Unsupported, torch.OutOfMemoryError) as reason:
        return None, f"products: {reason}"
    return total, "tangents"


def _of_batch(
    objective: Objective, batch: Batch, directions: Directions, dry: DryRun, temperatures: Sequence[float]
) -> _Parts:
    logits, num = dry.logits, directions.num
    losses = [objective.evaluate(logits / one, batch) for one in temperatures]
    known = objective.cross_entropy(logits, batch)
    if known is not None and not all(
        agrees(known, objective.loss, logits / one, batch[1]) for one in temperatures
    ):
        known = None
    with torch.enable_grad():
        points = [(logits / one).detach().requires_grad_() for one in temperatures]
        scores = [score(objective.loss, point, batch[1], known) for point in points]
    seeds = [slope.detach() / one for slope, one in zip(scores, temperatures, strict=True)]
    gauss_newton = logits.new_zeros((len(temperatures), num, num), dtype=torch.float64)
    residual = torch.zeros_like(gauss_newton)
    kept: list[Tensor] = []
    for part, found in tangent_passes(objective, batch, directions, dry, seeds):
        residual += found.residual
        if known is None:
            kept.append(found.tangents)
            continue
        weights = known.weights[part] if logits.ndim > 1 else known.weights
        for place, one in enumerate(temperatures):
            gauss_newton[place] += _centred(found.tangents / one, found.logits / one, weights, known.dim)
    if known is None:
        tangents = torch.cat(kept, dim=1) if logits.ndim else kept[0]
        for place, (one, point, slope) in enumerate(zip(temperatures, points, scores, strict=True)):
            gauss_newton[place] = _by_autograd(tangents / one, point, slope)
    traces = None
    if dry.multilinear and known is not None:
        traces = gauss_newton_trace(objective, batch, known, temperatures)
    numbers = residual.new_tensor([losses, traces or [math.nan] * len(losses)])
    return _Parts(gauss_newton, residual, *numbers)


def _centred(tangents: Tensor, logits: Tensor, weights: Tensor, dim: int) -> Tensor:
    """`ż_iᵀ B ż_j = Σ w p (ż_i − z̄_i)(ż_j − z̄_j)` for a cross-entropy, accurate where p is near 1."""
    num, p = len(tangents), logits.softmax(dim)
    inner = dim if dim < 0 else dim + 1
    top = p.argmax(dim, keepdim=True)
    relative = tangents - tangents.gather(inner, top.expand(num, *top.shape))
    centred = relative - (p * relative).sum(inner, keepdim=True)
    flat = centred.reshape(num, -1)
    return ((flat * (weights.to(p) * p).reshape(-1)) @ flat.mT).double()


def _by_autograd(tangents: Tensor, point: Tensor, slope: Tensor) -> Tensor:
    """`ż_iᵀ B ż_j` for any other loss, from its derivative at a point."""
    num = len(tangents)
    if not slope.requires_grad:
        return tangents.new_zeros((num, num), dtype=torch.float64)
    curved = [torch.autograd.grad(slope, point, one, retain_graph=True)[0] for one in tangents]
    return (tangents.reshape(num, -1) @ torch.stack(curved).reshape(num, -1).mT).double()


def _by_products(objective: Objective, directions: Directions, temperatures: Sequence[float]) -> _Parts:
    R = directions.matrix
    rows = []
    for temperature in temperatures:
        operator = Hessian(objective.at(temperature))
        matrices = [(R.mT @ (one @ R)).double() for one in (operator.gauss_newton, operator.residual)]
        rows.append((*matrices, matrices[0].new_tensor(operator.loss)))
    gauss_newton, residual, losses = map(torch.stack, zip(*rows, strict=True))
    return _Parts(gauss_newton, residual, losses, torch.full_like(losses, math.nan))


def _not_finite(objective: Objective, temperature: float) -> str:
    """The error for a curvature that is not finite, with the names of the tensors."""
    operator = Hessian(objective.at(temperature))
    what, found = "the gradient of the loss", operator.gradient
    if bool(found.isfinite().all()):
        what = "the gradient of the loss is finite, but the product of the Hessian with a vector of ones"
        found = operator @ torch.ones_like(found)
    if names := not_finite(objective.split(found)):
        what += f" is not finite in {among(names, len(objective.names))}"
    else:
        what = "the Hessian is not finite in one of the directions"
    return (
        f"{what}, so there is no curvature. Look at the weights and the batch for nan "
        "and for very large numbers, and at the network for operations without a derivative, such as a "
        "square root or a norm of zeros"
    )


def _projection(matrix: Tensor, directions: Directions, size: int, exact: float | None) -> Projection:
    """Estimates from `s_i s_j (r_iᵀHr_j)²`, whose expectation is Σ H_ab² over the block (i, j).

    Errors are from the jackknife over directions.
    """
    d, counts = len(matrix), directions.counts.double()
    diagonal = counts * matrix.diagonal()
    blocks = counts[:, None] * counts * matrix.square()
    blocks = blocks - torch.diag(blocks.diagonal())
    everything = torch.ones(d, dtype=torch.float64)

    def estimates(kept: Tensor) -> Tensor:
        num = kept.sum(-1)
        trace = (kept @ diagonal) * d / num if exact is None else torch.full_like(num, exact)
        # Only the sum of the diagonal is known; Tr²/P is the least that its squares can add up to.
        norm = ((kept @ blocks * kept).sum(-1) * d**2 / (num * (num - 1)) + trace.square() / size).sqrt()
        return torch.stack([trace, norm, torch.where(norm == 0, torch.zeros_like(norm), trace / norm)])

    values = estimates(everything[None])[:, 0]
    left_out = estimates(everything - torch.eye(d, dtype=torch.float64))
    errors = ((d - 1) / d * (left_out - left_out.mean(1, keepdim=True)).square().sum(1)).sqrt()
    trace, norm, t = (
        Estimate(float(value), float(error)) for value, error in zip(values, errors, strict=True)
    )
    if exact is not None:
        trace = Estimate(exact, 0.0)
    return Projection(matrix, trace, norm, t)
