"""Continuous time: a loss as a field over one long vector, and flows through it.

    gradient flow    θ̇ = −g(θ)
    modified flow    θ̇ = −g(θ) − h/2·H(θ)g(θ)         what steps of length h follow to the next order

A flow is followed by the classical Runge–Kutta method of order 4, with half the step again and again: of two
ends with n and 2n steps the finer one is off by about a 15th of their difference. When that is little enough
it is added, and the end is nearer still. Everything is in float64, on a copy: what is to be seen is a
difference of two close points.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.anatomy.names import unwrap
from theodolite.core.batches import Batch, Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, hessian

Field = Callable[[Tensor], Tensor]
"""θ (P,) to θ̇ (P,)."""

MOST_STEPS = 1024
"""Of Runge–Kutta for one flow."""


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
        self._batch: Batches = _doubled(batch) if given.single else _Doubled(batch)
        self._objective = Objective(self._model, self._loss, self._batch, parameters=given.names)
        self.start = self._objective.flat(self._objective.tensors).detach().clone()
        """Where the network is."""
        self.gradients = 0
        """How many were taken so far."""

    def gradient(self, at: Tensor) -> Tensor:
        """g(θ), (P,)."""
        self.gradients += 1
        objective = self._moved(at)
        chosen = objective.stand_ins(grad=True)
        total = torch.zeros_like(at)
        with objective.conditions():
            for batch, share in objective.draw():
                value = objective.loss(objective.forward(chosen, batch), batch[1])
                if not value.requires_grad:
                    raise UseError("the loss does not depend on the model's parameters")
                found = torch.autograd.grad(share * value, list(chosen.values()), materialize_grads=True)
                total += torch.cat([one.reshape(-1) for one in found])
        return total

    def loss(self, at: Tensor) -> float:
        """The loss at θ; infinite or nan where it is."""
        objective = self._moved(at)
        chosen = objective.stand_ins(grad=False)
        with objective.conditions(), torch.no_grad():
            return sum(
                share * float(objective.loss(objective.forward(chosen, batch), batch[1]))
                for batch, share in objective.draw()
            )

    def hessian(self, at: Tensor) -> Hessian:
        """H(θ) as an operator, until the next question."""
        self._moved(at)
        return hessian(self._model, self._loss, self._batch, parameters=self._objective.names)

    def modified(self, lr: float) -> Field:
        """The modified flow of steps of length lr."""

        def field(at: Tensor) -> Tensor:
            if not math.isfinite(
                self.loss(at)
            ):  # a step that was too coarse; there is nothing to differentiate
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


@dataclass(frozen=True)
class Followed:
    """Where a flow has come to."""

    end: Tensor
    error: float
    """About how far it is from the true end, at most."""
    steps: int
    """Of Runge–Kutta."""
    converged: bool


def follow(field: Field, start: Tensor, time: float, *, tolerance: float) -> Followed:
    """Where `θ̇ = field(θ)` is after some time, to an absolute tolerance.

    >>> followed = follow(lambda at: -at, torch.ones(1).double(), 1.0, tolerance=1e-9)
    >>> round(float(followed.end), 8), followed.converged
    (0.36787944, True)
    """
    steps, coarse = 1, _runge_kutta(field, start, time, 1)
    while True:
        steps *= 2
        fine = _runge_kutta(field, start, time, steps)
        apart = (fine - coarse) / 15
        error = float(apart.norm())
        # Rounding of the points themselves cannot be got below.
        settled = error <= max(tolerance, 4 * torch.finfo(fine.dtype).eps * float(fine.norm()))
        if settled or 2 * steps > MOST_STEPS:
            return Followed(fine + apart if settled else fine, error, steps, settled)
        coarse = fine


def _runge_kutta(field: Field, start: Tensor, time: float, steps: int) -> Tensor:
    at, h = start, time / steps
    for _ in range(steps):
        first = field(at)
        second = field(at + h / 2 * first)
        third = field(at + h / 2 * second)
        fourth = field(at + h * third)
        at = at + h / 6 * (first + 2 * second + 2 * third + fourth)
        if not bool(at.isfinite().all()):  # too coarse, or a flow that leaves for infinity
            return torch.full_like(at, torch.inf)
    return at


class _Doubled:
    """Batches in float64, as often as they are asked for."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return (_doubled(pair) for pair in self._batches)


def _doubled(pair: Any) -> Any:
    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(double, pair)
