"""Discretisation drift: how far gradient descent has come from the flow it is meant to follow.

With h the learning rate, g the gradient, H the Hessian and its eigenpairs λ_i, u_i:

    gradient descent   θ ← θ − h g
    gradient flow      θ̇ = −g, over the time h
    drift              the one less the other: −h²/2·Hg to the lowest order
    principal flow     θ̇ = Σ_i log(1 − hλ_i)/(hλ_i)·(g·u_i)u_i, over the time h

On a quadratic the principal flow passes through every point of gradient descent. Where hλ > 1 its logarithm
is complex, log|1 − hλ| + iπ, and so is the path between the points: it turns about 0. After whole steps it is
real again, `g·u_i` times `1 − hλ_i` where the gradient flow has `exp(−hλ_i)`. So it is taken in whole steps
here, in closed form, of the top eigenpairs at the beginning of each step; elsewhere the gradient flow goes:

    θ ← flow(θ) + Σ_i ((1 − exp(−hλ_i))/λ_i − h)·(g·u_i)u_i

What it cannot see, even with all eigenpairs, is how H changes within a step.

References:
    Rosca et al., On a continuous time model of gradient descent dynamics and instability in deep learning,
    2023. Barrett and Dherin, Implicit gradient regularization, 2021 (the modified flow).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.eigenvalues import Eigenvalues, eigenvalues
from theodolite.probes.curvature.products import require_at_least
from theodolite.probes.curvature.sharpness import sharpness
from theodolite.probes.steps.flow import Descent, Followed, follow


@dataclass(frozen=True)
class Drift:
    """Gradient descent beside the flows. Distances are those of the weights, in float64. Made by `drift`."""

    lr: float
    steps: int
    distance: float
    """‖gradient descent − gradient flow‖: the drift."""
    principal: float
    """‖gradient descent − principal flow‖: what of it the top eigenpairs do not explain."""
    modified: float
    """‖gradient descent − modified flow‖: what `−h/2·Hg` does not explain."""
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
    """How many were taken."""
    converged: bool
    status: str

    @property
    def relative(self) -> float:
        """The drift as a share of the way gradient descent has gone."""
        return self.distance / self.length if self.length else math.nan

    @property
    def explained(self) -> float:
        """The share of the drift that the principal flow explains: 1 is all of it."""
        return 1 - self.principal / self.distance if self.distance else math.nan

    def __str__(self) -> str:
        many = f"{self.steps} steps" if self.steps > 1 else "1 step"
        return (
            f"{many} of gradient descent with lr {self.lr:.4g}: {self.length:.4g} long, lr·λ_max/2 = "
            f"{self.edge:.3g}\n"
            f"off the gradient flow by    {self.distance:.3g} ({100 * self.relative:.3g} % of the way)\n"
            f"off the modified flow by    {self.modified:.3g}\n"
            f"off the principal flow by   {self.principal:.3g} (of {len(self.eigenvalues)} eigenpairs)\n"
            f"{self.status}"
        )


@exclusive()
def drift(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    *,
    lr: float,
    steps: int = 1,
    k: int = 5,
    tolerance: float = 1e-4,
    parameters: str | Sequence[str] | None = None,
) -> Drift:
    """How far steps of gradient descent end from the gradient flow, and which flow says so beforehand.

    Args:
        model: any module; a copy in float64 is moved, the model itself is left as it is.
        loss: `loss(logits, targets) -> scalar`.
        batch: `(inputs, targets)`, or several such pairs.
        lr: the length h of a step.
        steps: how many, on the same batch; the flows go on for the time `steps·lr`.
        k: eigenpairs that the principal flow is made of, anew in each step.
        tolerance: flows are followed until they are this exact, as a share of the length of the first step.
        parameters: patterns of names, as in `hessian`.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.data = torch.tensor([[1.0, 1.0]])
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
    >>> found = drift(model, nn.functional.mse_loss, batch, lr=0.2)  # λ is 1 and 9
    >>> truth = math.hypot(math.exp(-0.2) - (1 - 0.2), math.exp(-1.8) - (1 - 1.8))
    >>> round(found.edge, 6), abs(found.distance - truth) < 1e-4, found.principal < 1e-4
    (0.9, True, True)
    """
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise UseError(f"lr is {lr!r}: it has to be a finite number above 0")
    require_at_least(1, steps=steps, k=k)
    if not 0 < tolerance < 1:
        raise UseError(f"tolerance is {tolerance!r}: it is a share of the first step, as 1e-4")
    descent = Descent(model, loss, batch, parameters=parameters)
    start = descent.start
    slope = descent.gradient(start)
    if not bool(slope.isfinite().all()) or not bool(slope.any()):
        raise UseError(f"the gradient has the norm {float(slope.norm()):g}: there is no step to look at")
    exact = tolerance * lr * float(slope.norm())
    end, diverged = _descended(descent, start, lr, steps)
    flow = follow(lambda at: -descent.gradient(at), start, lr * steps, tolerance=exact)
    modified = follow(descent.modified(lr), start, lr * steps, tolerance=exact)
    principal, pairs = _principal(descent, start, lr, steps, k, exact)
    first = pairs[0]
    top = float(first.values.max())
    if top <= 0:  # the largest in magnitude are all negative
        top = sharpness(descent.hessian(start)).value
    axis = first.vectors[:, int(first.values.abs().argmax())].double()
    swung = descent.gradient(start - lr * slope) @ axis
    problems = [diverged] if diverged else []
    problems += [
        f"the {name} flow is exact only to {found.error:.1g}"
        for name, found in (("gradient", flow), ("modified", modified), ("principal", principal))
        if not found.converged
    ]
    problems += [found.status for found in pairs if not found.converged][:1]
    return Drift(
        lr=float(lr),
        steps=steps,
        distance=_apart(end, flow.end),
        principal=_apart(end, principal.end),
        modified=_apart(end, modified.end),
        length=_apart(end, start),
        losses=(descent.loss(start), descent.loss(end), descent.loss(flow.end)),
        eigenvalues=first.values,
        edge=lr * top / 2,
        growth=float(swung / (slope @ axis)),
        gradients=descent.gradients,
        converged=not problems,
        status="; ".join(problems) or f"flows are exact to {exact:.1g}",
    )


def _descended(descent: Descent, start: Tensor, lr: float, steps: int) -> tuple[Tensor, str]:
    """The end of gradient descent, and what went wrong on the way."""
    at = start
    for step in range(steps):
        at = at - lr * descent.gradient(at)
        if not bool(at.isfinite().all()):
            return at, f"gradient descent diverged at step {step + 1}"
    return at, ""


def _principal(
    descent: Descent, start: Tensor, lr: float, steps: int, k: int, exact: float
) -> tuple[Followed, list[Eigenvalues]]:
    """The principal flow of the top eigenpairs in whole steps, and the gradient flow elsewhere."""
    at, error, num, settled = start, 0.0, 0, True
    pairs: list[Eigenvalues] = []
    for _ in range(steps):
        here = descent.hessian(at)
        found = eigenvalues(here, k=min(k, here.size), which="magnitude")
        pairs.append(found)
        vectors = found.vectors.double()
        scaled = lr * found.values.to(vectors.device)
        # (1 − e^(−x))/x − 1, which is −x/2 where x is small.
        shares = torch.where(scaled.abs() > 1e-6, -torch.expm1(-scaled) / scaled - 1, -scaled / 2)
        turn = vectors @ (lr * shares * (vectors.mT @ here.gradient))
        flow = follow(lambda place: -descent.gradient(place), at, lr, tolerance=exact)
        at = flow.end + turn
        error, num, settled = error + flow.error, num + flow.steps, settled and flow.converged
        if not math.isfinite(descent.loss(at)):
            at, settled = torch.full_like(at, torch.inf), False
            break
    return Followed(at, error, num, settled), pairs


def _apart(one: Tensor, other: Tensor) -> float:
    """The distance; infinite if one of them is not finite."""
    apart = float((one - other).norm())
    return apart if math.isfinite(apart) else math.inf
