"""Hyperball: AdamH and MuonH, steps of a fixed relative length on the sphere of the initial Frobenius norm.

    W ← R·Normalize(W − lr·R·Normalize(U)),      R = ‖W₀‖_F,   Normalize(X) = X/‖X‖_F

U is the update of Adam (AdamH) or of Muon (MuonH). Each step has the length lr·‖W‖_F and then goes back to
the sphere, so the learning rate is the angle of a step, and there is no weight decay.

The rules follow from the spectral norm of `A = R·U/‖U‖_F`. At initialisation R goes as `std·√(n_in·n_out)`:
as `√n_out` for hidden weights and inputs, whose std goes as `1/√n_in`. The entries of Adam's update are about
one; at low rank `‖U‖₂ ~ ‖U‖_F`, so `‖A‖_R = √(n_in/n_out)·R ~ √n_in`, and the learning rate of hidden weights
goes as `1/√n_in`. Muon's update has singular values of one in all `min(n_in, n_out)` directions,
`‖U‖_F = √min(n_in, n_out)·‖U‖₂`, so `‖A‖_R ~ √(n_in/min(n_in, n_out))`: for matrices whose fans grow alike,
the learning rate stays. A has the units of the weight, so a multiplier changes the weight but not the
learning rate (degree −1).

References:
    Wen et al., Fantastic pretraining optimizers and where to find them II: hyperball optimization, 2026.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.optimizers.adam import adam_update
from theodolite.optimizers.condition import Ratios, deviation
from theodolite.optimizers.horizon import Memory, squares_of_average, squares_of_momentum
from theodolite.optimizers.matrices import LINEAR, Axes, Rows
from theodolite.optimizers.matrix_optimizer import Moving, SphereOptimizer, kept_locally, local_gradients
from theodolite.optimizers.matrix_step import orthogonalised
from theodolite.optimizers.muon import for_matrices, muon_average, stacked_layout, stacked_orthogonal
from theodolite.optimizers.orthogonal import normalised
from theodolite.optimizers.scaling import GRADIENT_ENTRY, GRADIENT_NORM, Scaling, fraction
from theodolite.optimizers.sharding import Replicas
from theodolite.optimizers.spec import Eps, Hypers, OptimizerSpec, Slot, State, Vectorised
from theodolite.optimizers.step_checks import Group


class _Hyperball(SphereOptimizer):
    """A step along an update, of length lr·R, and back to the sphere of radius R."""

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if group.get("weight_decay"):
            raise UseError(
                f"weight_decay is {group['weight_decay']!r}: {type(self).__name__} keeps the norm of every "
                "matrix, so nothing can decay. Set it to 0"
            )

    def _norms(self, group: Group, matrices: Tensor) -> Tensor:
        return _norm(matrices)

    def _moved(self, group: Group, weight: Tensor, update: Tensor, radius: Tensor) -> Tensor:
        return _on_sphere(weight, update, float(group["lr"]), radius)


class AdamH(_Hyperball):
    """Adam on the hyperball: steps of length `lr·‖W‖_F` along Adam's update, at a constant `‖W‖_F`.

    Args:
        params: matrices, or groups of them.
        lr: learning rate: the length of a step over the norm of the weight.
        betas: of the moving averages of gradients and of their squares.
        axes: (in, out), the dimensions of inputs and of outputs, as for `Muon`.
        rows: blocks of outputs that are matrices by themselves, as for `Muon`.
        eps: added to the root of the average of squares.

    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> weight.grad = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    >>> AdamH([weight], lr=1.0).step()
    >>> weight.detach()       # turned by 45°
    tensor([[ 0.7071, -0.7071],
            [ 0.7071,  0.7071]])
    """

    _keeps_squares = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        axes: Axes | None = None,
        rows: Rows = (),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "axes": axes, "rows": rows, "eps": eps})

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise UseError(f"betas is {group['betas']!r}: both have to be in [0, 1)")

    def _updates(self, moving: Moving) -> Iterator[tuple[Group, Tensor, Tensor]]:
        for group, params in moving:
            beta1, beta2 = group["betas"]
            grads = local_gradients(params)
            averages, squares = (kept_locally(params, self.state, name) for name in ("exp_avg", "exp_avg_sq"))
            torch._foreach_lerp_(averages, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
            counts = [self.state[param].setdefault("step", torch.zeros(())).add_(1) for param in params]
            # The correction of the average changes the length of an update only.
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, [math.sqrt(1 - beta2 ** count.item()) for count in counts])
            torch._foreach_add_(roots, group["eps"])
            for param, update in zip(params, torch._foreach_div(averages, roots), strict=True):
                yield group, param, update


class MuonH(_Hyperball):
    """Muon on the hyperball: steps of length `lr·‖W‖_F` along an orthogonal matrix, at a constant `‖W‖_F`.

    Newton–Schulz is batched, shared out among replicas and sent between shards as by `Muon`.

    Args:
        params: matrices, or groups of them.
        lr: learning rate: the length of a step over the norm of the weight.
        momentum: of the moving average of gradients.
        nesterov: look one step ahead?
        axes: (in, out), the dimensions of inputs and of outputs, as for `Muon`.
        rows: blocks of outputs that are matrices by themselves, as for `Muon`.
        eps: added to the Frobenius norm that the momentum is divided by.
        steps: of Newton–Schulz.
        shared_over: a DistributedDataParallel model or its process group, as for `Muon`.

    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> weight.grad = torch.tensor([[0.0, 3.0], [-1.0, 0.0]])
    >>> MuonH([weight], lr=0.1).step()
    >>> round(weight.detach().norm().item() ** 2, 5)
    2.0
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        axes: Axes | None = None,
        rows: Rows = (),
        eps: float = 1e-7,
        steps: int = 5,
        *,
        shared_over: Any = None,
    ) -> None:
        self._replicas = Replicas.of(shared_over)
        averaging = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, averaging | {"axes": axes, "rows": rows, "eps": eps, "steps": steps})

    def _updates(self, moving: Moving) -> Iterator[tuple[Group, Tensor, Tensor]]:
        for steps, how in self._arranged(moving, lambda group, *fans: 1.0):
            for step, update in zip(steps, orthogonalised(steps, how, self._replicas), strict=True):
                yield step.group, step.param, update


def _on_sphere(weight: Tensor, update: Tensor, lr: float | Tensor, radius: Tensor) -> Tensor:
    """Matrices (stack, out, in) after a step of length lr·R along U and the way back to the sphere."""
    moved = weight - lr * radius * normalised(update, 0.0)
    moved = moved * (radius / _norm(moved).clamp_min(torch.finfo(moved.dtype).tiny))
    still = (update == 0).all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.where(still, weight, moved)


def _norm(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)


# The steps of many models, each at the norm that its weight has


def _stacked_move(weight: Tensor, update: Tensor, hyper: Hypers, alive: Tensor, slot: Slot) -> None:
    def moved(matrices: Tensor, direction: Tensor) -> Tensor:
        return _on_sphere(matrices, direction, for_matrices(hyper["lr"], matrices), _norm(matrices))

    stacks = (tensor.to(weight.dtype).unflatten(1, slot.shape) for tensor in (weight, update))
    made = stacked_layout(slot.shared).mapped(moved, *stacks).flatten(1)
    weight.copy_(torch.where(alive, made, weight))


def _adamh_step(weight: Tensor, grad: Tensor, state: State, hyper: Hypers, alive: Tensor, slot: Slot) -> None:
    _stacked_move(weight, slot.fused(adam_update)(grad, state, hyper), hyper, alive, slot)


def _muonh_step(weight: Tensor, grad: Tensor, state: State, hyper: Hypers, alive: Tensor, slot: Slot) -> None:
    ahead = slot.fused(muon_average)(grad, state, hyper)
    _stacked_move(weight, stacked_orthogonal(ahead, hyper["eps"], slot), hyper, alive, slot)


# The rules


def _length(part: Part, ratios: Ratios) -> float:
    """√(n_in/n_out)·R, the size of an update of rank one."""
    return ratios.fan_in * deviation(part, ratios)


def _length_symbols(part: Part) -> str:
    return "r_in" if part.role == "output" else "√r_in"


def _rank(part: Part, ratios: Ratios) -> float:
    return min(part.fan_in, part.fan_out) / min(part.fan_in / ratios.fan_in, part.fan_out / ratios.fan_out)


_hyperball = functools.partial(
    OptimizerSpec, degree=-1, matrices_only=True, layout=("axes", "rows"), decays=False
)

SPECS = (
    _hyperball(
        "adamh",
        AdamH,
        update=Scaling(
            _length,
            lambda part, ratios: _length_symbols(part),
            "a step has length lr·‖W‖_F, and its spectral norm goes as its length",
        ),
        eps=Eps(GRADIENT_ENTRY),
        memory=Memory(
            {"betas": (0.9, 0.999)}, squares=lambda options: squares_of_average(options["betas"][0])
        ),
        keeps_squares=True,
        vectorised=Vectorised(
            _adamh_step,
            state=("exp_avg", "exp_avg_sq"),
            numbers={"eps": 1e-8, "betas": (0.9, 0.999)},
            shared={"axes": LINEAR, "rows": ()},
        ),
    ),
    _hyperball(
        "muonh",
        MuonH,
        update=Scaling(
            lambda part, ratios: _length(part, ratios) / math.sqrt(_rank(part, ratios)),
            lambda part, ratios: f"{fraction(_rank(part, ratios) ** -0.5)}·{_length_symbols(part)}",
            lambda part, ratios: (
                f"a step has length lr·‖W‖_F, spread over {fraction(_rank(part, ratios))} times as many "
                "directions"
            ),
        ),
        eps=Eps(GRADIENT_NORM, usual=1e-7),
        memory=Memory({"momentum": 0.95}, squares=squares_of_momentum),
        shares_work=True,
        vectorised=Vectorised(
            _muonh_step,
            state=("momentum_buffer",),
            numbers={"momentum": 0.95, "nesterov": True, "eps": 1e-7},
            shared={"axes": LINEAR, "rows": (), "steps": 5},
        ),
    ),
)
