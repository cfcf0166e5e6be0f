"""AdamW: `A = m̂/(√v̂ + eps)`."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.optimizers.horizon import Memory
from theodolite.optimizers.scaling import GRADIENT_ENTRY, SIGN
from theodolite.optimizers.spec import Eps, Hypers, OptimizerSpec, State, Vectorised, by_entries


def adam_update(grad: Tensor, state: State, hyper: Hypers) -> Tensor:
    """The update A of many models: bias corrections, eps beside the root."""
    average, square = state["exp_avg"], state["exp_avg_sq"]
    average.lerp_(grad, 1 - hyper["beta1"])
    square.mul_(hyper["beta2"]).add_((1 - hyper["beta2"]) * grad * grad)
    return average / (square.sqrt() / hyper["correction2"].sqrt() + hyper["eps"]) / hyper["correction1"]


def _step(weight: Tensor, grad: Tensor, state: State, hyper: Hypers, alive: Tensor) -> None:
    update = adam_update(grad, state, hyper)
    weight.sub_(torch.where(alive, hyper["lr"] * (update + hyper["weight_decay"] * weight), 0.0))


SPECS = (
    OptimizerSpec(
        "adamw",
        torch.optim.AdamW,
        update=SIGN,
        eps=Eps(GRADIENT_ENTRY),  # as √v
        memory=Memory({"betas": (0.9, 0.999)}),
        keeps_squares=True,
        vectorised=Vectorised(
            by_entries(_step),
            state=("exp_avg", "exp_avg_sq"),
            numbers={"eps": 1e-8, "betas": (0.9, 0.999)},
            without={"amsgrad": False, "maximize": False},
        ),
    ),
)
