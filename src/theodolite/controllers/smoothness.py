"""Newton steps regularised by the gradient, with an adaptive radius."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.arguments import one_of, positive, whole
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.finite import not_finite
from theodolite.core.replicas import on_all_ranks
from theodolite.present.result import Block, Result
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, Operator
from theodolite.probes.curvature.score import score

Curvature = Literal["gauss_newton", "hessian", "fisher"]
Status = Literal["accepted", "refused", "stationary"]
End = Literal["converged", "at the radius", "negative curvature", "most products"]
"""How a solve ended."""

MOST_TRIES = 40
"""Per step: γ falls by up to 10¹²."""
MOST_GAMMA = 2.0**100
"""Upper bound of γ, which doubles with every accepted step."""
ROUNDING = 32
"""Losses that differ by fewer units in the last place than this count as equal."""


@dataclass(frozen=True)
class NewtonStep(Result):
    """One step of `NormalizedSmoothness`, taken or not."""

    kind: ClassVar[str] = "Newton step"
    loads: ClassVar[bool] = True
    status: Status
    """`refused`: no γ that was tried gave the required decrease; weights are unchanged, and the next step
    continues with the last γ. `stationary`: there is no gradient, or the step is lost in rounding; weights
    and γ are unchanged."""
    loss: float
    loss_after: float
    gamma: float
    """γ of the last try: the radius of the ball in which the step was sought."""
    shift: float
    """λ = ‖g‖/γ."""
    gradient_norm: float
    gradient_norm_after: float
    length: float
    """‖d‖."""
    tries: int
    products: int
    """With the curvature, over all tries."""
    solved: End | None
    """How conjugate gradients ended in the last try."""

    @property
    def accepted(self) -> bool:
        """Did the weights move?"""
        return self.status == "accepted"

    def blocks(self) -> Iterator[Block]:
        """One line."""
        yield (
            f"{self.status}: loss {self.loss:.6g} → {self.loss_after:.6g}, "
            f"‖g‖ {self.gradient_norm:.3g} → {self.gradient_norm_after:.3g}, γ {self.gamma:.3g}, "
            f"tries {self.tries}, products {self.products}"
        )


@dataclass(frozen=True)
class NewtonCounts(Result):
    """Totals over all steps of a `NormalizedSmoothness`."""

    kind: ClassVar[str] = "counts of Newton steps"
    loads: ClassVar[bool] = True
    steps: int = 0
    accepted: int = 0
    """Steps that moved the weights."""
    tries: int = 0
    products: int = 0

    def blocks(self) -> Iterator[Block]:
        """One line."""
        yield (
            f"{self.accepted} of {self.steps} steps accepted, {self.tries} tries, {self.products} products "
            "with the curvature"
        )


class NormalizedSmoothness:
    """Gradient-regularised Newton steps with any curvature, by gradient-normalized smoothness.

    With loss f, gradient g and a curvature A at the weights:

        λ = ‖g‖/γ,   d = −(A + λI)⁻¹ g,   accept if  f − f⁺ ≥ ‖g⁺‖²/(8λ)

    After an accepted step γ is doubled; otherwise it is halved, and the step is tried again from the same
    point. γ is the radius of the ball around the weights in which `g + A d` approximates the gradient well,
    relative to g. It is the paper's gradient-normalized smoothness, up to factors of two, and the only state
    between steps.

    Args:
        model: any module. Parameters that require a gradient are trained. Buffers and `.grad` are left
            unchanged; dropout has one fixed mask.
        loss: `loss(logits, targets) -> scalar`.
        curvature: A. `"gauss_newton"` is `Jᵀ B J`, for a cross-entropy the same as the true Fisher matrix.
            `"fisher"` is the empirical one, the mean of `gᵢ gᵢᵀ` over the gradients of single examples (the
            first dimension of the logits; the loss has to be their mean). `"hessian"` need not be positive:
            see `solve` for what happens at negative curvature.
        gamma: γ of the first try.
        rtol: conjugate gradients end at a residual of `rtol·‖g‖`, or of λ‖d‖ where that is less.
        most_products: or after as many products with A, in one try.

    A step costs a gradient, and for every try a gradient and the products. It suits small and medium problems
    in full batch, or with batches large enough that the loss of one is meaningful.

    If f and f⁺ differ by rounding only, `−½(g + g⁺)·d` replaces `f − f⁺`: they agree up to third order in d.
    γ does not fall then, as a try may be refused because of rounding in the gradient.

    References:
        Semenov, Jaggi and Doikov, Gradient-normalized smoothness for optimization with approximate Hessians,
        2025, Algorithm 1.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.eye(2).double(), torch.ones(2, 1).double()
    >>> newton = NormalizedSmoothness(model, nn.functional.mse_loss, gamma=100.0, rtol=1e-9)
    >>> newton.step(batch).accepted, newton.gamma
    (True, 200.0)
    >>> bool(newton.step(batch).loss < 1e-3)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        curvature: Curvature = "gauss_newton",
        gamma: float = 1.0,
        rtol: float = 1e-2,
        most_products: int = 100,
    ) -> None:
        self.curvature = one_of("curvature", curvature, get_args(Curvature))
        self.gamma = positive("gamma", gamma)
        """γ of the next try."""
        self.rtol = positive("rtol", rtol)
        if not rtol < 1:
            raise UseError(f"rtol is {rtol}: at 1 and above no step is sought at all. Try 0.01")
        self.most_products = whole("most_products", most_products, least=1)
        self.counts = NewtonCounts()
        self._model, self._loss = model, loss

    @exclusive()
    @on_all_ranks
    def step(self, batch: Batches) -> NewtonStep:
        """One step on a batch `(inputs, targets)`, or on several as one: a list of pairs, a DataLoader.

        Raises if the loss or the gradient is not finite at the current weights. If they would be after a
        step, that counts as a try, and γ is halved.
        """
        objective = Objective(self._model, self._loss, batch)
        _refuse_not_finite("", dict(canonical_parameters(objective.model)), "Load finite weights")
        here = Hessian(objective)
        loss, gradient = here.loss, here.gradient
        _refuse_not_finite("the gradient of ", objective.split(gradient), "Check the batch and the loss")
        norm = float(gradient.norm())
        if norm == 0:
            return self._counted(
                NewtonStep("stationary", loss, loss, self.gamma, 0.0, 0.0, 0.0, 0.0, 0, 0, None), self.gamma
            )
        gamma, products, told = self.gamma, 0, False
        operator: Operator = here if self.curvature == "hessian" else getattr(here, self.curvature)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        rounding = ROUNDING * torch.finfo(gradient.dtype).eps
        weights = objective.stand_ins(grad=False)
        for tries in range(1, MOST_TRIES + 1):
            shift = norm / gamma
            solution = solve(
                lambda vector: (operator @ vector).to(wide),
                gradient.to(wide),
                shift=shift,
                rtol=self.rtol,
                most_products=self.most_products,
            )
            products += solution.products
            pieces = objective.split(solution.step)
            moved = {name: (tensor + pieces[name]).to(tensor.dtype) for name, tensor in weights.items()}
            after, slope = _evaluated(objective, moved)
            slope_norm = float(slope.norm())
            lost = math.isfinite(after) and abs(loss - after) <= rounding * max(abs(loss), abs(after))
            # To third order the same, where the difference of the losses is lost in rounding.
            by_gradients = -0.5 * float(torch.dot((gradient + slope).to(wide), solution.step))
            decrease = by_gradients if lost else loss - after
            reading = NewtonStep(
                "refused",
                *(loss, after, gamma, shift, norm, slope_norm, float(solution.step.norm()), tries, products),
                solved=solution.end,
            )
            if all(torch.equal(moved[name], tensor) for name, tensor in weights.items()):
                told = False
                break
            if math.isfinite(after) and decrease >= slope_norm**2 / (8 * shift):
                with torch.no_grad():
                    for name, tensor in objective.tensors.items():
                        tensor.copy_(moved[name])
                # If rounding refused the earlier tries, γ would fall without end.
                gamma = max(2 * gamma, self.gamma) if lost else 2 * gamma
                return self._counted(replace(reading, status="accepted"), min(gamma, MOST_GAMMA))
            told = told or not lost
            gamma /= 2
        if not told:
            return self._counted(replace(reading, status="stationary"), self.gamma)
        return self._counted(reading, gamma)

    def state_dict(self) -> dict[str, Any]:
        """γ and the counts, as values that JSON knows."""
        return {"gamma": self.gamma, "curvature": self.curvature, **asdict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if set(state) != set(self.state_dict()):
            odd = sorted(set(state) ^ set(self.state_dict()))[0]
            raise UseError(
                f"the state has {'no' if odd not in state else 'an unknown'} {odd!r}: it is of another kind"
            )
        if state["curvature"] != self.curvature:
            raise UseError(
                f"the state is of curvature={state['curvature']!r}, and this is {self.curvature!r}: γ means "
                "something else there. Use the same curvature"
            )
        self.gamma = positive("gamma", state["gamma"])
        self.counts = NewtonCounts(**{name: int(state[name]) for name in asdict(self.counts)})

    def __repr__(self) -> str:
        return (
            f"NormalizedSmoothness({type(self._model).__name__}, curvature={self.curvature!r}, "
            f"γ={self.gamma:.3g}, {self.counts.accepted} of {self.counts.steps} steps accepted)"
        )

    def _counted(self, step: NewtonStep, gamma: float) -> NewtonStep:
        """The step, with γ and the counts updated."""
        self.gamma = gamma
        self.counts = NewtonCounts(
            self.counts.steps + 1,
            self.counts.accepted + step.accepted,
            self.counts.tries + step.tries,
            self.counts.products + step.products,
        )
        return step


@dataclass(frozen=True)
class Solution:
    """The solution of `solve`."""

    step: Tensor
    """d, (P,)."""
    residual: float
    """‖(A + λI)d + g‖/‖g‖."""
    products: int
    """Products by A that were made."""
    end: End


def solve(
    product: Callable[[Tensor], Tensor],
    gradient: Tensor,
    *,
    shift: float,
    rtol: float,
    most_products: int,
) -> Solution:
    """Conjugate gradients for `(A + λI) d = −g` within the ball of radius γ = ‖g‖/λ.

    They start from d = 0, without a preconditioner, and end when the residual r is within `rtol·‖g‖` and
    within `λ‖d‖`. By the quadratic model the gradient after the step is `g + A d = −λd − r`: by the second
    condition r contributes no more to it than an exact solution leaves.

    If A is positive semi-definite, no step is longer than γ. Otherwise as in Steihaug's method: if the
    curvature along the next direction is not positive, or the iterate would leave the ball, d goes along that
    direction to the sphere of radius γ and ends there.

    Args:
        product: `v ↦ A v`, of vectors (P,).
        gradient: g, not zero.
        shift: λ, above 0.
        rtol: of the residual, relative to ‖g‖.
        most_products: the limit; d also lowers the quadratic if it ends there.

    >>> matrix = torch.diag(torch.tensor([1.0, 3.0]))
    >>> found = solve(matrix.mv, torch.tensor([2.0, 4.0]), shift=1.0, rtol=1e-6, most_products=9)
    >>> found.step.round(decimals=5), found.end, found.products
    (tensor([-1., -1.]), 'converged', 2)
    >>> away = solve((-matrix).mv, torch.tensor([3.0, 4.0]), shift=1.0, rtol=1e-6, most_products=9)
    >>> away.step.norm(), away.end
    (tensor(5.), 'negative curvature')
    """
    step, residual = torch.zeros_like(gradient), -gradient
    start = norm = float(gradient.norm())
    radius, rounding = start / shift, 8 * torch.finfo(gradient.dtype).eps
    direction = residual.clone()

    def ended(step: Tensor, products: int, end: End) -> Solution:
        return Solution(step, float(residual.norm()) / start, products, end)

    for products in range(1, most_products + 1):
        applied = product(direction) + shift * direction
        curvature = float(torch.dot(direction, applied))
        if not math.isfinite(curvature):
            raise UseError(
                "a product with the curvature is not finite, so no step was made. Check the batch and the "
                "weights for very large numbers"
            )
        if curvature <= 0:
            return ended(_to_sphere(step, direction, radius), products, "negative curvature")
        length = norm**2 / curvature
        moved = step + length * direction
        reached = float(moved.norm())
        # Up to rounding.
        if reached > radius * (1 + 1e-5):
            return ended(_to_sphere(step, direction, radius), products, "at the radius")
        step, residual = moved, residual - length * applied
        before, norm = norm, float(residual.norm())
        if norm <= max(min(rtol * start, shift * reached), rounding * start):
            return ended(step, products, "converged")
        direction = residual + (norm / before) ** 2 * direction
    return ended(step, most_products, "most products")


def _evaluated(objective: Objective, weights: Mapping[str, Tensor]) -> tuple[float, Tensor]:
    """Loss and gradient (P,) with other weights; the model is not changed."""
    value, slope = objective.together(lambda: _own_evaluated(objective, weights))
    return float(objective.averaged(lambda: value)), objective.averaged(lambda: slope)


def _own_evaluated(objective: Objective, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of this process's batches."""
    device = objective.device
    value = torch.zeros((), dtype=torch.float64, device=device)
    slope = torch.zeros(objective.size, dtype=objective.dtype, device=device)
    for batch, share in objective.draw():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        with objective.conditions():
            logits = objective.forward(leaves, batch)
            value += share * objective.loss(logits.detach(), batch[1]).detach().double()
            seed = score(objective.loss, logits, batch[1], objective.cross_entropy(logits, batch)).detach()
            found = torch.autograd.grad(logits, list(leaves.values()), seed)
        slope += share * torch.cat([each.reshape(-1) for each in found])
    return value, slope


def _refuse_not_finite(what: str, tensors: Mapping[str, Tensor], fix: str) -> None:
    if bad := not_finite(tensors):
        raise UseError(f"{what}{bad[0]} is not finite, so no step was made. {fix}")


def _to_sphere(step: Tensor, direction: Tensor, radius: float) -> Tensor:
    """`step + τ·direction` of length `radius`, with τ > 0."""
    along = float(torch.dot(step, direction))
    square = float(torch.dot(direction, direction))
    room = max(0.0, radius**2 - float(torch.dot(step, step)))
    tau = (math.sqrt(along**2 + square * room) - along) / square
    return step + tau * direction
