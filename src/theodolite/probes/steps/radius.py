"""How far a step may go before the Taylor series of a cross-entropy stops converging.

Along a direction v of length 1 the logits change at the rates `a = J v`. With logits `z + τ a` a
cross-entropy contains `log F(τ)`, `F(τ) = Σ_k exp(z_k + τ a_k)`. F has no real zero, but complex ones: the
ghosts. At the nearest, |τ| = ρ*, the series of the loss about τ = 0 stops converging. With `Δ = max_k a_k −
min_k a_k`

    ρ* ≥ π/Δ                       phases within |τ|·Δ of each other cannot cancel before π
    ρ* = √(δ² + π²)/Δ              for two classes whose logits are δ apart

So with rows n of the batch and τ the length of the step

    ρ_n = π/Δ_n,    ρ_a = min_n ρ_n,    r = τ/ρ_a

Within ρ_a no zero is met, with the logits taken as linear in the step. What the loss does beyond it is
another question: see `profile`.

References:
    Ghosts of softmax: complex singularities that limit safe step sizes in cross-entropy, 2026.
"""

# N rows, K classes

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.replicas import on_all_ranks, together
from theodolite.present.result import Block, Result
from theodolite.present.text import counted
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, hessian
from theodolite.probes.curvature.score import CrossEntropy
from theodolite.probes.curvature.sharpness import Sharpness
from theodolite.probes.curvature.sharpness import sharpness as measure_sharpness
from theodolite.probes.steps.direction import Direction, by_rows, given_step, norm, push

MOST_DOUBLINGS = 60
MOST_TERMS = 2**20
"""Terms of F that are held in memory at a time."""


@dataclass(frozen=True, eq=False)
class Radius(Result):
    """How far a step may go, by several measures. Made by `radius`."""

    kind: ClassVar[str] = "radius"

    value: float
    """ρ_a; infinite if the step changes all logits of each row alike."""
    length: float
    """τ, of the step as it was given."""
    rows: Tensor
    """ρ_n, (N,), all batches in turn; infinite where a target is ignored or all logits move alike.

    Under DDP these, `worst`, `worst_logits`, `worst_slopes` and `ghost` are of this rank's rows alone.
    """
    worst: int
    """The row with the least ρ_n."""
    worst_logits: Tensor
    """z of the worst row, (K,), over the temperature."""
    worst_slopes: Tensor
    """a of the worst row, (K,)."""
    exact: float | None
    """With two classes, min_n √(δ_n² + π²)/Δ_n: the radius itself. None with more."""
    loss: float
    slope: float
    """`g·v`: below 0 if the step goes down at first."""
    curvature: float
    """`vᵀHv`; nan if there is no second derivative, see `no_hessian`."""
    no_hessian: str | None
    sharpness: Sharpness | None
    """λ_max of the Hessian, if it was asked for."""

    @property
    def r(self) -> float:
        """τ/ρ_a: the step in units of its radius."""
        return self.length / self.value

    @property
    def quadratic(self) -> float:
        """`−2 g·v / vᵀHv`: where a parabola is back at the initial loss.

        Along the gradient it is ‖g‖ times 2/(vᵀHv). Infinite if the loss is not curved upwards.
        """
        return max(0.0, -self.slope) * self.edge if math.isfinite(self.edge) else self.edge

    @property
    def edge(self) -> float:
        """`2/(vᵀHv)`: along the gradient, the learning rate that takes a parabola back to its start."""
        if math.isnan(self.curvature):
            return math.nan
        return 2 / self.curvature if self.curvature > 0 else math.inf

    @cached_property
    def ghost(self) -> complex:
        """The zero of the worst row's partition function that is nearest to 0, by a search."""
        return nearest_ghost(self.worst_logits, self.worst_slopes)

    @property
    def median(self) -> float:
        """The median of ρ_n over the rows that count."""
        finite = self.rows[self.rows.isfinite()]
        return float(finite.median()) if len(finite) else math.inf

    def blocks(self) -> Iterator[Block]:
        """The radius, the worst row, the parabola along the step, and a caution."""
        lines = [f"radius {self.value:.4g}, step {self.length:.4g}: r = {self.r:.3g}"]
        if math.isinf(self.value):
            lines[0] += " (the step moves no logit against another)"
        else:
            exactly = f" (exactly {self.exact:.4g})" if self.exact is not None else ""
            lines.append(
                f"the worst of {counted(len(self.rows), 'row')} is row {self.worst}{exactly}; the median of "
                f"all is {self.median:.4g}"
            )
        if self.no_hessian is None:
            back = f"back at the loss {self.loss:.4g}"
            back = f"never {back}" if math.isinf(self.quadratic) else f"{back} after {self.quadratic:.4g}"
            lines.append(
                f"slope {self.slope:.4g}, curvature {self.curvature:.4g} along the step; a parabola is {back}"
            )
        else:
            lines.append(f"slope {self.slope:.4g}; no curvature: {self.no_hessian}")
        if self.sharpness is not None:
            lines.append(str(self.sharpness))
        lines.append("r is an indicator, not a bound: the loss may rise before r = 1, or fall far beyond it")
        yield "\n".join(lines)


@exclusive()
@on_all_ranks
def radius(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    direction: Direction = None,
    *,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    sharpness: bool = False,
) -> Radius:
    """The ghost radius ρ_a of a cross-entropy along a step, and the step in units of it.

    Args:
        model: any module, in train or eval mode as it is; wrapped or not. It is not changed.
        loss: `loss(logits, targets) -> scalar`, a cross-entropy of the softmax of the logits: it is tested,
            and refused if it is another loss.
        batch: a pair (inputs, targets), or several: a list or a loader. The worst row of all counts.
        direction: the step, by canonical name; an optimizer after `backward()`: its next update; None: minus
            the gradient of the loss on this batch, a step of learning rate 1.
        parameters: patterns of the names that may move; all that require a gradient if left out.
        temperature: the loss is taken of logits/temperature.
        sharpness: find λ_max as well, which takes some dozens of Hessian products.

    Costs one pass in forward mode for each batch, one Hessian product, and a gradient if the direction is
    None. Under DDP ρ_a is the least of all ranks, and loss, slope and curvature are means over them; if one
    rank refuses its batch, all raise.

    >>> layer = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(layer.weight)
    >>> batch = torch.tensor([[3.0], [1.0]]), torch.tensor([0, 1])
    >>> found = radius(layer, nn.functional.cross_entropy, batch, {"weight": torch.tensor([[0.6], [-0.8]])})
    >>> round(found.value * 3 * 1.4 / math.pi, 4), found.worst, round(found.length, 4)  # a = 3 (0.6, −0.8)
    (1.0, 0, 1.0)
    """
    objective, operator, step = prepare(model, loss, batch, direction, parameters, temperature)
    length = norm(step)
    unit = {name: (tensor.double() / length).to(objective.dtype) for name, tensor in step.items()}
    rows = objective.together(lambda: _measured(objective, unit, loss))
    worst = min(rows, key=lambda one: float(one.radii.min()))
    radii = torch.cat([one.radii for one in rows])
    exact = [one.exact for one in rows if one.exact is not None]
    curvature, no_hessian = math.nan, None
    try:
        product = operator @ unit
        curvature = float(sum((product[name].double() * unit[name].double()).sum() for name in unit))
    except UseError as error:
        no_hessian = str(error)
    sums = [sum(one.loss for one in rows), sum(one.slope for one in rows)]
    means = objective.averaged(lambda: torch.tensor(sums, dtype=torch.float64, device=objective.device))
    return Radius(
        value=least_of_all(objective, float(radii.min())),
        length=length,
        rows=radii,
        worst=int(radii.argmin()),
        worst_logits=worst.logits,
        worst_slopes=worst.slopes,
        exact=least_of_all(objective, min(exact)) if exact else None,
        loss=float(means[0]),
        slope=float(means[1]),
        curvature=curvature,
        no_hessian=no_hessian,
        sharpness=measure_sharpness(operator) if sharpness else None,
    )


def prepare(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    direction: Direction,
    parameters: str | Sequence[str] | None,
    temperature: float,
) -> tuple[Objective, Hessian, dict[str, Tensor]]:
    """The objective, its Hessian, and the step; if one of several replicas refuses them, all do."""
    objective = together(
        model, lambda: Objective(model, loss, batch, parameters=parameters, temperature=temperature)
    )
    operator = hessian(model, loss, batch, parameters=objective.names, temperature=temperature)
    # Outside `together`, as ranks exchange their gradients for it.
    gradient = operator.split(operator.gradient) if direction is None else {}
    return objective, operator, together(model, lambda: given_step(objective, direction, model, gradient))


@dataclass(frozen=True)
class _Rows:
    """One batch."""

    radii: Tensor
    exact: float | None
    logits: Tensor
    """Of its worst row."""
    slopes: Tensor
    loss: float
    """Times its share of all examples."""
    slope: float


def _measured(objective: Objective, unit: Mapping[str, Tensor], loss: Loss) -> list[_Rows]:
    """Every batch, along a direction of length 1."""
    found = []
    for pair, share in objective.draw():
        z, a = push(objective, pair, unit)
        value = share * objective.evaluate(z, pair)
        known = _require_cross_entropy(objective.cross_entropy(z, pair), loss)
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        slope = share * float((known(wide).double() * a.double()).sum())
        z, a = by_rows(z, known.dim), by_rows(a, known.dim)
        ignored = known.weights.reshape(-1) == 0
        radii = bounds(a).masked_fill(ignored, math.inf).cpu()
        exactly = binary_radii(z, a).masked_fill(ignored, math.inf) if z.shape[1] == 2 else None
        exact = None if exactly is None else float(exactly.min())
        least = int(radii.argmin())
        found.append(_Rows(radii, exact, z[least].double().cpu(), a[least].double().cpu(), value, slope))
    return found


def least_of_all(objective: Objective, value: float) -> float:
    """The least over the ranks, if the model is one of several replicas."""
    if objective.group is None:
        return value
    least = objective.together(lambda: torch.tensor(value, dtype=torch.float64, device=objective.device))
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=objective.group)
    return float(least)


def _require_cross_entropy(known: CrossEntropy | None, loss: Loss) -> CrossEntropy:
    if known is None:
        called = getattr(loss, "__name__", type(loss).__name__)
        raise UseError(
            f"the loss {called} is not a cross-entropy of the softmax of the logits on this batch, and a "
            "radius exists only for such a loss. Give one, such as nn.functional.cross_entropy, of logits "
            "that are not clamped; for one sigmoid, make two logits (0, z)"
        )
    return known


class RowBounds:
    """`min_n π/Δ_n`, again and again for one loss, which is tested on the first batch only.

    >>> layer = torch.nn.Linear(1, 2, bias=False)
    >>> batch = torch.tensor([[torch.pi], [99.0]]), torch.tensor([0, -100])
    >>> rows = RowBounds(torch.nn.functional.cross_entropy)
    >>> objective = Objective(layer, rows.loss, batch)
    >>> rows.check(objective)
    >>> round(rows.least(objective, {"weight": torch.tensor([[1.0], [0.0]])}), 4)  # the second is ignored
    1.0
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self._dim: int | None = None

    def check(self, objective: Objective) -> None:
        """Refuse a loss that is not a cross-entropy; tested once, as it takes a forward pass."""
        if self._dim is not None:
            return
        batch, _ = next(iter(objective.draw()))
        with objective.conditions(), torch.no_grad():
            logits = objective.forward(objective.stand_ins(grad=False), batch)
        self._dim = _require_cross_entropy(objective.cross_entropy(logits, batch), self.loss).dim

    def least(self, objective: Objective, unit: Mapping[str, Tensor]) -> float:
        """Along a direction of length 1, over all rows whose targets are not ignored."""
        assert self._dim is not None
        found = []
        for batch, _ in objective.draw():
            logits, slopes = push(objective, batch, unit)
            counted = _counted(objective, logits, batch[1], self._dim)
            found.append(float(bounds(by_rows(slopes, self._dim)).masked_fill(~counted, math.inf).min()))
        return min(found)


def _counted(objective: Objective, logits: Tensor, targets: Any, dim: int) -> Tensor:
    """Rows with a weight w, (N,): the derivative `w (p − q)` is not zero, for p that equals no q."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    ramp = torch.linspace(-1, 1, logits.shape[dim], device=logits.device, dtype=dtype)
    with torch.enable_grad():
        point = ramp.expand_as(logits.movedim(dim, -1)).movedim(-1, dim).contiguous().requires_grad_()
        (slope,) = torch.autograd.grad(objective.loss(point, targets), point)
    return by_rows(slope, dim).abs().amax(1) > 0


def bounds(slopes: Tensor) -> Tensor:
    """`π/Δ` of each row, infinite where all slopes are equal; (…, K) → (…).

    >>> bounds(torch.tensor([[0.0, math.pi], [1.0, 1.0]]))
    tensor([1.0000,    inf], dtype=torch.float64)
    """
    return math.pi / (slopes.amax(-1).double() - slopes.amin(-1).double())


def binary_radii(logits: Tensor, slopes: Tensor) -> Tensor:
    """`√(δ² + π²)/Δ` of each row of two classes; (…, 2) → (…).

    >>> binary_radii(torch.tensor([math.sqrt(3) * math.pi, 0.0]), torch.tensor([0.0, math.pi]))
    tensor(2.0000, dtype=torch.float64)
    """
    (z, other_z), (a, other_a) = logits.double().unbind(-1), slopes.double().unbind(-1)
    return torch.sqrt((z - other_z).square() + math.pi**2) / (a - other_a).abs()


def nearest_ghost(logits: Tensor, slopes: Tensor) -> complex:
    """The zero of `F(τ) = Σ_k exp(z_k + τ a_k)` nearest to 0, in the upper half-plane; (K,), (K,).

    Zeros within a circle are counted by the argument principle, bisection finds the least circle with one,
    and Newton's iteration refines it, in float64. Infinity if all slopes are equal.

    >>> ghost = nearest_ghost(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    >>> print(f"{ghost:.4f}")       # (δ + iπ)/Δ
    0.5000+1.5708j
    """
    z, a = (one.detach().double().cpu().numpy() for one in (logits, slopes))
    spread = float(a.max() - a.min())
    if not spread > 0:
        return complex(math.inf, 0.0)
    # In units of 1/Δ; a common shift of z or a does not move the zeros.
    z, a = z - z.max(), (a - a.min()) / spread
    low, high = math.pi, 1.001 * math.pi  # a zero may lie on the first circle
    for _ in range(MOST_DOUBLINGS):
        if _num_zeros(z, a, high):
            break
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_zeros(z, a, middle) else (middle, high)
    around = _half_circle(high)
    starts = around[np.argsort(np.abs(_scaled(z, a, around)[0]))[:8]]
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


def _half_circle(radius: float) -> NDArray[np.complex128]:
    """Places on the upper half; the lower half is its mirror image."""
    return radius * np.exp(1j * np.linspace(0, math.pi, 256 + 64 * math.ceil(radius)))


def _num_zeros(z: NDArray[np.float64], a: NDArray[np.float64], radius: float) -> int:
    """The zeros within a circle: how often F winds around 0 on it."""
    values, _ = _scaled(z, a, _half_circle(radius))
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
