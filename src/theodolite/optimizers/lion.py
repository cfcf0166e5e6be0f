"""Lion: `A = sign(β₁M + (1 − β₁)∇W)`, then `M ← β₂M + (1 − β₂)∇W`.

References:
    Chen et al., Symbolic discovery of optimization algorithms, 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.optimizers.borrowed import DECOUPLED, NEGATED, Borrowed
from theodolite.optimizers.scaling import SIGN
from theodolite.optimizers.spec import Hypers, OptimizerSpec, State, Vectorised, by_entries


def _step(weight: Tensor, grad: Tensor, state: State, hyper: Hypers, alive: Tensor) -> None:
    average = state["exp_avg"]
    update = torch.sign(torch.lerp(grad, average, hyper["beta1"]))
    average.lerp_(grad, 1 - hyper["beta2"])
    weight.sub_(torch.where(alive, hyper["lr"] * (update + hyper["weight_decay"] * weight), 0.0))


SPECS = (
    OptimizerSpec(
        "lion",
        Borrowed("Lion"),
        update=SIGN,
        fixed=DECOUPLED,
        refused=NEGATED,
        vectorised=Vectorised(by_entries(_step), state=("exp_avg",), numbers={"betas": (0.9, 0.99)}),
    ),
)
