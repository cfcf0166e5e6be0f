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

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.core.exclusive import outside_autocast
from theodolite.optimizers.adam import adam_update
from theodolite.optimizers.condition import Ratios, deviation
from theodolite.optimizers.matrices import LINEAR, Axes, MatrixLayout, Rows
from theodolite.optimizers.matrix_optimizer import (
    Group,
    MatrixOptimizer,
    Moving,
    averaged,
    kept_locally,
    local_gradients,
)
from theodolite.optimizers.matrix_step import ParamStep, orthogonalised
from theodolite.optimizers.muon import muon_average, stacked_layout, stacked_orthogonal
from theodolite.optimizers.orthogonal import normalised
from theodolite.optimizers.scaling import GRADIENT_ENTRY, GRADIENT_NORM, Scaling, fraction
from theodolite.optimizers.sharding import Replicas, gathered, local, scattered
from theodolite.optimizers.spec import Eps, Hypers, OptimizerSpec, Slot, State, Vectorised
from theodolite.optimizers.step_checks import name_of


class _Hyperball(MatrixOptimizer):
    """A step along an update, of length lr·R, and back to the sphere of radius R.

    Every matrix has a radius of its own: experts and blocks of rows too.
    """

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if group.get("weight_decay"):
            raise UseError(
                f"weight_decay is {group['weight_decay']!r}: {type(self).__name__} keeps the norm of every "
                "matrix, so nothing can decay. Set it to 0"
            )

    def _move(self, moving: Moving) -> None:
        for group, params in moving:  # before anything has moved: a weight of zero is refused
            for param in params:
                if "radius" not in self.state[param]:
                    self.state[param]["radius"] = _radius(group, param)
        for group, param, update in self._updates(moving):
            self._move_one(group, param, update)

    def _updates(self, moving: Moving) -> Iterator[tuple[Group, Tensor, Tensor]]:
        """Groups, parameters, and this process's part of the update U."""
        raise NotImplementedError

    @outside_autocast()
    def _move_one(self, group: Group, param: Tensor, update: Tensor) -> None:
        lr = float(group["lr"])
        if lr == 0:
            return
        layout, weight = MatrixLayout.of(group, param), _whole(local(param), param)
        made = _on_sphere(layout, weight, _whole(update, param), lr, self.state[param]["radius"])
        local(param).copy_(scattered(made.to(param.dtype), param))


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

    References:
        Wen et al., Fantastic pretraining optimizers and where to find them II: hyperball optimization, 2026.
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
            averages = [kept_locally(param, self.state, "exp_avg") for param in params]
            squares = [kept_locally(param, self.state, "exp_avg_sq") for param in params]
            torch._foreach_lerp_(averages, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
            roots = torch._foreach_sqrt(squares)
            corrections = []
            for param in params:
                step = self.state[param].setdefault("step", torch.zeros(()))
                step += 1
                corrections.append(math.sqrt(1 - beta2 ** step.item()))
            torch._foreach_div_(roots, corrections)
            torch._foreach_add_(roots, group["eps"])
            # The correction of the average changes the length of an update only.
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

    References:
        Wen et al., Fantastic pretraining optimizers and where to find them II: hyperball optimization, 2026.
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
        steps = []
        for group, params in moving:
            grads, buffers = averaged(params, self.state, group["momentum"])
            for param, grad, buffer in zip(params, grads, buffers, strict=True):
                steps.append(ParamStep(param, grad, buffer, group, float(group["lr"])))
        for one in self._arranged(steps, lambda group, *fans: 1.0):
            mine = [steps[place] for place in one.places]
            for step, update in zip(mine, orthogonalised(mine, one, self._replicas), strict=True):
                yield step.group, step.param, update


@outside_autocast()
def _radius(group: Group, param: Tensor) -> Tensor:
    """The Frobenius norm of each matrix of a parameter, (matrices,)."""
    blocks = MatrixLayout.of(group, param).matrices(_whole(local(param), param))
    radius = torch.cat([_norm(matrices).flatten() for matrices in blocks])
    if not bool((radius > 0).all()):
        raise UseError(
            f"{name_of(group, param)}, of shape {tuple(param.shape)}, has a matrix of zeros, and no norm to "
            "keep. Give it initial values that are not zero, or another optimizer"
        )
    return radius


def _on_sphere(
    layout: MatrixLayout, weight: Tensor, update: Tensor, lr: float | Tensor, radius: Tensor | None = None
) -> Tensor:
    """A parameter after a step of length lr·R and the way back to the sphere, matrix by matrix.

    Args:
        layout: of the parameter.
        weight: the parameter.
        update: U, of the same shape.
        lr: learning rate, or one for each matrix of a block, (stack, 1, 1).
        radius: R of each matrix of all blocks, (matrices,); the norm that it has if not given.
    """
    made, first = torch.empty_like(weight), 0
    pairs = zip(layout.matrices(weight), layout.matrices(update), strict=True)
    for block, (matrices, direction) in enumerate(pairs):
        if radius is None:
            kept = _norm(matrices)
        else:
            kept = radius[first : first + len(matrices), None, None].to(matrices)
            first += len(matrices)
        moved = matrices - lr * kept * normalised(direction, 0.0)
        moved = moved * (kept / _norm(moved).clamp_min(torch.finfo(moved.dtype).tiny))
        still = (direction == 0).all(-1, keepdim=True).all(-2, keepdim=True)
        for place, part in layout.places(made, block, torch.where(still, matrices, moved)):
            place.copy_(part)
    return made


def _norm(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)


def _whole(piece: Tensor, param: Tensor) -> Tensor:
    """The whole tensor, in a dtype that has the digits of a norm."""
    return gathered(piece, param).to(torch.promote_types(param.dtype, torch.float32))


# The steps of many models, each at the norm that its weight has


def _stacked_move(weight: Tensor, update: Tensor, hyper: Hypers, alive: Tensor, slot: Slot) -> None:
    stacked, direction = weight.unflatten(1, slot.shape), update.to(weight.dtype).unflatten(1, slot.shape)
    layout = stacked_layout(slot.shared)
    repeats = len(layout.matrices(stacked)[0]) // len(weight)
    lr = hyper["lr"].repeat_interleave(repeats, dim=0)[:, :, None]
    made = _on_sphere(layout, stacked, direction, lr).flatten(1)
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


SPECS = (
    OptimizerSpec(
        "adamh",
        AdamH,
        update=Scaling(
            _length,
            lambda part, ratios: _length_symbols(part),
            "a step has length lr·‖W‖_F, and its spectral norm goes as its length",
        ),
        degree=-1,
        eps=Eps(GRADIENT_ENTRY),
        matrices_only=True,
        layout=("axes", "rows"),
        decays=False,
        keeps_squares=True,
        vectorised=Vectorised(
            _adamh_step,
            state=("exp_avg", "exp_avg_sq"),
            numbers={"eps": 1e-8, "betas": (0.9, 0.999)},
            shared={"axes": LINEAR, "rows": ()},
        ),
    ),
    OptimizerSpec(
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
        degree=-1,
        eps=Eps(GRADIENT_NORM, usual=1e-7),
        matrices_only=True,
        layout=("axes", "rows"),
        decays=False,
        shares_work=True,
        vectorised=Vectorised(
            _muonh_step,
            state=("momentum_buffer",),
            numbers={"momentum": 0.95, "nesterov": True, "eps": 1e-7},
            shared={"axes": LINEAR, "rows": (), "steps": 5},
        ),
    ),
)
