"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.optimizers.condition import gradient
from theodolite.optimizers.horizon import Memory
from theodolite.optimizers.scaling import Scaling, aspect, gradient_symbols
from theodolite.optimizers.spec import Hypers, OptimizerSpec, State, Vectorised, by_entries


def _step(weight: Tensor, grad: Tensor, state: State, hyper: Hypers, alive: Tensor) -> None:
    """`M ← momentum·M + (1 − dampening)·(∇W + decay·W)`, `W ← W − lr·M`; Nesterov's form looks ahead."""
    grad = grad + hyper["weight_decay"] * weight
    average = state["momentum_buffer"]
    # torch starts from the first gradient itself, whatever the dampening, and has none without momentum.
    whole = (hyper["count"] == 1) | (hyper["momentum"] == 0)
    kept = torch.where(whole, grad, (1 - hyper["dampening"]) * grad)
    average.mul_(hyper["momentum"]).add_(kept)
    update = torch.where(hyper["nesterov"] > 0, grad + hyper["momentum"] * average, average)
    weight.sub_(torch.where(alive, hyper["lr"] * update, 0.0))


SPECS = (
    OptimizerSpec(
        "sgd",
        torch.optim.SGD,
        # A = ∇W, so ‖A‖_R = √(n_in/n_out)·‖∇W‖₂.
        update=Scaling(
            lambda part, ratios: aspect(part, ratios) * gradient(part, ratios),
            lambda part, ratios: f"√(r_in/r_out)·{gradient_symbols(part)}",
            lambda part, ratios: f"the update is the gradient, whose norm goes as {gradient_symbols(part)}",
        ),
        degree=1,
        # Without momentum that is the same step; with momentum the decay is averaged as the gradient is.
        decoupled=False,
        memory=Memory({"momentum": 0.0}, summed=True),
        takes_sparse=True,
        vectorised=Vectorised(
            by_entries(_step),
            state=("momentum_buffer",),
            numbers={"momentum": 0.0, "dampening": 0.0, "nesterov": False},
            without={"maximize": False},
        ),
    ),
)
