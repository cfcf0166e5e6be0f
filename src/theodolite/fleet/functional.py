"""Optimizers for many models at once: every hyperparameter is one number for each model.

A tensor of M models is a stack, M along the first dimension, here flattened to (M, n). Hyperparameters are
(M, 1). Each function changes weights and state in place, as torch.optim does, and agrees with the optimizer
that `plan.optimizer` makes to rounding.
"""

# M models, n entries of one tensor

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from theodolite.optimizers.matrices import LINEAR, Layout
from theodolite.optimizers.muon import SCALES
from theodolite.optimizers.orthogonal import newton_schulz

Hypers = Mapping[str, Tensor]
"""By name, (M, 1), on the device of the weights."""

Step = Callable[[Tensor, Tensor, dict[str, Tensor], Hypers, Tensor], None]
"""weight, grad, state, hyperparameters, alive: models that are not alive stay as they are."""


@dataclass(frozen=True)
class Method:
    """One optimizer: what it keeps, and its options with their usual values."""

    state: tuple[str, ...]
    """Names of the tensors that are kept of each weight between steps; they start at zero."""
    step: Step | None
    """None for Muon, whose step is not a function of single entries."""
    numbers: Mapping[str, Any]
    """Options that may differ between models."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Options that are the same for all models in one program."""
    without: Mapping[str, Any] = field(default_factory=dict)
    """Options of torch's that there are not: only these values will do."""


def sgd(weight: Tensor, grad: Tensor, state: dict[str, Tensor], hyper: Hypers, alive: Tensor) -> None:
    """`A ← momentum·A + (1 − dampening)·(∇W + decay·W)`, `W ← W − lr·A`; Nesterov's form looks ahead."""
    grad = grad + hyper["weight_decay"] * weight
    average = state["momentum_buffer"]
    # torch starts from the first gradient itself, whatever the dampening, and has none without momentum.
    whole = (hyper["count"] == 1) | (hyper["momentum"] == 0)
    kept = torch.where(whole, grad, (1 - hyper["dampening"]) * grad)
    average.mul_(hyper["momentum"]).add_(kept)
    update = torch.where(hyper["nesterov"] > 0, grad + hyper["momentum"] * average, average)
    weight.sub_(torch.where(alive, hyper["lr"] * update, 0.0))


def adamw(weight: Tensor, grad: Tensor, state: dict[str, Tensor], hyper: Hypers, alive: Tensor) -> None:
    """AdamW as torch.optim has it: decoupled decay, bias corrections, eps beside the root."""
    average, square = state["exp_avg"], state["exp_avg_sq"]
    average.lerp_(grad, 1 - hyper["beta1"])
    square.mul_(hyper["beta2"]).add_((1 - hyper["beta2"]) * grad * grad)
    update = average / (square.sqrt() / hyper["correction2"].sqrt() + hyper["eps"]) / hyper["correction1"]
    weight.sub_(torch.where(alive, hyper["lr"] * (update + hyper["weight_decay"] * weight), 0.0))


def lion(weight: Tensor, grad: Tensor, state: dict[str, Tensor], hyper: Hypers, alive: Tensor) -> None:
    """`W ← W − lr·(sign(β₁A + (1 − β₁)∇W) + decay·W)`, `A ← β₂A + (1 − β₂)∇W`."""
    average = state["exp_avg"]
    update = torch.sign(torch.lerp(grad, average, hyper["beta1"]))
    average.lerp_(grad, 1 - hyper["beta2"])
    weight.sub_(torch.where(alive, hyper["lr"] * (update + hyper["weight_decay"] * weight), 0.0))


def muon_average(grad: Tensor, state: dict[str, Tensor], hyper: Hypers) -> Tensor:
    """Muon's momentum, and what is to be made orthogonal."""
    average = state["momentum_buffer"]
    average.lerp_(grad, 1 - hyper["momentum"])
    ahead = hyper["momentum"] * average + (1 - hyper["momentum"]) * grad
    return torch.where(hyper["nesterov"] > 0, ahead, average)


def muon_move(weight: Tensor, update: Tensor, hyper: Hypers, alive: Tensor) -> None:
    """`W ← W − lr·(s·NS(M) + decay·W)`."""
    moved = update.to(weight.dtype) + hyper["weight_decay"] * weight
    weight.sub_(torch.where(alive, hyper["lr"] * moved, 0.0))


def orthogonal(update: Tensor, shape: tuple[int, ...], eps: Tensor, shared: Mapping[str, Any]) -> Tensor:
    """`s·NS` of a stack (M, n) of tensors of one shape, all models in one batch; eps is (M, 1)."""
    in_axes, out_axes = shared["axes"]
    # The models are one more dimension in front, a stack of matrices like any other.
    axes = tuple(axis + 1 for axis in in_axes), tuple(axis + 1 for axis in out_axes)
    layout, stacked = Layout(axes, shared["rows"]), update.unflatten(1, shape)
    made = torch.empty_like(stacked)
    blocks = zip(layout.matrices(stacked), layout.fans(stacked.shape), strict=True)
    for block, (matrices, fans) in enumerate(blocks):
        each = eps.repeat_interleave(len(matrices) // len(eps), dim=0)[:, :, None]
        flat = newton_schulz(matrices, steps=shared["steps"], eps=each)
        for place, part in layout.places(made, block, flat):
            place.copy_(part * SCALES[shared["scale"]](*fans))
    return made.flatten(1)


MUON = Method(
    state=("momentum_buffer",),
    step=None,
    numbers={"momentum": 0.95, "nesterov": True, "eps": 1e-7},
    shared={"scale": "none", "axes": LINEAR, "rows": (), "steps": 5},
)

METHODS: dict[str, Method] = {
    "sgd": Method(
        state=("momentum_buffer",),
        step=sgd,
        numbers={"momentum": 0.0, "dampening": 0.0, "nesterov": False},
        without={"maximize": False},
    ),
    "adamw": Method(
        state=("exp_avg", "exp_avg_sq"),
        step=adamw,
        numbers={"eps": 1e-8, "betas": (0.9, 0.999)},
        without={"amsgrad": False, "maximize": False},
    ),
    "lion": Method(state=("exp_avg",), step=lion, numbers={"betas": (0.9, 0.99)}),
    "muon": MUON,
    "muon-original": MUON,
    "muon-kimi": MUON,
    "muon-spectral": MUON,
}
"""By rule. What the plan fixes (Lion's decoupled decay, Muon's scale) is what these functions do."""

INDIFFERENT = ("foreach", "fused", "capturable", "differentiable", "weight_decouple", "fixed_decay")
"""Options of torch's and pytorch_optimizer's that do not change the numbers, or that a plan fixes."""
