"""Discretisation drift: the distance of gradient descent from the flow that it discretises.

With h the learning rate, g the gradient, H the Hessian and its eigenpairs λ_i, u_i:

    gradient descent   θ ← θ − h g
    gradient flow      θ̇ = −g, over the time h
    drift              their difference: −h²/2·Hg to the lowest order
    modified flow      θ̇ = −g − h/2·Hg, which explains the drift to the next order
    principal flow     θ̇ = Σ_i log(1 − hλ_i)/(hλ_i)·(g·u_i)u_i, over the time h

On a quadratic the principal flow passes through every point of gradient descent. Where hλ > 1 its logarithm
is complex, log|1 − hλ| + iπ, and so is the path between the points. After whole steps it is real again,
`g·u_i` times `1 − hλ_i` where the gradient flow has `exp(−hλ_i)`. So it is taken in whole steps here, in
closed form, for the top eigenpairs at the beginning of each step; in all other directions it is the gradient
flow:

    θ ← flow(θ) + Σ_i ((1 − exp(−hλ_i))/λ_i − h)·(g·u_i)u_i

Even with all eigenpairs it ignores how H changes within a step.

Flows are integrated by the classical Runge–Kutta method of order 4, with half the step until the error, a
15th of the difference between n and 2n steps, is small enough; then this difference is added. All is computed
in float64 on a copy, as the drift is a difference of two close points.

References:
    Rosca et al., On a continuous time model of gradient descent dynamics and instability in deep learning,
    2023. Barrett and Dherin, Implicit gradient regularization, 2021 (the modified flow).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import unwrap
from theodolite.core.arguments import positive, whole
from theodolite.core.batches import Batch, Batches, in_float64
from theodolite.core.calling import Loss, described
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted
from theodolite.probes.curvature.eigenvalues import Eigenvalues, eigenvalues
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, hessian
from theodolite.probes.curvature.sharpness import sharpness

MOST_STEPS = 1024
"""Runge–Kutta steps for one flow."""


@dataclass(frozen=True)
class Drift(Result):
    """Gradient descent beside the flows. Distances are between weights, in float64. Made by `drift`."""

    kind: ClassVar[str] = "drift"

    lr: float
    steps: int
    distance: float
    """‖gradient descent − gradient flow‖: the drift."""
    principal: float
    """‖gradient descent − principal flow‖: the drift that the top eigenpairs do not explain."""
    modified: float
    """‖gradient descent − modified flow‖: the drift that `−h/2·Hg` does not explain."""
    length: float
    """‖gradient descent − start‖."""
    losses: tuple[float, float, float]
    """At the start, after gradient descent, after the gradient flow."""
    eigenvalues: Tensor
    """(k,), the largest in magnitude at the start."""
    edge: float
    """`lr·λ_max/2` at the start: above 1 gradient descent is unstable along the top eigenvector."""
    growth: float
    """`g·u` after the first step over that before, u the eigenvector of the largest in magnitude: by the
    principal flow `1 − lr·λ`, by the gradient flow `exp(−lr·λ)`."""
    gradients: int
    """The number of gradients taken."""
    converged: bool
    status: str

    @property
    def relative(self) -> float:
        """The drift relative to the path length of gradient descent."""
        return self.distance / self.length if self.length else math.nan

    @property
    def explained(self) -> float:
        """The share of the drift that the principal flow explains: 1 is all of it."""
        return 1 - self.principal / self.distance if self.distance else math.nan

    def blocks(self) -> Iterator[Block]:
        """The steps, the distance from each flow, and the status."""
        yield (
            f"{counted(self.steps, 'step')} of gradient descent with lr {self.lr:.4g}: length "
            f"{self.length:.4g}, lr·λ_max/2 = {self.edge:.3g}"
        )
        flows = {
            "gradient": self.distance,
            "modified": self.modified,
            f"principal, of {len(self.eigenvalues)} eigenpairs": self.principal,
        }
        rows = [(name, one, one / self.length if self.length else None) for name, one in flows.items()]
        yield Table(("flow", "distance from it", "relative to the length"), rows)
        yield self.status


@exclusive()
def drift(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    *,
    lr: float,
    steps: int = 1,
    k: int = 5,
    rtol: float = 1e-4,
    parameters: str | Sequence[str] | None = None,
) -> Drift:
    """How far steps of gradient descent end from the gradient flow, and which other flow predicts it.

    Args:
        model: any module; a copy in float64 is moved, the model itself is not changed.
        loss: `loss(logits, targets) -> scalar`.
        batch: `(inputs, targets)`, or several such pairs.
        lr: the learning rate h.
        steps: the number of steps, on the same batch; the flows run for the time `steps·lr`.
        k: the number of eigenpairs of the principal flow, found again at each step.
        rtol: the error allowed for flows, relative to the length of the first step.
        parameters: patterns of names, as in `hessian`.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.data = torch.tensor([[1.0, 1.0]])
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
    >>> found = drift(model, nn.functional.mse_loss, batch, lr=0.2)  # λ is 1 and 9
    >>> truth = math.hypot(math.exp(-0.2) - (1 - 0.2), math.exp(-1.8) - (1 - 1.8))
    >>> round(found.edge, 6), abs(found.distance - truth) < 1e-4, found.principal < 1e-4
    (0.9, True, True)
    """
    if isinstance(model, tuple | list):
        raise UseError(
            f"model is {described(model)}: drift measures one network. For two players use "
            "th.probes.game_drift(players, losses, batch, lr=…)"
        )
    lr = positive("lr", lr)
    whole("steps", steps, least=1)
    whole("k", k, least=1)
    if not 0 < rtol < 1:
        raise UseError(f"rtol is {rtol!r}: give a fraction of the first step, such as 1e-4")
    descent = Descent(model, loss, batch, parameters=parameters)
    start = descent.start
    slope = descent.gradient(start)
    if not bool(slope.isfinite().all()) or not bool(slope.any()):
        raise UseError(f"the gradient has the norm {float(slope.norm()):g}: there is no step to measure")
    atol = rtol * lr * float(slope.norm())
    end, problems = start, []
    for step in range(steps):
        end = end - lr * descent.gradient(end)
        if not bool(end.isfinite().all()):
            problems.append(f"gradient descent diverged at step {step + 1}")
            break
    flow = follow(lambda at: -descent.gradient(at), start, lr * steps, atol=atol)
    modified = follow(descent.modified(lr), start, lr * steps, atol=atol)
    principal, pairs = _principal(descent, lr, steps, k, atol)
    first = pairs[0]
    top = float(first.values.max())
    if top <= 0:  # the largest in magnitude are all negative
        top = sharpness(descent.hessian(start)).value
    axis = first.vectors[:, int(first.values.abs().argmax())].double()
    after = descent.gradient(start - lr * slope) @ axis
    problems += [
        f"the {name} flow is exact only to {found.error:.1g}"
        for name, found in (("gradient", flow), ("modified", modified), ("principal", principal))
        if not found.converged
    ]
    problems += [found.status for found in pairs if not found.converged][:1]
    return Drift(
        lr=lr,
        steps=steps,
        distance=distance_between(end, flow.end),
        principal=distance_between(end, principal.end),
        modified=distance_between(end, modified.end),
        length=distance_between(end, start),
        losses=(descent.loss(start), descent.loss(end), descent.loss(flow.end)),
        eigenvalues=first.values,
        edge=lr * top / 2,
        growth=float(after / (slope @ axis)),
        gradients=descent.gradients,
        converged=not problems,
        status="; ".join(problems) or f"flows are exact to {atol:.1g}",
    )


def _principal(
    descent: Descent, lr: float, steps: int, k: int, atol: float
) -> tuple[FlowEnd, list[Eigenvalues]]:
    """The principal flow of the top eigenpairs in whole steps, the gradient flow in all other directions."""
    at, error, converged = descent.start, 0.0, True
    pairs: list[Eigenvalues] = []
    for _ in range(steps):
        here = descent.hessian(at)
        found = eigenvalues(here, k=min(k, here.size), which="magnitude")
        pairs.append(found)
        vectors = found.vectors.double()
        scaled = lr * found.values.to(vectors.device)
        # (1 − e^(−x))/x − 1, which is −x/2 for small x.
        shares = torch.where(scaled.abs() > 1e-6, -torch.expm1(-scaled) / scaled - 1, -scaled / 2)
        turn = vectors @ (lr * shares * (vectors.mT @ here.gradient))
        flow = follow(lambda place: -descent.gradient(place), at, lr, atol=atol)
        at = flow.end + turn
        error, converged = error + flow.error, converged and flow.converged
        if not math.isfinite(descent.loss(at)):
            return FlowEnd(torch.full_like(at, torch.inf), error, False), pairs
    return FlowEnd(at, error, converged), pairs


def distance_between(one: Tensor, other: Tensor) -> float:
    """The norm of their difference; infinite if one of them is not finite."""
    found = float((one - other).norm())
    return found if math.isfinite(found) else math.inf


class Descent:
    """The loss of a float64 copy of a network as a function of its weights in one vector (P,).

    >>> model = nn.Linear(2, 1, bias=False)
    >>> batch = torch.eye(2), torch.zeros(2, 1)
    >>> descent = Descent(model, nn.functional.mse_loss, batch)
    >>> descent.gradient(torch.tensor([1.0, 2.0]).double())
    tensor([1., 2.], dtype=torch.float64)
    """

    def __init__(
        self, model: nn.Module, loss: Loss, batch: Batches, *, parameters: str | Sequence[str] | None = None
    ) -> None:
        given = Objective(model, loss, batch, parameters=parameters)
        self._model = copy.deepcopy(unwrap(model)).double()
        self._loss = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
        self._batch: Batches = in_float64(batch) if given.single else _Doubled(batch)
        self._objective = Objective(self._model, self._loss, self._batch, parameters=given.names)
        self.start = self._objective.flat(self._objective.tensors).detach().clone()
        """The weights of the network."""
        self.gradients = 0
        """The number of gradients so far."""

    def gradient(self, at: Tensor) -> Tensor:
        """g(θ), (P,)."""
        self.gradients += 1
        return self._moved(at).gradient()

    def loss(self, at: Tensor) -> float:
        """The loss at θ, which may be infinite or nan."""
        objective = self._moved(at)
        chosen = objective.stand_ins(grad=False)
        with objective.conditions(), torch.no_grad():
            return sum(
                share * float(objective.loss(objective.forward(chosen, batch), batch[1]))
                for batch, share in objective.draw()
            )

    def hessian(self, at: Tensor) -> Hessian:
        """H(θ) as an operator, valid until the next call of a method."""
        self._moved(at)
        return hessian(self._model, self._loss, self._batch, parameters=self._objective.names)

    def modified(self, lr: float) -> Callable[[Tensor], Tensor]:
        """The field θ̇ of the modified flow."""

        def field(at: Tensor) -> Tensor:
            if not math.isfinite(self.loss(at)):  # the step was too coarse
                return torch.full_like(at, torch.inf)
            here = self.hessian(at)
            slope = here.gradient
            return -slope - 0.5 * lr * (here @ slope)

        return field

    @torch.no_grad()
    def _moved(self, at: Tensor) -> Objective:
        pieces = self._objective.split(at)
        for name, tensor in self._objective.tensors.items():
            tensor.copy_(pieces[name])
        return self._objective


class _Doubled:
    """Batches in float64, which can be iterated again and again."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return map(in_float64, self._batches)


@dataclass(frozen=True)
class FlowEnd:
    """The end of a flow."""

    end: Tensor
    error: float
    """An estimate of the distance from the true end."""
    converged: bool


def follow(field: Callable[[Tensor], Tensor], start: Tensor, time: float, *, atol: float) -> FlowEnd:
    """Integrate `θ̇ = field(θ)` over some time, to an absolute tolerance.

    >>> found = follow(lambda at: -at, torch.ones(1).double(), 1.0, atol=1e-9)
    >>> round(float(found.end), 8), found.converged
    (0.36787944, True)
    """
    steps, coarse = 1, _runge_kutta(field, start, time, 1)
    while True:
        steps *= 2
        fine = _runge_kutta(field, start, time, steps)
        correction = (fine - coarse) / 15
        error = float(correction.norm())
        # The error cannot fall below the rounding of the points themselves.
        converged = error <= max(atol, 4 * torch.finfo(fine.dtype).eps * float(fine.norm()))
        if converged or 2 * steps > MOST_STEPS:
            return FlowEnd(fine + correction if converged else fine, error, converged)
        coarse = fine


def _runge_kutta(field: Callable[[Tensor], Tensor], start: Tensor, time: float, steps: int) -> Tensor:
    at, h = start, time / steps
    for _ in range(steps):
        first = field(at)
        second = field(at + h / 2 * first)
        third = field(at + h / 2 * second)
        fourth = field(at + h * third)
        at = at + h / 6 * (first + 2 * second + 2 * third + fourth)
        if not bool(at.isfinite().all()):  # too coarse, or a flow that goes to infinity
            return torch.full_like(at, torch.inf)
    return at
