"""Newton steps that are regularised by the gradient, with a radius that is found on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_parameters
from theodolite.controllers.conjugate import End, solve
from theodolite.core.arguments import positive, whole
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.replicas import on_all_ranks
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Derivatives, Hessian, Operator
from theodolite.probes.curvature.score import score

Curvature = Literal["gauss_newton", "hessian", "fisher"]
Status = Literal["accepted", "refused", "stationary"]

MOST_TRIES = 40
"""Of one step: from the first to the last, γ falls by 10¹²."""
MOST_GAMMA = 2.0**100
"""γ doubles with every accepted step; far beyond any length it need not go on."""
ROUNDING = 32
"""Losses that differ by fewer units in the last place than this are not told apart."""


@dataclass(frozen=True)
class Step:
    """One step, as it was made or not made."""

    status: Status
    """`refused`: no γ that was tried gave the decrease asked for; weights are as before, and the next step
    tries on where this one ended. `stationary`: there is no gradient, or only rounding is left of the step;
    weights and γ are as before."""
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

    def __str__(self) -> str:
        return (
            f"{self.status}: loss {self.loss:.6g} → {self.loss_after:.6g}, "
            f"‖g‖ {self.gradient_norm:.3g} → {self.gradient_norm_after:.3g}, γ {self.gamma:.3g}, "
            f"tries {self.tries}, products {self.products}"
        )


@dataclass(frozen=True)
class Counts:
    """All steps so far."""

    steps: int = 0
    accepted: int = 0
    """Steps that moved the weights."""
    tries: int = 0
    products: int = 0


class NormalizedSmoothness:
    """Gradient-regularised Newton steps with any curvature, by gradient-normalized smoothness.

    With loss f, gradient g and a curvature A at the weights:

        λ = ‖g‖/γ,   d = −(A + λI)⁻¹ g,   accept if  f − f⁺ ≥ ‖g⁺‖²/(8λ)

    After an accepted step γ is doubled; after a try that is not accepted it is halved, and the step is sought
    again from the same point. γ is a length: that of the ball around the weights in which `g + A d` is a good
    picture of the gradient, compared with g itself. It is the paper's gradient-normalized smoothness, up to
    factors of two, and the only thing that is carried from step to step.

    Args:
        model: any module. Parameters that require a gradient are trained. Buffers are left alone, as are
            gradients; dropout has one fixed mask.
        loss: `loss(logits, targets) -> scalar`.
        curvature: A. `"gauss_newton"` is `Jᵀ B J`, for a cross-entropy the same as the true Fisher matrix.
            `"fisher"` is the empirical one, the mean of `gᵢ gᵢᵀ` over the gradients of single examples (the
            first dimension of the logits; the loss has to be their mean). `"hessian"` need not be positive:
            see `theodolite.controllers.conjugate` for what becomes of negative curvature.
        gamma: γ of the first try.
        tolerance: conjugate gradients end at a residual of `tolerance·‖g‖`, or of λ‖d‖ where that is less.
        most_products: or after as many products with A, in one try.

    A step costs a gradient, and for every try a gradient and the products. For small and medium problems: in
    full batch, or with batches large enough that the loss of one of them says something.

    Where f and f⁺ differ by rounding only, `−½(g + g⁺)·d` takes the place of `f − f⁺`: it is the same up to
    the third order in d. There γ does not fall: what refuses a try may be the rounding of the gradient.

    References:
        Semenov, Jaggi and Doikov, Gradient-normalized smoothness for optimization with approximate Hessians,
        2025, Algorithm 1.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.eye(2).double(), torch.ones(2, 1).double()
    >>> newton = NormalizedSmoothness(model, nn.functional.mse_loss, gamma=100.0, tolerance=1e-9)
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
        tolerance: float = 1e-2,
        most_products: int = 100,
    ) -> None:
        if curvature not in get_args(Curvature):
            raise UseError(f"curvature is {curvature!r}: it is one of {', '.join(get_args(Curvature))}")
        positive("gamma", gamma)
        positive("tolerance", tolerance)
        whole("most_products", most_products, least=1)
        if not tolerance < 1:
            raise UseError(f"tolerance is {tolerance}: at 1 and above no step is sought at all. Try 0.01")
        self.gamma = float(gamma)
        """γ of the next try."""
        self.counts = Counts()
        self.curvature, self.tolerance, self.most_products = curvature, float(tolerance), most_products
        self._model, self._loss = model, loss

    @exclusive()
    @on_all_ranks
    def step(self, batch: Batches) -> Step:
        """One step on a batch `(inputs, targets)`, or on several as one: a list of pairs, a DataLoader.

        A loss or a gradient that is not finite at the weights as they are is refused. So is no step after
        which they would be: that counts as a try, and γ is halved.
        """
        objective = Objective(self._model, self._loss, batch)
        _refuse_odd_weights(objective)
        here = Hessian(Derivatives(objective))
        loss, gradient = here.loss, here.gradient
        _refuse_odd_gradient(objective, gradient)
        norm = float(gradient.norm())
        if norm == 0:
            return self._counted(
                Step("stationary", loss, loss, self.gamma, 0.0, 0.0, 0.0, 0.0, 0, 0, None), self.gamma
            )
        gamma, products, told = self.gamma, 0, False
        operator = _operator(here, self.curvature)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        weights = objective.stand_ins(grad=False)
        for tries in range(1, MOST_TRIES + 1):
            shift = norm / gamma
            solution = solve(
                lambda vector: (operator @ vector).to(wide),
                gradient.to(wide),
                shift=shift,
                tolerance=self.tolerance,
                most_products=self.most_products,
            )
            products += solution.products
            pieces = objective.split(solution.step)
            moved = {name: (tensor + pieces[name]).to(tensor.dtype) for name, tensor in weights.items()}
            after, slope = _evaluated(objective, moved)
            slope_norm = float(slope.norm())
            decrease = _decrease(loss, after, gradient, slope, solution.step)
            reading = Step(
                "refused",
                *(loss, after, gamma, shift, norm, slope_norm, float(solution.step.norm()), tries, products),
                solved=solution.end,
            )
            if all(torch.equal(moved[name], tensor) for name, tensor in weights.items()):
                told = False
                break
            lost = _lost(loss, after, gradient.dtype)
            if math.isfinite(after) and decrease >= slope_norm**2 / (8 * shift):
                with torch.no_grad():
                    for name, tensor in objective.tensors.items():
                        tensor.copy_(moved[name])
                # Where rounding is what refused the tries before, γ would fall without end.
                gamma = max(2 * gamma, self.gamma) if lost else 2 * gamma
                return self._counted(replace(reading, status="accepted"), min(gamma, MOST_GAMMA))
            told = told or not lost
            gamma /= 2
        if not told:
            return self._counted(replace(reading, status="stationary"), self.gamma)
        return self._counted(reading, gamma)

    def state_dict(self) -> dict[str, Any]:
        """γ and what was counted, as values that JSON knows."""
        return {"gamma": self.gamma, "curvature": self.curvature, **asdict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        if set(state) != set(self.state_dict()):
            odd = sorted(set(state) ^ set(self.state_dict()))[0]
            raise UseError(
                f"the state has {'no' if odd not in state else 'an unknown'} {odd!r}: it is of another kind"
            )
        if state["curvature"] != self.curvature:
            raise UseError(
                f"the state is of curvature={state['curvature']!r}, and this is {self.curvature!r}: γ means "
                "another thing there. Make it with the same"
            )
        positive("gamma", state["gamma"])
        self.gamma = float(state["gamma"])
        self.counts = Counts(**{name: int(state[name]) for name in asdict(self.counts)})

    def __repr__(self) -> str:
        return (
            f"NormalizedSmoothness({type(self._model).__name__}, curvature={self.curvature!r}, "
            f"γ={self.gamma:.3g}, {self.counts.accepted} of {self.counts.steps} steps accepted)"
        )

    def _counted(self, step: Step, gamma: float) -> Step:
        """The reading, with γ and the counts as they are after it."""
        self.gamma = gamma
        self.counts = Counts(
            self.counts.steps + 1,
            self.counts.accepted + step.accepted,
            self.counts.tries + step.tries,
            self.counts.products + step.products,
        )
        return step


def _operator(here: Hessian, curvature: Curvature) -> Operator:
    return here if curvature == "hessian" else here.fisher if curvature == "fisher" else here.gauss_newton


def _evaluated(objective: Objective, weights: Mapping[str, Tensor]) -> tuple[float, Tensor]:
    """Loss and gradient (P,) with other weights; the model does not see them."""
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


def _decrease(loss: float, after: float, gradient: Tensor, slope: Tensor, step: Tensor) -> float:
    """f − f⁺, told from the gradients where rounding would tell it from the losses."""
    if not _lost(loss, after, gradient.dtype):
        return loss - after
    return -0.5 * float(torch.dot((gradient + slope).to(step.dtype), step))


def _lost(loss: float, after: float, dtype: torch.dtype) -> bool:
    """Is the difference of two losses no more than rounding?"""
    return math.isfinite(after) and abs(loss - after) <= ROUNDING * torch.finfo(dtype).eps * max(
        abs(loss), abs(after)
    )


def _refuse_odd_weights(objective: Objective) -> None:
    for name, tensor in canonical_parameters(objective.model):
        if not bool(tensor.detach().isfinite().all()):
            raise UseError(f"{name} is not finite, so no step was made. Load weights that are")


def _refuse_odd_gradient(objective: Objective, gradient: Tensor) -> None:
    if bool(gradient.isfinite().all()):
        return
    odd = next(name for name, one in objective.split(gradient).items() if not bool(one.isfinite().all()))
    raise UseError(
        f"the gradient of {odd} is not finite, so no step was made. Look at the batch and the loss"
    )
