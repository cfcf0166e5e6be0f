"""How far a step may go before the Taylor series of a cross-entropy stops converging.

Along the direction v, of length 1, logits change at the rates `a = J v`. By row n of the batch

    Δ_n = max_k a_nk − min_k a_nk,    ρ_n = π/Δ_n,    ρ_a = min_n ρ_n,    r = τ/ρ_a

with τ the length of the step. Within ρ_a no complex zero of a partition function is met, with the logits
taken as linear in the step (see `ghosts`). What the loss really does beyond is
another question: see `profile`.

References:
    Ghosts of softmax: complex singularities that limit safe step sizes in cross-entropy, 2026.
"""

# N rows, K classes

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, Operator, hessian
from theodolite.probes.curvature.replicas import on_all_ranks, together
from theodolite.probes.curvature.sharpness import Sharpness
from theodolite.probes.curvature.sharpness import sharpness as measure_sharpness
from theodolite.probes.steps.direction import Direction, given_step, norm
from theodolite.probes.steps.ghosts import binary_radii, bounds, nearest_ghost
from theodolite.probes.steps.pushing import by_rows, least_of_all, push, require_cross_entropy


@dataclass(frozen=True, eq=False)
class Radius:
    """How far a step may go, by several measures. Made by `radius`."""

    value: float
    """ρ_a; infinite where the step changes no logit against another."""
    length: float
    """τ, of the step as it was given."""
    rows: Tensor
    """ρ_n, (N,), all batches in turn; infinite where a target is ignored or all logits move alike.

    Under DDP these, `worst`, `worst_logits`, `worst_slopes` and `ghost` are of this rank's rows alone.
    """
    worst: int
    """The row of the least ρ_n."""
    worst_logits: Tensor
    """z of the worst row, (K,), over the temperature."""
    worst_slopes: Tensor
    """a of the worst row, (K,)."""
    exact: float | None
    """With two classes, min_n √(δ_n² + π²)/Δ_n: the radius itself. None with more."""
    loss: float
    slope: float
    """`g·v`: below 0 where the step goes down at first."""
    curvature: float
    """`vᵀHv`; nan where there is no second derivative, and `no_hessian` says why."""
    no_hessian: str | None
    sharpness: Sharpness | None
    """λ_max of the Hessian, if it was asked for."""

    @property
    def r(self) -> float:
        """τ/ρ_a: the step in units of its radius."""
        return self.length / self.value

    @property
    def quadratic(self) -> float:
        """`−2 g·v / vᵀHv`: where a parabola is back at the loss it began with.

        Along the gradient it is ‖g‖ times 2/(vᵀHv). Infinite where the loss is not curved upwards.
        """
        if math.isnan(self.curvature):
            return math.nan
        return max(0.0, -2 * self.slope) / self.curvature if self.curvature > 0 else math.inf

    @property
    def edge(self) -> float:
        """`2/(vᵀHv)`: along the gradient, the learning rate at which a parabola is back where it began."""
        if math.isnan(self.curvature):
            return math.nan
        return 2 / self.curvature if self.curvature > 0 else math.inf

    @cached_property
    def ghost(self) -> complex:
        """The zero of the worst row's partition function that is nearest to 0, by a search."""
        return nearest_ghost(self.worst_logits, self.worst_slopes)

    def __str__(self) -> str:
        lines = [f"radius {self.value:.4g}, step {self.length:.4g}: r = {self.r:.3g}"]
        if math.isinf(self.value):
            lines[0] += " (the step moves no logit against another)"
        else:
            within = f" (exactly {self.exact:.4g})" if self.exact is not None else ""
            lines.append(
                f"the worst of {len(self.rows)} rows is row {self.worst}{within}; the median of all is "
                f"{self.median:.4g}"
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
        lines.append("r is a reading, not a promise: the loss may rise before r = 1, or fall far beyond it")
        return "\n".join(lines)

    @property
    def median(self) -> float:
        """The median of ρ_n over the rows that count."""
        finite = self.rows[self.rows.isfinite()]
        return float(finite.median()) if len(finite) else math.inf


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
        model: any module, in the mode it is to be looked at; wrapped or not. It is left as it was.
        loss: `loss(logits, targets) -> scalar`, a cross-entropy of the softmax of the logits: it is tried
            out, and refused if it is something else.
        batch: a pair (inputs, targets), or several: a list or a loader. The worst row of all counts.
        direction: the step, by canonical name; an optimizer after `backward()`: its next update; None: minus
            the gradient of the loss on this batch, a step of learning rate 1.
        parameters: patterns of the names that may move; all that require a gradient if left out.
        temperature: the loss is taken of logits/temperature.
        sharpness: find λ_max as well, which takes some dozens of Hessian products.

    One pass in forward mode for each batch, one Hessian product, and a gradient where the direction is None.
    Under DDP ρ_a is the least of all ranks, and loss, slope and curvature are means over them; where one rank
    refuses its batch, all raise.

    >>> layer = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(layer.weight)
    >>> batch = torch.tensor([[3.0], [1.0]]), torch.tensor([0, 1])
    >>> found = radius(layer, nn.functional.cross_entropy, batch, {"weight": torch.tensor([[0.6], [-0.8]])})
    >>> round(found.value * 3 * 1.4 / math.pi, 4), found.worst, round(found.length, 4)  # a = 3 (0.6, −0.8)
    (1.0, 0, 1.0)
    """
    objective, operator, step = begun(model, loss, batch, direction, parameters, temperature)
    length = norm(step)
    unit = {name: (tensor.double() / length).to(objective.dtype) for name, tensor in step.items()}
    rows = objective.together(lambda: _measured(objective, unit, loss))
    worst = min(rows, key=lambda one: float(one.radii.min()))
    radii = torch.cat([one.radii for one in rows])
    exact = [one.exact for one in rows if one.exact is not None]
    bent, no_hessian = _curvature(operator, unit)
    return Radius(
        value=least_of_all(objective, float(radii.min())),
        length=length,
        rows=radii,
        worst=int(radii.argmin()),
        worst_logits=worst.logits,
        worst_slopes=worst.slopes,
        exact=least_of_all(objective, min(exact)) if exact else None,
        loss=_mean_of_all(objective, sum(one.loss for one in rows)),
        slope=_mean_of_all(objective, sum(one.slope for one in rows)),
        curvature=bent,
        no_hessian=no_hessian,
        sharpness=measure_sharpness(operator) if sharpness else None,
    )


def begun(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    direction: Direction,
    parameters: str | Sequence[str] | None,
    temperature: float,
) -> tuple[Objective, Hessian, dict[str, Tensor]]:
    """What is measured, its Hessian, and the step; of several replicas all refuse it or none."""
    objective = together(
        model, lambda: Objective(model, loss, batch, parameters=parameters, temperature=temperature)
    )
    operator = hessian(model, loss, batch, parameters=objective.names, temperature=temperature)
    # Found before: ranks exchange their gradients for it.
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
        known = require_cross_entropy(objective.cross_entropy(z, pair), loss)
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        slope = share * float((known(wide).double() * a.double()).sum())
        z, a = by_rows(z, known.dim), by_rows(a, known.dim)
        ignored = known.weights.reshape(-1) == 0
        radii = bounds(a).masked_fill(ignored, math.inf).cpu()
        exact = None
        if z.shape[1] == 2:
            exact = float(binary_radii(z, a).masked_fill(ignored, math.inf).min())
        least = int(radii.argmin())
        found.append(_Rows(radii, exact, z[least].double().cpu(), a[least].double().cpu(), value, slope))
    return found


def _curvature(operator: Operator, unit: Mapping[str, Tensor]) -> tuple[float, str | None]:
    """`vᵀHv`, or nan and why there is none."""
    try:
        product = operator @ dict(unit)
    except UseError as error:
        return math.nan, str(error)
    return float(sum((product[name].double() * unit[name].double()).sum() for name in unit)), None


def _mean_of_all(objective: Objective, value: float) -> float:
    """Over the ranks of a replicated model."""
    own = torch.tensor(value, dtype=torch.float64, device=objective.device)
    return float(objective.averaged(lambda: own))
